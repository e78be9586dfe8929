"""Power lost at any point of saving: under every name there is a whole checkpoint, or none."""

import errno
import os

import pytest

import gemini
from gemini.checkpoint.__main__ import main
from nvme.files import calls
from tests.support.disks.crashes import check_recording, explore
from tests.support.disks.hostile import small
from tests.support.disks.lives import SAVES, drawn_saves, recorded_life
from tests.support.disks.recording import recorded


def test_a_power_loss_while_saving_leaves_whole_checkpoints(tmp_path):
    log, check = recorded_life(tmp_path, "saves", SAVES)
    assert explore(log, tmp_path / "after", check, samples=1, most=6) > 150


def test_a_power_loss_after_another_process_went_on_deleting_leaves_whole_checkpoints(
    tmp_path, monkeypatch
):
    """Who deletes dies before the new name is on the disk; the next one removes what is in it."""
    folder, rename = tmp_path / "disk", calls.rename
    folder.mkdir()

    def die(old, new):
        calls_rename(old, new)
        if str(new).endswith(".deleting"):
            raise OSError(errno.EINTR, "died")

    model, optimizer = small()
    with recorded(folder) as log:
        calls_rename = calls.rename
        for name, keep_last in (("a", None), ("b", 1), ("c", None)):
            with monkeypatch.context() as patch:
                patch.setattr(calls, "rename", die)
                gemini.save_checkpoint(folder / name, model, optimizer, keep_last=keep_last)
        check_recording(log)
    assert rename is calls.rename and sorted(os.listdir(folder)) == ["b", "c", "latest"]

    def check(crash):
        for path in crash.folder.iterdir():
            if not path.name.startswith("."):
                assert main(["verify", str(path)]) == 0

    assert explore(log, tmp_path / "after", check, samples=1, most=6) > 50


@pytest.mark.ci
def test_a_power_loss_while_saving_leaves_whole_checkpoints_in_any_of_hundreds_of_states(tmp_path):
    """`tests/deep` has thousands."""
    log, check = recorded_life(tmp_path, "saves", drawn_saves(12, 0))
    assert explore(log, tmp_path / "after", check, samples=20, most=10) > 500
