"""Blocks on real files: round trips, versions, faults."""

import errno
import faulthandler
import multiprocessing
import os
import socket
import subprocess
import sys

import pytest

import nvme
from gemini.units import PAGE_BYTES
from nvme import BlockStore, BufferPool, StoreLayout, WriteMeter
from nvme.engines.threads import ThreadEngine
from nvme.files.file import file_system
from tests.nvme.common import ENGINES, engine_or_skip
from tests.nvme.common import read as read_payload
from tests.support.disks.faults import failing
from tests.support.until import until

SIZES = [1, 4096, 5000, 3 << 20, (4 << 20) + 4096, (9 << 20) + 1]


@pytest.fixture
def pool():
    return BufferPool(3, max(SIZES))


def write(store, pool, block, byte):
    buffer = pool.take()
    buffer.view[:] = bytes([byte]) * buffer.view.nbytes
    store.write(block, buffer.view).wait()
    pool.give(buffer)


def read(store, pool, block):
    """The payload of a block; asserts that it is one byte repeated, and answers it."""
    data = read_payload(store, pool, block)
    assert data == data[:1] * len(data)
    return data[0]


@pytest.fixture
def store(tmp_path):
    store = BlockStore([tmp_path], StoreLayout.plan("d", SIZES))
    yield store
    store.close()


def test_blocks_of_all_sizes_round_trip(store, pool):
    for block in range(len(SIZES)):
        write(store, pool, block, block + 1)
    store.commit(1)
    assert [read(store, pool, b) for b in range(len(SIZES))] == [1, 2, 3, 4, 5, 6]


def test_a_store_of_one_version_takes_half_the_disk(store, pool, tmp_path):
    one = BlockStore([tmp_path], StoreLayout.plan("d", SIZES, num_versions=1))
    full, halved = (sum(path.stat().st_blocks for path in s.paths) * 512 for s in (store, one))
    saved = sum(store.buffer_nbytes(b) for b in range(len(SIZES)))
    assert store.file_bytes - one.file_bytes == saved and abs(full - halved - saved) <= PAGE_BYTES
    for value in (1, 2):
        buffer = pool.take()
        buffer.view[:] = bytes([value]) * buffer.view.nbytes
        one.write(3, buffer.view)
        one.flush()
        buffer.view[:] = bytes(buffer.view.nbytes)
        one.read_uncommitted(3, buffer.view).wait()
        assert bytes(buffer.view[:1]) == bytes([value])
        pool.give(buffer)
    with pytest.raises(ValueError, match="commits nothing"):
        one.commit(1)
    one.close()


def test_files_of_one_owner_share_a_write_budget(tmp_path, pool):
    meter = WriteMeter(6 * PAGE_BYTES)
    stores = [BlockStore([tmp_path], StoreLayout.plan("d", SIZES), meter=meter) for _ in range(2)]
    for store in stores:
        write(store, pool, 2, 1)  # two pages
    for store in stores:
        store.check_step(2 * PAGE_BYTES)
        with pytest.raises(
            nvme.WriteBudgetError, match=r"parking writes 12\.00 KiB, to 28\.00 KiB"
        ):
            store.check_step(3 * PAGE_BYTES, "parking")
        store.close()


def test_a_write_counts_after_commit_only(store, pool):
    for value in (1, 2, 3):
        write(store, pool, 3, value)
        if value > 1:
            assert read(store, pool, 3) == value - 1
        store.commit(value)
        assert read(store, pool, 3) == value
    assert store.committed_step == 3


def test_rollback_keeps_the_last_commit_and_the_next_write_is_right(store, pool):
    write(store, pool, 2, 1)
    store.commit(1)
    write(store, pool, 2, 9)
    write(store, pool, 1, 9)
    store.rollback()
    assert read(store, pool, 2) == 1
    write(store, pool, 1, 2)
    store.commit(2)
    assert read(store, pool, 1) == 2 and read(store, pool, 2) == 1


def test_a_version_that_was_pinned_is_read_as_it_was_committed_or_not_at_all(store, pool):
    write(store, pool, 1, 1)
    store.commit(1)
    pin = store.pin([1])
    write(store, pool, 1, 2)
    store.commit(2)
    buffer = pool.take()
    checksum = pin.read(1, buffer.view).wait()
    pin.close()  # what is held keeps its store from being closed
    pin.check(1, checksum)
    assert buffer.view[0] == 1
    with pytest.raises(nvme.ChecksumError, match="block 1 at offset"):
        pin.check(1, 0)


