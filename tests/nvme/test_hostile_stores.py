"""Files of stores from strangers: `recover` says no in words, and takes little memory."""

import json
import struct
import tempfile
import zlib
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import nvme
from nvme import BlockStore, BufferPool, StoreLayout
from nvme.layout import Index, IndexEntry
from tests.support.disks.hostile import assert_takes_little

FUZZ = settings(max_examples=100, suppress_health_check=list(HealthCheck), deadline=None)
SIZES = [5000, 1, 9000]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The bytes of a store with two commits."""
    folder = tmp_path_factory.mktemp("store")
    store = BlockStore([folder], StoreLayout.plan("d", SIZES))
    pool = BufferPool(1, max(SIZES))
    view = pool.take().view
    for step in (1, 2):
        for block in range(len(SIZES)):
            view[:] = bytes([10 * step + block]) * view.nbytes
            store.write(block, view).wait()
        store.commit(step)
    data = store.paths[0].read_bytes()
    store.close()
    return data


def header(text, version=1):
    data = struct.pack("<8sIII", b"GEMINIBS", version, len(text), zlib.crc32(text)) + text
    return data + bytes(-len(data) % 4096)


def fields_of(data):
    length = struct.unpack_from("<I", data, 12)[0]
    return json.loads(data[20 : 20 + length])


def read(path):
    """Everything that can be had; in words of ours where it cannot."""

    def attempt():
        try:
            with nvme.recover([path]) as found:
                for block in range(found.layout.num_blocks):
                    try:
                        assert len(found.block(block)) == found.layout.block_nbytes[block]
                    except nvme.ChecksumError:
                        continue
        except nvme.StoreFormatError:
            return
        finally:
            nvme.orphans(path.parent)
            nvme.files.orphan_files.remove_stepless([path.parent])

    assert_takes_little(attempt, path)


GREEDY = {
    "blocks without end": {"block_nbytes": [[1, 10**8]], "file_of_block": [[0, 10**8]]},
    "blocks in another file": {
        "block_nbytes": [[1, 10**8]], "file_of_block": [[1, 10**8]], "num_files": 2},
    "more blocks than numbers": {"block_nbytes": [[1, 1 << 61]], "file_of_block": [[0, 1 << 61]]},
    "a large block": {"block_nbytes": [[1 << 50, 1]], "file_of_block": [[0, 1]]},
    "many files": {"num_files": 1 << 40},
    "blocks without a file": {"file_of_block": [[0, 2]]},
    "a negative count": {"block_nbytes": [[5000, -1]]},
    "no runs": {"block_nbytes": 5},
    "runs of words": {"block_nbytes": ["ab"]},
    "versions": {"num_versions": 1000},
    "no digest": {"digest": None},
    "a file that is none": {"file": "a"},
    "another file": {"file": 3},
}  # fmt: skip


@pytest.mark.parametrize("kind", GREEDY)
def test_a_header_may_lie_about_everything(kind, whole, tmp_path):
    text = json.dumps(fields_of(whole) | GREEDY[kind]).encode()
    path = tmp_path / "gemini-x.blocks"
    path.write_bytes(header(text) + whole[4096:])

    def attempt():
        with pytest.raises(nvme.StoreFormatError, match="gemini-x"), nvme.recover([path]):
            pass

    assert_takes_little(attempt, path)


@pytest.mark.parametrize("text", [b"[]", b"5", b"{}", b"[" * 500_000, b"{", b"\xff",
                                  b"[" + b"[]," * 300_000 + b"[]]"])  # fmt: skip
def test_a_header_may_be_any_text(text, whole, tmp_path):
    path = tmp_path / "gemini-x.blocks"
    path.write_bytes(header(text) + whole[4096:])

    def attempt():
        with pytest.raises(nvme.StoreFormatError), nvme.recover([path]):
            pass

    assert_takes_little(attempt, path)


def test_an_index_of_other_blocks_is_none(whole, tmp_path):
    path = tmp_path / "gemini-x.blocks"
    other = Index(9, 9, ()).encode()
    path.write_bytes(whole[:4096] + other.ljust(4096, b"\0") + whole[8192:])
    with nvme.recover([path]) as found:
        assert found.index.step == 1 and found.block(0) == bytes([10]) * 5000


def test_an_index_that_says_another_number_of_blocks_is_none():
    data = Index(9, 9, (IndexEntry(0, 5), IndexEntry(1, 6))).encode()
    changed = bytearray(data)
    changed[16] = 3
    assert Index.step_in(data, 2) == 9 and Index.step_in(bytes(changed), 2) is None


@FUZZ
@given(data=st.data())
def test_a_store_may_have_any_bytes(whole, data):
    changed = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, 3 * 4096) | st.integers(0, len(changed)))
        piece = data.draw(st.binary(max_size=20))
        if data.draw(st.booleans()):
            changed[place : place + len(piece)] = piece
        else:
            del changed[place : place + data.draw(st.integers(0, 5000))]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "gemini-x.blocks"
        path.write_bytes(changed)
        read(path)


VALUES = st.none() | st.integers() | st.text(max_size=3) | st.lists(
    st.lists(st.integers(), max_size=3), max_size=3
) | st.sampled_from([[[1, 1 << 40]], [[4096, 3]], 0, 2, 1 << 62])  # fmt: skip


@pytest.mark.ci
@FUZZ
@given(st.data())
def test_a_header_may_say_anything(whole, data):
    fields = fields_of(whole)
    for name in data.draw(st.lists(st.sampled_from(sorted(fields)), min_size=1, max_size=3)):
        fields[name] = data.draw(VALUES)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "gemini-x.blocks"
        path.write_bytes(header(json.dumps(fields).encode()) + whole[4096:])
        read(path)
