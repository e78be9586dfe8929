"""What happens to folders and files from outside: full, read-only, removed, shared, forked."""

import errno
import json
import logging
import os
import shutil
import tempfile
import threading
from pathlib import Path

import pytest

import nvme
from bench.shared.workers import run_processes
from nvme import BlockStore, BufferPool, StoreLayout
from tests.nvme.common import ENGINES, engine_or_skip, expected, mounted, read, write
from tests.support.disks.faults import failing, file_size_limit, short
from tests.support.until import until

SIZES = [5000, 3 << 20, (4 << 20) + 4096]
ONE = StoreLayout.plan("d", [5000])


# -- full -----------------------------------------------------------------------------------------


def test_a_full_file_system_is_said_with_what_is_free_and_leaves_nothing(tmp_path):
    folder = tmp_path / "small"
    folder.mkdir()
    with mounted(folder, "-t", "tmpfs", "-o", "size=8m", "none"):
        with pytest.raises(nvme.DiskFullError, match=r"cannot hold 14.* \(8.00 MiB free"):
            BlockStore([folder], StoreLayout.plan("d", [7 << 20]), allow_ram=True)
        assert list(folder.iterdir()) == []
        store = BlockStore([folder], StoreLayout.plan("d", [3 << 20]), allow_ram=True)
        (folder / "rest").write_bytes(bytes(os.statvfs(folder).f_bavail * 4096))
        write(store, BufferPool(1, 3 << 20), 0, 1)  # what is allocated is there to be written
        store.commit(1)
        store.close()


def test_the_second_of_two_folders_may_be_the_full_one(tmp_path):
    folder = tmp_path / "small"
    folder.mkdir()
    with mounted(folder, "-t", "tmpfs", "-o", "size=1m", "none"):
        layout = StoreLayout.plan("d", [1 << 20] * 8, [1.0, 1.0])
        with pytest.raises(nvme.DiskFullError, match="small"):
            BlockStore([tmp_path, folder], layout, allow_ram=True)
        assert list(folder.iterdir()) == []
    assert [path.name for path in tmp_path.iterdir()] == ["small"]


def test_a_limit_that_comes_later_fails_the_write_and_keeps_the_last_commit(tmp_path):
    store, pool = BlockStore([tmp_path], StoreLayout.plan("d", SIZES)), BufferPool(1, max(SIZES))
    for block in range(3):
        write(store, pool, block, block)
    store.commit(1)
    with file_size_limit(1 << 20):
        write(store, pool, 0, 9)
        ticket = store.write(2, pool.take().view)
        with pytest.raises(nvme.DiskFullError, match="EFBIG"):
            ticket.wait()
        with pytest.raises(nvme.DiskFullError, match="EFBIG"):
            store.flush()
    store.rollback()
    pool = BufferPool(1, max(SIZES))
    assert [read(store, pool, b) for b in range(3)] == [expected(store, b, b) for b in range(3)]
    store.close()


def test_an_index_that_cannot_be_written_fails_the_next_step_and_not_this_one(tmp_path):
    """Other ranks have agreed to this step already."""
    store, pool = BlockStore([tmp_path], ONE), BufferPool(1, 5000)
    write(store, pool, 0, 1)
    store.commit(1)
    write(store, pool, 0, 2)
    store.flush()
    with file_size_limit(4096):
        store.commit(2)
    assert read(store, pool, 0) == expected(store, 0, 2) and store.committed_step == 2
    with pytest.raises(nvme.TransferError, match="EFBIG"):
        store.check_step(0)
    with nvme.recover(store.paths) as found:  # what is on disk is the step before, whole
        assert found.index.step == 1 and found.block(0) == expected(store, 0, 1)
    store.close()


# -- calls that fail -----------------------------------------------------------------------------


@pytest.mark.parametrize("call, code, kind", [
    ("open_file", errno.EROFS, nvme.FolderError),
    ("open_file", errno.EACCES, nvme.FolderError),
    ("open_file", errno.ENOENT, nvme.FolderError),
    ("open_file", errno.EDQUOT, nvme.DiskFullError),
    ("lock", errno.ENOLCK, nvme.FolderError),
    ("allocate", errno.ENOSPC, nvme.DiskFullError),
    ("allocate", errno.EIO, nvme.FolderError),
    ("pwritev", errno.EFBIG, nvme.DiskFullError),
    ("fdatasync", errno.EIO, nvme.TransferError),
    ("fsync", errno.EIO, nvme.FolderError),
])  # fmt: skip
def test_a_store_that_cannot_be_made_says_where_and_why_and_leaves_nothing(
    call, code, kind, tmp_path
):
    threads = set(threading.enumerate())
    with failing(call, code) as failed, pytest.raises(kind) as raised:
        BlockStore([tmp_path], ONE)
    assert failed and str(tmp_path) in str(raised.value)
    assert errno.errorcode[code] in str(raised.value)
    # others', of what an earlier test has left to the collector, may end meanwhile
    assert list(tmp_path.iterdir()) == [] and set(threading.enumerate()) <= threads