def test_a_flipped_byte_is_found_and_named(store, pool):
    write(store, pool, 3, 5)
    store.commit(1)
    path, extent = store.paths[0], store.layout.extents()[3][0]
    with path.open("r+b") as file:
        file.seek(extent.offset + 1_000_000)
        file.write(b"\x06")
    with pytest.raises(nvme.ChecksumError, match=rf"block 3 at offset {extent.offset}.*{path}"):
        read(store, pool, 3)


def test_a_truncated_file_is_a_transfer_error_with_place_and_length(store, pool):
    write(store, pool, 5, 5)
    store.commit(1)
    os.truncate(store.paths[0], store.layout.extents()[5][0].offset + PAGE_BYTES)
    with pytest.raises(nvme.TransferError, match=r"read of \d+ bytes at offset \d+ of .*short"):
        read(store, pool, 5)


def test_write_budget_is_refused_before_it_is_passed(tmp_path, pool):
    store = BlockStore([tmp_path], StoreLayout.plan("d", SIZES), meter=WriteMeter(10_000))
    with pytest.raises(nvme.WriteBudgetError, match="nvme_write_budget"):
        store.check_step(10_001)
    store.check_step(10_000)
    write(store, pool, 0, 1)
    with pytest.raises(nvme.WriteBudgetError, match="nvme_write_budget"):
        store.check_step(10_001 - store.buffer_nbytes(0))
    store.close()


def test_files_are_private_and_removed_on_close(tmp_path, store):
    assert [oct(path.stat().st_mode & 0o777) for path in store.paths] == ["0o600"]
    store.close()
    store.close()
    assert list(tmp_path.iterdir()) == []


def test_what_no_disk_holds_is_refused_before_the_disk_is_filled(tmp_path, monkeypatch):
    """Trying would take all that there is, from everybody, until it fails."""
    asked = []
    monkeypatch.setattr(
        nvme.files.calls, "allocate", lambda fd, offset, nbytes: asked.append(nbytes)
    )
    huge = os.statvfs(tmp_path).f_blocks * os.statvfs(tmp_path).f_frsize
    with pytest.raises(nvme.DiskFullError, match=r"cannot hold .* free, ENOSPC"):
        BlockStore([tmp_path], StoreLayout.plan("d", [huge]))
    assert list(tmp_path.iterdir()) == [] and not asked


def test_a_limit_on_file_size_counts_as_full(tmp_path):
    code = """
import resource, sys, nvme
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
try:
    nvme.BlockStore([sys.argv[1]], nvme.StoreLayout.plan("d", [8 << 20]))
except nvme.DiskFullError as error:
    print("full:", error)
"""
    out = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True,
        encoding="utf-8",
        env={"PYTHONPATH": ":".join(sys.path)}, check=True,
    )  # fmt: skip
    assert out.stdout.startswith("full:")
    assert list(tmp_path.iterdir()) == []


def test_bad_folders_are_refused_with_what_to_do(tmp_path):
    (tmp_path / "file").touch()
    for folder, said in (("missing", "does not exist"), ("file", "is a file")):
        with pytest.raises(nvme.FolderError, match=said):
            nvme.check_folder(tmp_path / folder)


