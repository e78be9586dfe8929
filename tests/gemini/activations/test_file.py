"""The file of saved tensors: its room, and disks that fail."""

import errno
import gc
from itertools import pairwise
from threading import Event
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import nvme
from gemini.activations.file import FreeRuns, SavedFile
from gemini.activations.lower import FileTier
from gemini.activations.saved_tensors import SavedTensors
from nvme.files import calls
from tests.support.disks.faults import failing

KIB = 1 << 10
ROW = 64 * KIB


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 6)), max_size=60))
def test_runs_do_not_overlap_and_none_is_lost(asked):
    space, taken = FreeRuns(), []
    for gives, number in asked:
        if gives and taken:
            space.give(*taken.pop(number % len(taken)))
            continue
        offset = space.take(number)
        if offset is None:
            offset, space.end = space.end, space.end + number
        taken.append((offset, number))
        ends = sorted((start, start + n) for start, n in taken)
        assert all(end <= start for (_, end), (start, _) in pairwise(ends))
        assert space.free_bytes + sum(n for _, n in taken) == space.end
    for run in taken:
        space.give(*run)
    assert space.free_bytes == space.end
    assert not space.end or space.take(space.end) == 0  # neighbours are one


def saved_in(tmp_path, keep=2 * ROW):
    tier = FileTier(tmp_path, "tests-", piece_bytes=ROW)
    saved = SavedTensors(tier, torch.device("cpu"), least_bytes=ROW, ahead_bytes=2 * ROW)
    saved.keep_at_most(keep)
    return saved, tier.file


def gradient(saved, rows=20):
    x = torch.linspace(-1, 1, ROW // 4, requires_grad=True)
    with saved.saving():
        total = sum((x + i).square().sum() for i in range(rows))
    total.backward()
    return x.grad


def expected(rows=20):
    x = torch.linspace(-1, 1, ROW // 4, requires_grad=True)
    sum((x + i).square().sum() for i in range(rows)).backward()
    return x.grad


@pytest.mark.parametrize(
    ("call", "code", "after", "kind"),
    [
        ("allocate", errno.ENOSPC, 0, nvme.DiskFullError),
        ("allocate", errno.ENOSPC, 9, nvme.DiskFullError),
        ("pwritev", errno.EIO, 0, nvme.TransferError),
        ("pwritev", errno.EIO, 9, nvme.TransferError),
        ("pwritev", errno.EIO, 17, nvme.TransferError),
        ("pwritev", errno.ENOSPC, 5, nvme.DiskFullError),
        ("preadv", errno.EIO, 0, nvme.TransferError),
        ("preadv", errno.EIO, 9, nvme.TransferError),
        ("open_file", errno.EACCES, 0, nvme.FolderError),
    ],
)
def test_a_disk_that_fails_is_an_error_that_leaves_nothing(call, code, after, kind, tmp_path):
    """What failed once may go well the next time: the same object goes on."""
    saved, file = saved_in(tmp_path)
    with failing(call, code, "saved-", after=after, times=1) as failed, pytest.raises(kind):
        gradient(saved)
    assert len(failed) == 1
    # torch keeps the graph of a backward that raised until the next one
    torch.ones(1, requires_grad=True).sum().backward()
    gc.collect()
    assert (saved.live_bytes, saved.resident_bytes) == (0, 0)
    assert torch.equal(gradient(saved), expected())
    assert (saved.live_bytes, saved.resident_bytes, file.used_bytes) == (0, 0, 0)
    assert not list(tmp_path.iterdir())


def test_a_write_that_fails_loses_nothing(tmp_path):
    """What it was to write is in memory still, and backward reads that."""
    saved, _ = saved_in(tmp_path)
    x = torch.linspace(-1, 1, ROW // 4, requires_grad=True)
    totals = []
    with (
        failing("pwritev", errno.EIO, "saved-", after=3, times=1),
        pytest.raises(nvme.TransferError),
        saved.saving(),
    ):
        for i in range(20):
            totals.append((x + i).square().sum())
    with saved.saving():
        totals.append((x + 99).square().sum())
    assert saved.traffic.nvme_out > 0  # the one that failed goes again
    sum(totals).backward()
    y = x.detach().requires_grad_()
    sum((y + i).square().sum() for i in [*range(len(totals) - 1), 99]).backward()
    assert torch.equal(x.grad, y.grad)


def test_a_read_that_fails_is_asked_again(tmp_path):
    saved, _ = saved_in(tmp_path, keep=0)
    x = torch.linspace(-1, 1, ROW // 4, requires_grad=True)
    with saved.saving():
        total = (x + 1).square().sum()
    with failing("preadv", errno.EIO, "saved-", times=1), pytest.raises(nvme.TransferError):
        total.backward(retain_graph=True)
    total.backward()
    assert torch.equal(x.grad, 2 * (x + 1))


def test_nothing_has_a_name_while_it_is_used(tmp_path):
    saved, file = saved_in(tmp_path, keep=0)
    x = torch.linspace(-1, 1, ROW // 4, requires_grad=True)
    with saved.saving():
        total = (x + 1).square().sum()
    assert file.used_bytes == file.file_bytes == ROW and not list(tmp_path.iterdir())
    total.backward()
    assert (saved.live_bytes, file.used_bytes, file.file_bytes) == (0, 0, ROW)
    for _ in range(3):  # its room is used again
        gradient(saved)
    assert file.file_bytes <= 20 * ROW
    saved.close()
    assert file.file_bytes == file.staging_bytes == 0


def test_buffers_are_there_while_something_may_leave(tmp_path):
    """They end what is under way, and a graph that has bytes in the file still has its backward."""
    saved, file = saved_in(tmp_path, keep=0)
    x = torch.linspace(-1, 1, ROW // 4, requires_grad=True)
    assert file.staging_bytes == 0
    with saved.saving():
        total = sum((x + i).square().sum() for i in range(20))
    assert file.staging_bytes == file.in_flight_bytes == 8 * ROW
    saved.keep_at_most(None)
    assert file.staging_bytes == 0
    other = x.detach().clone().requires_grad_()
    with saved.saving():
        kept = (other + 1).square().sum()
    assert saved.resident_bytes == ROW and file.staging_bytes == 0
    total.backward(), kept.backward()
    assert torch.equal(x.grad, expected()) and file.staging_bytes == 0
    saved.keep_at_most(0)
    assert torch.equal(gradient(saved), expected()) and file.staging_bytes == 8 * ROW
    copy = file.write(x.data_ptr(), ROW)
    assert copy.num_pending == 1
    file.release_staging()
    read = file.read(copy)
    read.wait()
    assert torch.equal(read.landing[:ROW].view(torch.float32), x.detach())
    saved.close()


def test_room_that_is_written_is_nobody_elses(tmp_path):
    """A copy is dropped while its write waits for the disk; another must not be there meanwhile."""
    file, begun, goes_on = SavedFile(tmp_path, piece_bytes=ROW), Event(), Event()
    values = torch.arange(ROW // 4, dtype=torch.int32)
    others = values + 1
    real = calls.pwritev

    def late(*args):
        begun.set()
        assert goes_on.wait(60)
        return real(*args)

    with mock.patch.object(calls, "pwritev", late):
        first = file.write(values.data_ptr(), ROW)
        assert begun.wait(60)
        file.drop(first)
        second = file.write(others.data_ptr(), ROW)
        goes_on.set()
        assert first.offset != second.offset and file.ended(second, wait=True)
    read = file.read(second)
    read.wait()
    assert torch.equal(read.landing[:ROW].view(torch.int32), others)
    file.drop(second)
    assert file.used_bytes == 0
    file.close()
