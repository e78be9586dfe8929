"""Disks that fail under a save, and what the end of a process says of one that failed."""

import errno
import os
import shutil
import subprocess
import sys

import pytest

import gemini
from bench.shared.workers import start_process
from gemini.checkpoint import CheckpointError
from nvme.files import calls
from tests.nvme.common import mounted
from tests.support.checkpoints import assert_same, batches, bits, make, names, train
from tests.support.disks.faults import failing, flip
from tests.support.until import until


def test_a_full_file_system_leaves_the_last_checkpoint_and_nothing_else(tmp_path):
    folder = tmp_path / "small"
    folder.mkdir()
    model, optimizer = make()
    with mounted(folder, "-t", "tmpfs", "-o", "size=1m", "none"):
        gemini.save_checkpoint(folder / "a", model, optimizer)
        (folder / "rest").write_bytes(bytes(os.statvfs(folder).f_bavail * 4096 - 65536))
        for async_save in (False, True):
            with pytest.raises(CheckpointError, match="ENOSPC"):
                gemini.save_checkpoint(folder / "b", model, optimizer, async_save=async_save).wait()
            assert names(folder) == ["a", "latest", "rest"]
        gemini.load_checkpoint(folder, model, optimizer)


@pytest.mark.parametrize("async_save", [False, pytest.param(True, marks=pytest.mark.ci)])
@pytest.mark.parametrize("call, part, code", [
    ("mkdir", ".b.saving", errno.EACCES),
    ("mkdir", ".b.saving", errno.EROFS),
    ("open_file", "__0_0", errno.ENOENT),  # the folder is gone
    ("open_file", "__0_0", errno.EDQUOT),
    ("allocate", "__0_0", errno.ENOSPC),
    ("pwritev", "__0_0", errno.EFBIG),
    ("pwritev", "__0_0", errno.EIO),
    ("truncate", "__0_0", errno.EIO),
    ("fsync", "__0_0", errno.EIO),
    ("close", "__0_0", errno.EIO),
    ("pwritev", ".metadata", errno.ENOSPC),
    ("fsync", ".metadata", errno.EIO),
    ("close", ".metadata", errno.EIO),
    ("pwritev", "manifest.json", errno.EFBIG),
    ("fsync", "manifest.json", errno.EIO),
    ("rename", ".b.saving", errno.EIO),
])  # fmt: skip
def test_a_save_that_fails_says_where_and_why_and_leaves_the_last_one(
    call, part, code, async_save, tmp_path
):
    model, optimizer = make()
    gemini.save_checkpoint(tmp_path / "a", model, optimizer)
    first = os.close if call == "close" else None
    with failing(call, code, part, first=first) as failed, pytest.raises(CheckpointError) as raised:
        gemini.save_checkpoint(tmp_path / "b", model, optimizer, async_save=async_save).wait()
    assert failed and str(tmp_path) in str(raised.value)
    assert errno.errorcode[code] in str(raised.value)
    assert names(tmp_path) == ["a", "latest"]
    gemini.load_checkpoint(tmp_path, model, optimizer)
    gemini.save_checkpoint(tmp_path / "b", model, optimizer)


@pytest.mark.parametrize("call, part", [("symlink", ".latest."), ("rename", ".latest.")])
def test_a_checkpoint_that_latest_cannot_point_to_is_there_all_the_same(call, part, tmp_path):
    model, optimizer = make()
    gemini.save_checkpoint(tmp_path / "a", model, optimizer)
    real = getattr(calls, call)

    def fail(one, other):
        if part in f"{one} {other}":
            raise OSError(errno.EIO, "Input/output error")
        real(one, other)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calls, call, fail)
        with pytest.raises(CheckpointError, match=r"cannot point to .* with .*/latest: EIO"):
            gemini.save_checkpoint(tmp_path / "b", model, optimizer, extra="b")
    assert names(tmp_path) == ["a", "b", "latest"]
    assert gemini.load_checkpoint(tmp_path / "b", model, optimizer) == "b"