def test_a_folder_has_another_name_on_every_host_and_rank(tmp_path, monkeypatch):
    host, given = socket.gethostname(), "$SCRATCH_OF_TEST/{node}-{rank}-{local_rank}"
    with pytest.raises(nvme.FolderError, match=r"names \$SCRATCH_OF_TEST, which this process does"):
        nvme.check_folder(given)
    with pytest.raises(nvme.FolderError, match=r"names \$SCRATCH_OF_TEST, which this process does"):
        nvme.local_folder("${SCRATCH_OF_TEST}/{rank}")
    monkeypatch.setenv("SCRATCH_OF_TEST", str(tmp_path))
    for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID", "SLURM_LOCALID"):
        monkeypatch.delenv(name, raising=False)
    assert nvme.check_folder(given) == tmp_path / f"{host}-0-0"
    monkeypatch.setenv("SLURM_PROCID", "5")
    assert nvme.local_folder(given) == tmp_path / f"{host}-5-0"
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert nvme.local_folder(given) == tmp_path / f"{host}-3-1"
    assert [path.name for path in tmp_path.iterdir()] == [f"{host}-0-0"]
    with pytest.raises(nvme.FolderError, match="does not exist"):  # a disk that is not mounted
        nvme.check_folder(tmp_path / "missing" / "{rank}")
    with pytest.raises(nvme.FolderError, match=r"has \{host\}; expected \{node\}, \{rank\} or"):
        nvme.local_folder(tmp_path / "{host}")


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="no /dev/shm")
def test_ram_is_refused_unless_it_is_allowed():
    with pytest.raises(nvme.FolderError, match="is RAM"):
        nvme.check_folder("/dev/shm")
    nvme.check_folder("/dev/shm", allow_ram=True)
    assert file_system(nvme.default_folder()) != "tmpfs"


def own_store(folder):
    """In another process: a store of its own, whole, and gone in the end."""
    faulthandler.dump_traceback_later(60, exit=True, file=sys.__stderr__)  # it says where it hangs
    store = BlockStore([folder], StoreLayout.plan("d", [5000]))
    (path,) = store.paths
    pool = BufferPool(1, 5000)
    write(store, pool, 0, 8)
    store.commit(1)
    whole = read(store, pool, 0) == 8
    store.close()
    sys.exit(0 if whole and not path.exists() else 1)


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_children_of_any_kind_have_stores_of_their_own(method, store, pool, tmp_path):
    write(store, pool, 0, 3)
    store.commit(1)
    kind = multiprocessing.get_context(method)
    children = [kind.Process(target=own_store, args=(tmp_path,), daemon=True) for _ in range(3)]
    for child in children:
        child.start()
    for child in children:
        child.join(90)
    assert [child.exitcode for child in children] == [0, 0, 0]
    assert read(store, pool, 0) == 3
    assert nvme.orphans(tmp_path) == ()


def end_without_closing(folder):
    store = BlockStore([folder], StoreLayout.plan("d", [5000]))
    pool = BufferPool(1, 5000)
    write(store, pool, 0, 8)
    store.commit(1)
    kept.append(store)


kept = []


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_children_that_end_leave_no_files(method, tmp_path):
    """A step is kept for who was killed, and not for who came to its end."""
    process = multiprocessing.get_context(method).Process(
        target=end_without_closing, args=(tmp_path,)
    )
    process.start()
    process.join()
    assert process.exitcode == 0 and not list(tmp_path.iterdir())


@pytest.mark.parametrize("engine", ENGINES)
def test_a_store_that_is_dropped_ends_its_threads_and_removes_its_files(engine, tmp_path):
    import gc
    import threading

    before = set(threading.enumerate())
    store = BlockStore([tmp_path], StoreLayout.plan("d", [5000]), engine=engine_or_skip(engine))
    pool = BufferPool(1, 5000)
    write(store, pool, 0, 3)
    del store
    gc.collect()
    until(lambda: not set(threading.enumerate()) - before)
    assert not list(tmp_path.iterdir())


def test_buffers_are_page_aligned_and_exact():
    import ctypes

    pool = BufferPool(3, 10_000)
    buffers = [pool.take() for _ in range(3)]
    for buffer in buffers:
        assert buffer.view.nbytes == 12_288
        assert ctypes.addressof(ctypes.c_char.from_buffer(buffer.view)) % PAGE_BYTES == 0
    with pytest.raises(RuntimeError, match="in use"):
        pool.take()


def test_checksums_are_those_of_zlib_whoever_computes_them():
    """A file written with isal is read without it."""
    import random
    import zlib

    from nvme.layout import crc32

    for nbytes in (0, 1, 4095, 4 << 20):
        data = random.Random(nbytes).randbytes(nbytes)
        assert crc32(data) == zlib.crc32(data)
        assert crc32(data, 7) == zlib.crc32(data, 7)


