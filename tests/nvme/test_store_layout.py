import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemini.units import PAGE_BYTES
from nvme.layout import Header, Index, IndexEntry, StoreFormatError, StoreLayout

sizes = st.lists(st.integers(1, 50_000), min_size=1, max_size=30)


@given(sizes, st.lists(st.floats(0.1, 10), min_size=1, max_size=3))
def test_extents_are_whole_pages_that_do_not_overlap(nbytes, weights):
    layout = StoreLayout.plan("d", nbytes, weights)
    ends = [layout.index_offset(1) + layout.index_slot_nbytes if f == 0 else 0 for f in range(3)]
    for payload, versions in zip(nbytes, layout.extents(), strict=True):
        for extent in versions:
            assert extent.offset % PAGE_BYTES == extent.nbytes % PAGE_BYTES == 0
            assert extent.nbytes >= payload and extent.offset >= ends[extent.file]
            ends[extent.file] = extent.offset + extent.nbytes
    for file, length in enumerate(layout.file_nbytes()):
        assert length >= ends[file]


@given(sizes, st.integers(1, 3))
def test_header_round_trips(nbytes, num_files):
    layout = StoreLayout.plan("digest", nbytes, [1.0] * num_files)
    for file, needed in enumerate(layout.file_nbytes()):
        header = Header.decode(layout.header(file))
        assert (header.layout(), header.file) == (layout, file)
        assert header.index_offset(1) - layout.index_slot_nbytes == layout.header_nbytes(file)
        header.check_size(needed)
        with pytest.raises(StoreFormatError, match="was cut"):
            header.check_size(needed - 1)


def test_a_damaged_or_foreign_header_is_refused():
    header = bytearray(StoreLayout.plan("d", [5]).header(0))
    header[40] ^= 1
    with pytest.raises(StoreFormatError, match="damaged"):
        Header.decode(bytes(header))
    with pytest.raises(StoreFormatError, match="no block store"):
        Header.decode(b"\x7fELF" + bytes(5000))
    header[8] = 99
    with pytest.raises(StoreFormatError, match="version 99"):
        Header.decode(bytes(header))


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 2**32 - 1)), min_size=1, max_size=50))
def test_index_round_trips_and_a_torn_one_is_none(entries):
    index = Index(7, 3, tuple(IndexEntry(*entry) for entry in entries))
    data = index.encode()
    count = len(entries)
    assert Index.decode(data + bytes(100), count) == index
    assert Index.decode(bytes(len(data)), count) is None
    assert Index.decode(data, count + 1) is None and Index.decode(data, count - 1) is None
    for end in (0, 23, len(data) - 1):
        assert Index.decode(data[:end], count) is None
    assert Index.decode(data[:16] + bytes([count + 1]) + data[17:], count) is None
    torn = data[:-1] + bytes([data[-1] ^ 1])
    assert Index.decode(torn, count) is None


def test_blocks_are_striped_in_proportion_to_speed():
    layout = StoreLayout.plan("d", [4096] * 300, [2.0, 1.0])
    assert layout.file_of_block.count(0) == 200
