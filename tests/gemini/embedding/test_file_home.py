"""Rows in a file: kills, power losses, faults, and files of strangers."""

import errno
import os
import shutil
from unittest import mock

import pytest
import torch

from gemini.checkpoint import CheckpointError
from nvme import ChecksumError, NvmeError, StoreFormatError
from nvme.files import calls
from tests.support.disks.crashes import check_recording, explore
from tests.support.disks.killing import kill_at
from tests.support.disks.recording import recorded
from tests.support.loops.row_lives import (
    STEPS,
    killed,
    live,
    made,
    num_ended,
    number_of,
    recovered,
    states,
)
from tests.support.whole_tables import same_bits, saved_records


def goes_on(emb, k, expected, scratch):
    """From the state `k` the rest of the run has the bits of one that nothing ended."""
    if k == 7:  # the undo is behind it, or the step that it undoes has no records to go back to
        return
    if k != 6:
        live(emb, begin=k)
        emb.save(scratch)
        assert same_bits(saved_records(scratch)[0], expected[-1][0])


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    return states(tmp_path_factory.mktemp("states"))


@pytest.mark.ci
def test_twelve_kills_leave_the_last_step(expected, tmp_path):
    seen = []

    def check(left):
        done = num_ended(left)
        if not done:  # its rows were not all written
            seen.append(None)
            with pytest.raises(
                StoreFormatError, match=r"holds no step|cannot be opened|no file of rows"
            ):
                made(left, recover=True)
            made(left).close()
            return
        found, emb = recovered(left, left / "saved")
        k = number_of(found, expected, done - 1, min(done, STEPS + 1))
        seen.append(k)
        goes_on(emb, k, expected, left / "end")
        emb.close()

    kill_at(12, check, tmp_path, killed)
    assert len(seen) == 12 and len(set(seen)) > 6


def test_a_power_loss_leaves_the_last_step(expected, tmp_path):
    folder, after = tmp_path / "rows", tmp_path / "after"
    folder.mkdir()
    with recorded(folder) as log:
        emb = made(folder)
        log.note(("ends", 0))
        live(emb, log.note)
        check_recording(log)
        emb.close()

    def check(crash):
        done = max((k for kind, k in crash.notes if kind == "ends"), default=-1)
        begun = max((k for kind, k in crash.notes if kind == "begins"), default=0)
        shutil.rmtree(tmp_path / "saved", ignore_errors=True)
        try:
            found, emb = recovered(crash.folder, tmp_path / "saved")
        except StoreFormatError:
            assert done < 0, "a step that was committed is gone"
            return
        number_of(found, expected, max(done, 0), begun)
        emb.close()

    assert explore(log, after, check, samples=2, most=12) > 200


def left_behind(folder):
    """File of a run that ended, which has rows in its journal."""
    emb = made(folder)
    live(emb)
    emb.close()
    (path,) = folder.glob("*.rows")
    return path


def test_a_file_that_is_open_or_holds_a_step_is_not_taken(tmp_path):
    emb = made(tmp_path)
    with pytest.raises(ValueError, match=r"is open in another process or table"):
        made(tmp_path, recover=True)
    made(tmp_path, name="other").close()
    live(emb)
    emb.close()
    with pytest.raises(ValueError, match=r"holds rows of a run that ended; expected recover=True"):
        made(tmp_path)


def flip(path, at):
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 1]))


def test_changed_bytes_are_found(expected, tmp_path):
    path = left_behind(tmp_path)
    whole = path.read_bytes()
    flip(path, 30)
    with pytest.raises(StoreFormatError, match=r"the header is damaged, or of no file of rows"):
        made(tmp_path, recover=True)
    path.write_bytes(whole)
    flip(path, 3 * 4096 + 5)  # of a cell; no later step has its rows
    emb = made(tmp_path, recover=True)
    with pytest.raises(CheckpointError, match=r"rows from 0 .* do not verify"):
        emb.save(tmp_path / "saved")
    with pytest.raises(ChecksumError, match=r"rows from 0 .* do not verify"):
        emb(torch.tensor([1]))
    emb.close()


@pytest.mark.parametrize("kind", ["link", "pipe", "cut", "other", "folder"])
def test_files_of_strangers_are_refused(kind, tmp_path):
    folder = tmp_path / "rows"
    folder.mkdir()
    path = left_behind(folder)
    if kind == "cut":
        os.truncate(path, path.stat().st_size // 2)
    elif kind == "other":
        path.write_bytes(os.urandom(1 << 16))
    else:
        path.rename(tmp_path / "elsewhere")
        if kind == "link":
            path.symlink_to(tmp_path / "elsewhere")
        elif kind == "pipe":
            os.mkfifo(path)
        else:
            path.mkdir()
    with pytest.raises(StoreFormatError, match=r"cannot be opened|no file of rows|was cut"):
        made(folder, recover=True)


def test_a_file_of_another_table_is_refused(tmp_path):
    from gemini import CachedEmbedding

    left_behind(tmp_path)
    with pytest.raises(StoreFormatError, match=r"is of another table: .*expected"):
        CachedEmbedding(41, 90, cache_rows=12, home="nvme", nvme_dir=tmp_path, recover=True)


def test_a_step_that_cannot_be_written_leaves_the_last_one_whole(expected, tmp_path):
    emb = made(tmp_path)
    fails, real = [False], calls.pwritev

    def pwritev(*args):
        if fails[0]:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(*args)

    with mock.patch.object(calls, "pwritev", pwritev):

        def note(what):
            if what != ("begins", 3):
                return
            (emb(torch.arange(6)) * 2).sum().backward()
            fails[0] = True
            with pytest.raises(NvmeError):
                emb.step()
            fails[0] = False
            emb.zero_grad()

        live(emb, note)
    emb.save(tmp_path / "saved")
    records, step = saved_records(tmp_path / "saved")
    assert same_bits(records, expected[-1][0]) and step == expected[-1][1]
    emb.close()
