"""Every engine on real files: the same bytes back, and an error that says where."""

import errno
import os
import random
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

import nvme
from gemini.units import PAGE_BYTES
from nvme import BlockStore, BufferPool, StoreLayout, Transfer
from nvme.engines.threads import Checksum
from nvme.files.file import OpenFile
from nvme.layout import combine
from tests.nvme.common import ENGINES, engine_or_skip, expected, mounted, read, write
from tests.support.disks.faults import short

SIZES = [1, 4095, 4096, 5000, (1 << 20) + 1, 4 << 20, (4 << 20) + 1, (9 << 20) + 4097]


@pytest.fixture(params=ENGINES)
def engine(request, tmp_path):
    return engine_or_skip(request.param)


def round_trips(store, pool, blocks):
    for seed in (10, 20, 30):  # a version, the other, and the first again
        for block in blocks:
            write(store, pool, block, seed + block)
        store.commit(seed)
        for block in reversed(blocks):
            assert read(store, pool, block) == expected(store, block, seed + block)


def test_every_length_round_trips_over_several_folders(engine, tmp_path):
    folders = [tmp_path / name for name in "abc"]
    for folder in folders:
        folder.mkdir()
    store = BlockStore(folders, StoreLayout.plan("d", SIZES, [3.0, 1.0, 2.0]), engine=engine)
    round_trips(store, BufferPool(1, max(SIZES)), range(len(SIZES)))
    store.close()
    assert not any(list(folder.iterdir()) for folder in folders)


@pytest.mark.parametrize("call", ["pwritev", "preadv"])
def test_a_transfer_that_comes_up_short_goes_on_where_it_stopped(call, tmp_path):
    """A signal, a quota that is near, a network: any call may move less than it was asked to."""
    store = BlockStore([tmp_path], StoreLayout.plan("d", SIZES))
    with short(call, 3 * PAGE_BYTES, "gemini-", after=1) as cut:
        round_trips(store, BufferPool(1, max(SIZES)), range(len(SIZES)))
    assert len(cut) > 1000
    store.close()


@pytest.mark.parametrize("call", ["pwritev", "preadv"])
def test_a_transfer_that_stops_is_an_error_that_says_after_how_much(call, tmp_path, monkeypatch):
    store, pool = BlockStore([tmp_path], StoreLayout.plan("d", [9 << 20])), BufferPool(1, 9 << 20)
    write(store, pool, 0, 1)
    store.commit(1)
    moved = iter([PAGE_BYTES])
    monkeypatch.setattr(nvme.files.calls, call, lambda fd, buffers, offset: next(moved, 0))
    with pytest.raises(nvme.TransferError, match=r"failed after (0|4096): it came up short"):
        (write if call == "pwritev" else read)(store, pool, 0, *[2] * (call == "pwritev"))
    monkeypatch.undo()
    store.close()


@pytest.mark.parametrize("num_threads", [1, 2, 7])
def test_many_transfers_at_a_time(num_threads, tmp_path):
    sizes = [(5 << 20) + 77 * i for i in range(7)]
    store = BlockStore(
        [tmp_path], StoreLayout.plan("d", sizes), engine=nvme.ThreadEngine(num_threads)
    )
    pool = BufferPool(len(sizes), max(sizes))
    buffers = [pool.take().view for _ in sizes]
    for block, view in enumerate(buffers):
        view[:] = random.Random(block).randbytes(view.nbytes)
    for block, view in enumerate(buffers):
        store.write(block, view)
    store.commit(1)
    for view in buffers:
        view[:] = bytes(view.nbytes)
    for ticket in [store.read(block, view) for block, view in enumerate(buffers)]:
        ticket.wait()
    for block, view in enumerate(buffers):
        nbytes = store.buffer_nbytes(block)
        assert view[:nbytes] == random.Random(block).randbytes(view.nbytes)[:nbytes]
    store.close()


def test_no_space_is_an_error_with_place_and_cause():
    engine = nvme.ThreadEngine()
    file = OpenFile(Path("/dev/full"), os.open("/dev/full", os.O_RDWR), direct=False)
    view = BufferPool(1, 6 << 20).take().view
    ticket = engine.write(Transfer(file, 8192, view, True))
    with pytest.raises(nvme.DiskFullError, match=r"write of \d+ bytes at offset \d+ of /dev/full"):
        ticket.wait()
    with pytest.raises(nvme.TransferError) as raised:
        ticket.wait()  # a ticket answers the same every time
    assert (raised.value.errno, raised.value.path) == (errno.ENOSPC, "/dev/full")
    assert raised.value.offset in (8192, 8192 + nvme.PIECE_BYTES) and raised.value.nbytes
    engine.close()


def test_a_closed_descriptor_is_an_error_and_the_next_transfer_works(tmp_path):
    engine = nvme.ThreadEngine()
    view = BufferPool(1, PAGE_BYTES).take().view
    with pytest.raises(nvme.TransferError, match="EBADF"):
        engine.read(Transfer(OpenFile(tmp_path / "x", -1, True), 0, view, True)).wait()
    path = tmp_path / "y"
    path.write_bytes(b"q" * PAGE_BYTES)
    file = OpenFile(path, os.open(path, os.O_RDWR), direct=False)
    engine.read(Transfer(file, 0, view, True)).wait()
    assert bytes(view) == b"q" * PAGE_BYTES
    engine.close()