def test_a_disk_that_cannot_sync_fails_the_step_before_it_counts(tmp_path):
    store, pool = BlockStore([tmp_path], ONE), BufferPool(1, 5000)
    write(store, pool, 0, 1)
    store.commit(1)
    write(store, pool, 0, 2)
    with failing("fdatasync", errno.EIO), pytest.raises(nvme.TransferError) as raised:
        store.flush()
    assert str(raised.value) == f"sync of {store.paths[0]} failed: EIO, Input/output error"
    assert (raised.value.errno, raised.value.path) == (errno.EIO, str(store.paths[0]))
    store.rollback()
    assert read(store, pool, 0) == expected(store, 0, 1)
    store.close()


def test_an_index_that_comes_up_short_fails_the_next_step(tmp_path):
    store, pool = BlockStore([tmp_path], ONE), BufferPool(1, 5000)
    write(store, pool, 0, 1)
    store.commit(1)
    write(store, pool, 0, 2)
    store.flush()
    with short("pwritev", 512) as cut:
        store.commit(2)
    assert cut == [4096]
    with pytest.raises(nvme.TransferError, match=r"failed after 512: it came up short"):
        store.check_step(0)
    store.close()


def test_a_file_that_cannot_be_closed_is_said_when_all_is_closed(tmp_path):
    folders = [tmp_path / name for name in "ab"]
    for folder in folders:
        folder.mkdir()
    store = BlockStore(folders, StoreLayout.plan("d", [5000] * 2, [1.0, 1.0]))
    descriptors = [file.fd for file in store.files]
    with (
        failing("close", errno.EIO, first=os.close) as failed,
        pytest.raises(nvme.TransferError, match=r"close of .*blocks failed: EIO"),
    ):
        store.close()
    assert len(failed) == 2 and not any(list(folder.iterdir()) for folder in folders)
    for fd in descriptors:
        with pytest.raises(OSError, match="Bad file"):
            os.fstat(fd)
    store.close()


# -- folders that cannot be used ------------------------------------------------------------------


def try_as_somebody(index, folder):
    """What is said of folders that this process, which is not root, may not use."""
    if os.geteuid() == 0:
        os.setuid(65534)
    if not os.access(folder, os.X_OK):
        return None
    said = []
    for name in ("read-only", "hidden/inner"):
        try:
            nvme.check_folder(os.path.join(folder, name))
        except nvme.FolderError as error:
            said.append(str(error))
    return said