@pytest.mark.parametrize("call", ["fsync", "rename", "open_file"])
def test_an_export_that_fails_says_where_and_why_and_leaves_nothing(call, tmp_path):
    model, _ = make()
    part = ".out.exporting/" if call != "rename" else ".out"
    with (
        failing(call, errno.EIO, part),
        pytest.raises(CheckpointError, match=r"cannot export to .*/out: EIO"),
    ):
        gemini.export_safetensors(tmp_path / "out", model)
    assert names(tmp_path) == []
    gemini.export_safetensors(tmp_path / "out", model)
    assert names(tmp_path / "out") == ["model-00001-of-00001.safetensors",
                                       "model.safetensors.index.json"]  # fmt: skip


def test_a_load_reads_nothing_of_the_state_it_replaces_and_mends_what_does_not_verify(tmp_path):
    model, optimizer = make("nvme")
    train(model, optimizer, batches(0, 1))
    gemini.save_checkpoint(tmp_path / "a", model, optimizer)
    before = bits(model, optimizer)
    train(model, optimizer, batches(1, 2))
    (store,) = model.engine.target.tiered_state.stores
    for extents in store.layout.extents():  # both versions
        flip(store.paths[0], extents[0].offset)
    read = store.traffic.read_bytes
    gemini.load_checkpoint(tmp_path, model, optimizer)
    begun = 2 * max(store.layout.block_nbytes)  # of the next step: there are 15 of them
    assert store.traffic.read_bytes - read <= begun
    assert_same(bits(model, optimizer), before)


# -- the end of the process -------------------------------------------------------------------


def in_python(code, *arguments):
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": ":".join(sys.path)}, capture_output=True, text=True,
        encoding="utf-8",
    )  # fmt: skip


DIE_LATE = """
import errno, sys, gemini
from tests.support.checkpoints import assert_same, batches, bits, make, train
from tests.support.disks.faults import failing, flip
model, optimizer = make("nvme")
fails = failing("rename", errno.EIO, ".a.saving")
fails.__enter__()  # until the process has ended
ticket = gemini.save_checkpoint(sys.argv[1] + "/a", model, optimizer, async_save=True)
"""


@pytest.mark.ci
def test_an_error_in_the_background_is_seen_when_the_process_ends_and_in_its_exit_status(tmp_path):
    folder = tmp_path / "gone"
    done = in_python(DIE_LATE, folder)
    assert f"the asynchronous save to {folder}/a failed" in done.stderr, done.stderr
    assert done.returncode == 120 and "Traceback" not in done.stderr


def test_an_error_in_the_background_is_raised_by_the_next_call(tmp_path):
    model, optimizer = make("nvme")
    gone = tmp_path / "gone"
    with failing("rename", errno.EIO, ".a.saving"):
        ticket = gemini.save_checkpoint(gone / "a", model, optimizer, async_save=True)
        until(ticket.ready)
    with pytest.raises(CheckpointError, match=r"asynchronous save to .* failed"):
        gemini.save_checkpoint(tmp_path / "b", model, optimizer)
    gemini.save_checkpoint(tmp_path / "b", model, optimizer)  # said once


END_EARLY = """
import sys, gemini
from tests.support.checkpoints import assert_same, batches, bits, make, train
model, optimizer = make("nvme")
gemini.save_checkpoint(sys.argv[1], model, optimizer, extra=7, async_save=True)
"""


@pytest.mark.ci
def test_a_program_that_ends_while_it_saves_has_saved(tmp_path):
    done = in_python(END_EARLY, tmp_path / "a")
    assert done.returncode == 0, done.stderr
    assert gemini.load_checkpoint(tmp_path, *make()) == 7


def fail_late(folder):
    model, optimizer = make("nvme")
    gemini.save_checkpoint(f"{folder}/a", model, optimizer, async_save=True)
    shutil.rmtree(folder)


@pytest.mark.ci
def test_a_process_of_multiprocessing_whose_save_failed_says_so_in_its_exit_status(tmp_path):
    process = start_process(fail_late, str(tmp_path / "gone"))
    process.join()
    assert process.exitcode == 1
