"""Files that several of a host have: written once, by one, and gone with the last that has them."""

import errno
import threading

import pytest

import nvme
from nvme import (
    BlockStore,
    ChecksumError,
    DiskFullError,
    FolderError,
    SharedBlocks,
    StoreLayout,
    ThreadEngine,
)
from tests.support.disks.faults import failing

DATA = [bytes([7]) * 5000, bytes([9]) * 300]
SIZES = [len(data) for data in DATA]
PAGE = 4096


@pytest.fixture
def engine():
    engine = ThreadEngine(1)
    yield engine
    engine.close()


def views():
    return map(memoryview, DATA)


def shared(folder, engine, blocks=views):
    return SharedBlocks(folder, "d1", SIZES, engine, blocks, what="the base")


def everything(blocks):
    found = [bytearray(nbytes) for nbytes in SIZES]
    for block, buffer in enumerate(found):
        blocks.read(block, memoryview(buffer)).wait()
    return [*map(bytes, found)]


def test_who_comes_second_writes_nothing_and_the_last_removes_the_file(tmp_path, engine):
    first, second = shared(tmp_path, engine), shared(tmp_path, engine, blocks=None)
    assert (first.written_bytes, second.written_bytes) == (sum(SIZES), 0)
    assert first.path == second.path and first.path.stat().st_mode & 0o222 == 0
    assert everything(first) == everything(second) == DATA
    first.close()
    first.close()
    assert everything(second) == DATA
    BlockStore([tmp_path], StoreLayout.plan("d", [5000])).close()  # which removes what died
    assert second.path.exists()
    second.close()
    assert not [*tmp_path.iterdir()]


def test_one_writes_and_the_others_wait(tmp_path, engine):
    begun, goes_on, found = threading.Event(), threading.Event(), []

    def slowly():
        begun.set()
        assert goes_on.wait(60)
        return views()

    threads = [threading.Thread(target=lambda: found.append(shared(tmp_path, engine, slowly)))]
    threads[0].start()
    assert begun.wait(60)
    threads += [
        threading.Thread(target=lambda: found.append(shared(tmp_path, engine, None)))
        for _ in range(2)
    ]
    for thread in threads[1:]:
        thread.start()
    goes_on.set()
    for thread in threads:
        thread.join(60)
    assert sorted(blocks.written_bytes for blocks in found) == [0, 0, sum(SIZES)]
    for blocks in found:
        assert everything(blocks) == DATA
        blocks.close()
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("cut", ["nothing", "no index", "short"])
def test_a_file_whose_writer_died_is_made_anew(cut, tmp_path, engine):
    """And until then is one that a process left which died."""
    blocks = shared(tmp_path, engine)
    whole = blocks.path.read_bytes()
    blocks.close()
    left = {
        "nothing": b"",
        "no index": whole[:PAGE] + bytes(len(whole) - PAGE),
        "short": whole[:-1],
    }
    blocks.path.write_bytes(left[cut])
    assert nvme.orphans(tmp_path) == (blocks.path,)
    again = shared(tmp_path, engine)
    assert again.written_bytes == sum(SIZES) and everything(again) == DATA
    again.close()


@pytest.mark.parametrize("change", ["flip", "cut"])
def test_a_file_that_is_changed_is_refused_and_nobody_takes_it(change, tmp_path, engine):
    blocks = shared(tmp_path, engine)
    blocks.path.chmod(0o600)
    with blocks.path.open("r+b") as file:
        if change == "cut":
            file.truncate(3 * PAGE + 10)
        else:
            file.seek(3 * PAGE)
            file.write(b"x")
    with pytest.raises(ChecksumError, match=r"of the base are others .* was removed: start again"):
        everything(blocks)
    again = shared(tmp_path, engine)
    assert again.written_bytes and everything(again) == DATA
    blocks.close()
    assert again.path.exists()
    again.close()


def test_what_cannot_be_made_is_said_and_leaves_nothing(tmp_path, engine):
    with failing("allocate", errno.ENOSPC), pytest.raises(DiskFullError, match="cannot hold"):
        shared(tmp_path, engine)
    with failing("fdatasync", errno.EIO), pytest.raises(FolderError, match="EIO"):
        shared(tmp_path, engine)
    assert not [*tmp_path.iterdir()]