def test_a_file_system_without_direct_io_is_used_and_said(tmp_path, caplog):
    """ecryptfs, old tmpfs and overlays refuse O_DIRECT; here squashing it needs a mount."""
    folder = tmp_path / "ram"
    folder.mkdir()
    with mounted(folder, "-t", "tmpfs", "-o", "size=64m", "none"):
        store = BlockStore([folder], StoreLayout.plan("d", SIZES), allow_ram=True)
        said = [r.getMessage() for r in caplog.records if "refuses O_DIRECT" in r.getMessage()]
        assert all(file.direct for file in store.files) != bool(said)
        round_trips(store, BufferPool(1, max(SIZES)), range(len(SIZES)))
        store.close()
        assert list(folder.iterdir()) == []


def test_buffered_files_round_trip(tmp_path):
    """What is done where O_DIRECT is refused, on a disk."""
    store = BlockStore([tmp_path], StoreLayout.plan("d", SIZES))
    for file in store.files:
        os.close(file.fd)
        file.fd, file.direct = os.open(file.path, os.O_RDWR), False
    round_trips(store, BufferPool(1, max(SIZES)), range(len(SIZES)))
    store.close()


def test_the_probe_measures_and_leaves_nothing(tmp_path):
    found = nvme.probe(tmp_path, seconds=0.2)
    assert found.engine == "threads" and 0 < min(found.read, found.write) <= found.mixed
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_engine_is_named(tmp_path):
    with pytest.raises(ValueError, match="'magic' is unknown"):
        nvme.make_engine("magic")


def thin(fd, buffers, offset):
    """pwritev that leaves a hole for zeros, so that gigabytes of them take no disk."""
    (buffer,) = buffers
    if not any(memoryview(buffer).cast("Q")):
        return len(buffer)
    return os.pwritev(fd, buffers, offset)


@pytest.mark.ci
def test_a_block_of_more_than_2_gib_round_trips(tmp_path, monkeypatch):
    """Random bytes round every boundary where a length could overflow, zeros between."""
    monkeypatch.setattr(nvme.files.calls, "allocate", lambda fd, offset, n: os.ftruncate(fd, n))
    monkeypatch.setattr(nvme.files.calls, "pwritev", thin)
    nbytes = (1 << 31) + (1 << 20) + 1
    store = BlockStore([tmp_path], StoreLayout.plan("d", [nbytes], num_versions=1))
    pool = BufferPool(1, nbytes)
    view = pool.take().view
    edges = [0, (1 << 31) - 2048, (1 << 31) + 4096, nbytes - 2048]
    for edge in edges:
        view[edge : edge + 2048] = random.Random(edge).randbytes(2048)
    store.write(0, view).wait()
    for edge in edges:
        view[edge : edge + 2048] = bytes(2048)
    view[5 << 20] = 1  # must be read over
    store.read_uncommitted(0, view).wait()  # verifies every piece
    for edge in edges:
        assert view[edge : edge + 2048] == random.Random(edge).randbytes(2048)
    assert view[5 << 20] == 0
    assert store.paths[0].stat().st_blocks * 512 < 64 << 20
    store.close()


@pytest.mark.parametrize("name", ENGINES)
def test_places_beyond_4_gib_are_where_they_are(name, tmp_path):
    """In a file with holes."""
    engine = engine_or_skip(name)
    (file,) = nvme.files.file.create_files([tmp_path], [PAGE_BYTES])
    pool, nbytes = BufferPool(1, (5 << 20) + PAGE_BYTES), (5 << 20) + PAGE_BYTES
    view = pool.take().view
    places = [0, (1 << 31) - PAGE_BYTES, 1 << 32, (3 << 31) + (1 << 30) - PAGE_BYTES]
    for place in places:
        view[:] = random.Random(place).randbytes(nbytes)
        engine.write(Transfer(file, place, view, True)).wait()
    for place in places:
        view[:] = bytes(nbytes)
        engine.read(Transfer(file, place, view, True)).wait()
        assert view == random.Random(place).randbytes(nbytes)
    engine.close()
    nvme.files.file.remove_files([file])


def test_a_ticket_with_its_result_lets_go_of_what_its_threads_had():
    """A store keeps one for each block that was written. Two threads may wait for one of them."""
    pieces = [Future(), Future()]
    ticket = Checksum(pieces)
    with ThreadPoolExecutor(2) as waiting:
        found = [waiting.submit(ticket.wait) for _ in range(2)]
        assert not ticket.ready()
        for piece, checksum in zip(pieces, (7, 9), strict=True):
            piece.set_result(checksum)
    assert [one.result() for one in found] == [combine([7, 9])] * 2 == [ticket.wait()] * 2
    assert ticket.ready() and not ticket.pieces
    failed = Future()
    failed.set_exception(OSError("disk"))
    ticket = Checksum([failed])
    for _ in range(2):
        with pytest.raises(OSError, match="disk"):
            ticket.wait()