def test_a_folder_without_permission_is_refused():
    """In a folder of its own that everybody may enter, as pytest's may be entered by us alone."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "hidden/inner").mkdir(parents=True)
        (folder / "read-only").mkdir()
        (folder / "read-only").chmod(0o555)
        (folder / "hidden").chmod(0o000)
        folder.chmod(0o755)
        (said,) = run_processes(try_as_somebody, 1, name)
        (folder / "hidden").chmod(0o700)
    if said is None:
        pytest.skip(f"others cannot enter {tempfile.gettempdir()}")
    assert "not writable" in said[0] and "out of reach" in said[1]


def test_a_read_only_mount_is_refused_to_root_too(tmp_path):
    with (
        mounted(tmp_path, "-t", "tmpfs", "-o", "ro,size=1m", "none"),
        pytest.raises(nvme.FolderError, match="not writable"),
    ):
        nvme.check_folder(tmp_path, allow_ram=True)


def test_a_network_file_system_is_used_with_a_warning(tmp_path, monkeypatch, caplog):
    kind = nvme.files.file.file_system(tmp_path)
    monkeypatch.setattr(nvme.files.file, "NETWORK_FILESYSTEMS", frozenset({kind}))
    with caplog.at_level(logging.WARNING, "gemini.nvme"):
        assert nvme.check_folder(tmp_path) == tmp_path
    assert f"is on {kind}, a network file system" in caplog.text


# -- files that change under us -------------------------------------------------------------------


def test_a_folder_removed_under_us_keeps_working_and_closes(tmp_path):
    """The file has lost its name; its blocks are there until it is closed."""
    folder = tmp_path / "gone"
    folder.mkdir()
    store, pool = BlockStore([folder], ONE), BufferPool(1, 5000)
    write(store, pool, 0, 1)
    store.commit(1)
    shutil.rmtree(folder)
    write(store, pool, 0, 2)
    store.commit(2)
    assert read(store, pool, 0) == expected(store, 0, 2)
    store.close()
    assert not folder.exists()


def test_a_file_that_took_our_name_is_neither_read_nor_removed(tmp_path):
    store, pool = BlockStore([tmp_path], ONE), BufferPool(1, 5000)
    write(store, pool, 0, 1)
    store.commit(1)
    (path,) = store.paths
    path.unlink()
    path.write_bytes(b"somebody's")
    assert read(store, pool, 0) == expected(store, 0, 1)
    store.close()
    assert path.read_bytes() == b"somebody's"


def test_blocks_swapped_in_the_file_do_not_verify(tmp_path):
    store, pool = BlockStore([tmp_path], StoreLayout.plan("d", [4096] * 2)), BufferPool(1, 4096)
    for block in range(2):
        write(store, pool, block, block)
    store.commit(1)
    extents = [versions[0] for versions in store.layout.extents()]
    with store.paths[0].open("r+b") as file:
        data = [os.pread(file.fileno(), e.nbytes, e.offset) for e in extents]
        for extent, other in zip(extents, reversed(data), strict=True):
            os.pwrite(file.fileno(), other, extent.offset)
    with pytest.raises(nvme.ChecksumError):
        read(store, pool, 0)
    store.close()


def test_without_checksums_a_changed_byte_goes_unseen_and_a_short_file_does_not(tmp_path):
    store = BlockStore([tmp_path], ONE, checksums=False)
    pool = BufferPool(2, 5000)
    write(store, pool, 0, 1)
    store.commit(1)
    extent = store.layout.extents()[0][0]
    with store.paths[0].open("r+b") as file:
        os.pwrite(file.fileno(), b"!", extent.offset)
    assert read(store, pool, 0)[:1] == b"!"
    os.truncate(store.paths[0], extent.offset)
    with pytest.raises(nvme.TransferError, match="came up short"):
        read(store, pool, 0)
    store.close()


# -- other processes ------------------------------------------------------------------------------


def open_and_close_often(index, folder):
    """Every construction looks for orphans in a folder where others are just being born."""
    meeting = Path(folder) / "meeting"
    (meeting / str(index)).touch()
    until(lambda: len(list(meeting.iterdir())) == SHARERS)
    pool = BufferPool(1, 5000)
    for count in range(30):
        store = BlockStore([folder], ONE)
        write(store, pool, 0, count)
        store.commit(1)
        with nvme.recover(store.paths) as found:  # it still has its name: nobody removed it
            assert found.block(0) == expected(store, 0, count)
        store.close()


SHARERS = 3


def test_processes_share_a_folder(tmp_path):
    (tmp_path / "meeting").mkdir()
    run_processes(open_and_close_often, SHARERS, str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["meeting"]


def use_in_a_child(store, pool):
    """What a forked child sees of its parent's store, as a JSON line through a pipe."""
    receiver, sender = os.pipe()
    pid = os.fork()
    if pid == 0:
        said = []
        for use in (lambda: read(store, pool, 0), lambda: write(store, pool, 0, 2)):
            try:
                use()
            except nvme.NvmeError as error:
                said.append(str(error))
        store.close()
        os.write(sender, json.dumps(said).encode())
        os._exit(0)
    os.close(sender)
    os.waitpid(pid, 0)
    return json.loads(os.read(receiver, 1 << 16))


@pytest.mark.parametrize("name", ENGINES)
def test_a_forked_child_is_refused_at_once_and_the_parent_goes_on(name, tmp_path):
    store = BlockStore([tmp_path], ONE, engine=engine_or_skip(name))
    pool = BufferPool(2, 5000)
    write(store, pool, 0, 1)
    store.commit(1)
    said = use_in_a_child(store, pool)
    assert len(said) == 2 and all("forked process" in line for line in said)
    assert store.paths[0].exists() and read(store, pool, 0) == expected(store, 0, 1)
    store.close()