@pytest.mark.parametrize("takes_holes", [True, False])
def test_space_of_forgotten_blocks_is_given_back_and_nobody_reads_them(
    store, pool, monkeypatch, takes_holes
):
    if not takes_holes:  # a file system without them
        monkeypatch.setattr("nvme.files.calls.punch", lambda *_: False)
    for block in range(len(SIZES)):
        write(store, pool, block, block + 1)
    store.commit(1)
    on_disk, before = store.paths[0].stat().st_blocks * 512, store.file_bytes
    store.forget([2, 4])
    given_back = before - store.file_bytes
    assert given_back == takes_holes * 2 * (store.buffer_nbytes(2) + store.buffer_nbytes(4))
    # the map of a file's extents may take a page
    assert abs(on_disk - store.paths[0].stat().st_blocks * 512 - given_back) <= PAGE_BYTES
    with pytest.raises(ValueError, match="never committed"):
        store.read(2, memoryview(bytearray(store.buffer_nbytes(2))))
    write(store, pool, 3, 9)
    store.commit(2)
    assert [read(store, pool, block) for block in (0, 1, 3, 5)] == [1, 2, 9, 6]
    with nvme.recover(store.paths) as found:
        assert found.block(3)[:1] == b"\x09"
        with pytest.raises(nvme.ChecksumError):
            found.block(2)
    # it comes back, and nothing else is written for it
    with failing("allocate", errno.ENOSPC, times=1):
        for error in [nvme.DiskFullError] * takes_holes:
            with pytest.raises(error, match="cannot hold"):
                store.remember([2])
    assert before - store.file_bytes == given_back
    written = store.traffic.written_bytes
    store.remember([2])
    assert store.file_bytes == before - takes_holes * 2 * store.buffer_nbytes(4)
    write(store, pool, 2, 7)
    store.commit(3)
    assert store.traffic.written_bytes == written + store.buffer_nbytes(2)
    assert [read(store, pool, block) for block in (0, 2, 3)] == [1, 7, 9]


def test_blocks_that_are_not_there_take_no_space(tmp_path):
    layout = StoreLayout.plan("d", [1 << 20] * 4)
    whole, part = BlockStore([tmp_path], layout), BlockStore([tmp_path], layout, blocks=[1])
    assert whole.file_bytes - part.file_bytes == 2 * 3 * (1 << 20)
    for store in (whole, part):
        status = store.paths[0].stat()
        assert status.st_size == sum(layout.file_nbytes())
        assert abs(status.st_blocks * 512 - store.file_bytes) <= 2 * PAGE_BYTES
        store.close()


def test_what_is_about_to_count_is_read_as_it_was_written_last(store, pool):
    """Beside a commit: of a block that was not written, or could not be, the committed version."""

    def latest(block):
        buffer = pool.take()
        store.read_latest(block, buffer.view).wait()
        found = buffer.view[0]
        pool.give(buffer)
        return found

    for block in (0, 1, 2):
        write(store, pool, block, 1)
    store.commit(1)
    write(store, pool, 0, 2)
    assert [latest(block) for block in (0, 1)] == [2, 1]
    with failing("pwritev", errno.EIO, times=1), pytest.raises(nvme.TransferError):
        write(store, pool, 2, 2)
    assert latest(2) == 1
    store.rollback()
    assert latest(0) == 1
    write(store, pool, 0, 3)
    store.commit(2)
    assert latest(0) == 3


class Hooked:
    """An engine that does something once, when a write has ended and who waits goes on."""

    def __init__(self, engine):
        self._engine, self.then = engine, None
        self.read, self.close = engine.read, engine.close

    def write(self, transfer):
        return HookedTicket(self, self._engine.write(transfer))


class HookedTicket:
    def __init__(self, engine, ticket):
        self._engine, self._ticket = engine, ticket
        self.ready = ticket.ready

    def wait(self):
        found = self._ticket.wait()
        then, self._engine.then = self._engine.then, None
        if then is not None:
            then()
        return found


def test_a_write_that_begins_to_count_while_it_is_asked_for_is_read(tmp_path, pool):
    """As another thread commits; its version before is not what was written last."""
    engine = Hooked(ThreadEngine())
    store = BlockStore([tmp_path], StoreLayout.plan("d", SIZES), engine=engine)
    write(store, pool, 0, 1)
    store.commit(1)
    write(store, pool, 0, 2)
    engine.then = lambda: store.commit(2)
    buffer = pool.take()
    store.read_latest(0, buffer.view).wait()
    assert buffer.view[0] == 2 and engine.then is None
    store.close()
