"""Folders of checkpoints: replaced, deleted, left by the dead, of others, on disks that fail."""

import errno
import fcntl
import logging
import os
import shutil
from contextlib import contextmanager

import pytest

import gemini
from gemini.checkpoint import CheckpointError, FormatError
from gemini.checkpoint.__main__ import main
from gemini.checkpoint.format.folder import LOCK, remove_dead
from nvme.files import calls
from tests.support.checkpoints import assert_same, batches, make, names, train, whole
from tests.support.disks.faults import failing


def test_latest_follows_and_keep_last_deletes_what_is_older(tmp_path):
    model, optimizer = make()
    (tmp_path / "notes").mkdir()
    for k in range(5):
        gemini.save_checkpoint(tmp_path / f"k{k}", model, optimizer, keep_last=2 if k > 2 else None)
        assert os.readlink(tmp_path / "latest") == f"k{k}"
    assert names(tmp_path) == ["k3", "k4", "latest", "notes"]


def test_a_checkpoint_is_replaced_in_one_step(tmp_path):
    model, optimizer = make()
    gemini.save_checkpoint(tmp_path / "a", model, optimizer, extra=1)
    train(model, optimizer, batches(0, 1))
    gemini.save_checkpoint(tmp_path / "a", model, optimizer, extra=2)
    assert names(tmp_path) == ["a", "latest"]
    other, its_optimizer = make(seed=1)
    assert gemini.load_checkpoint(tmp_path / "a", other, its_optimizer) == 2
    assert_same(whole(other, its_optimizer), whole(model, optimizer))


def test_what_a_dead_save_left_is_reported_ignored_and_removed(tmp_path, caplog):
    model, optimizer = make()
    gemini.save_checkpoint(tmp_path / "a", model, optimizer)
    shutil.copytree(tmp_path / "a", tmp_path / ".b.saving")
    with caplog.at_level(logging.WARNING, "gemini"):
        gemini.load_checkpoint(tmp_path, model, optimizer)
        with pytest.raises(FormatError, match="a save to it did not end"):
            gemini.load_checkpoint(tmp_path / "b", model, optimizer)
        gemini.save_checkpoint(tmp_path / "c", model, optimizer)
    assert "ignored" in caplog.text and "removed" in caplog.text
    assert names(tmp_path) == ["a", "c", "latest"]


@contextmanager
def lock_held(folder):
    """As a job holds it that is saving."""
    lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT)
    os.write(lock, b"gemini: this folder is being written\n")
    fcntl.flock(lock, fcntl.LOCK_EX)
    yield
    os.close(lock)


def test_a_link_that_a_dead_save_left_is_removed_and_a_live_ones_is_not(tmp_path):
    model, optimizer = make()
    for name in "ab":
        gemini.save_checkpoint(tmp_path / name, model, optimizer)
    links = {".latest.0123456a": "a", ".latest.0123456b": "b", ".latest.0123456c": "gone",
             ".latest.mine": "a", ".latest.0123456d": "/etc/hostname"}  # fmt: skip
    for name, target in links.items():
        (tmp_path / name).symlink_to(target)
    with lock_held(tmp_path / "b"):  # about to rename its link
        gemini.save_checkpoint(tmp_path / "c", model, optimizer)
    left = [".latest.0123456b", ".latest.0123456d", ".latest.mine"]
    assert names(tmp_path) == [*left, "a", "b", "c", "latest"]


def test_a_save_during_another_save_is_refused(tmp_path):
    model, optimizer = make()
    (tmp_path / ".a.saving").mkdir()
    with (
        lock_held(tmp_path / ".a.saving"),
        pytest.raises(CheckpointError, match=r"another save to .*/a is under way"),
    ):
        gemini.save_checkpoint(tmp_path / "a", model, optimizer)
    gemini.save_checkpoint(tmp_path / "a", model, optimizer)
    assert names(tmp_path) == ["a", "latest"]


@pytest.mark.parametrize(
    "name", [".thesis.saving", ".photos.deleting", ".a.saving", ".a.exporting"]
)
def test_a_folder_that_no_save_made_is_left_whatever_its_name(name, tmp_path):
    """Only what it holds says whose it is: a lock file or a manifest of ours, with our content."""
    model, optimizer = make()
    foreign = tmp_path / name
    foreign.mkdir()
    contents = {
        "precious.txt": b"precious", LOCK: b"somebody's lock", "manifest.json": b"{}",
    }  # fmt: skip
    for count in (1, 2, 3):
        for file, content in list(contents.items())[:count]:
            (foreign / file).write_bytes(content)
        gemini.save_checkpoint(tmp_path / "b", model, optimizer, keep_last=1)
        if name == ".a.saving":
            with pytest.raises(CheckpointError, match=f"{name} is in the way"):
                gemini.save_checkpoint(tmp_path / "a", model, optimizer)
        if name == ".a.exporting":
            with pytest.raises(CheckpointError, match=f"{name} is in the way"):
                gemini.export_safetensors(tmp_path / "a", model)
        assert {p.name: p.read_bytes() for p in foreign.iterdir()} == dict(
            list(contents.items())[:count]
        )


def test_an_export_goes_to_a_folder(tmp_path):
    model, _ = make()
    with pytest.raises(CheckpointError, match=r"x\.safetensors: that names a file; expected a fol"):
        gemini.export_safetensors(tmp_path / "x.safetensors", model)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", ["nothing", "an empty lock", "a lock and data"])
def test_what_a_save_left_that_died_at_its_beginning_is_in_nobodys_way(content, tmp_path):
    model, optimizer = make()
    left = tmp_path / ".a.saving"
    left.mkdir()
    if content == "an empty lock":
        (left / LOCK).touch()
    elif content == "a lock and data":
        (left / LOCK).write_bytes(b"gemini: this folder is being written\n")
        (left / "__0_0.distcp").write_bytes(bytes(5000))
    gemini.save_checkpoint(tmp_path / "a", model, optimizer)
    assert names(tmp_path) == ["a", "latest"]
    assert LOCK not in names(tmp_path / "a")


def test_a_folder_that_is_taken_for_dead_before_it_is_locked_is_made_again(tmp_path, monkeypatch):
    """[Note: newborn folders], at both moments."""
    real, removed = calls.lock, []

    def late(fd, how):
        if not removed and not how & fcntl.LOCK_NB:
            removed.append("lock")
            remove_dead(tmp_path)
        real(fd, how)

    made, mkdir = [], calls.mkdir

    def watched(path):
        mkdir(path)
        made.append(path)
        if len(made) == 1:
            os.rmdir(path)

    monkeypatch.setattr(calls, "lock", late)
    monkeypatch.setattr(calls, "mkdir", watched)
    model, optimizer = make()
    gemini.save_checkpoint(tmp_path / "a", model, optimizer)
    assert len(made) == 3 and removed and main(["verify", str(tmp_path / "a")]) == 0


def test_a_deletion_that_is_interrupted_is_gone_on_with(tmp_path):
    """The manifest, which says whose the folder is, goes last."""
    model, optimizer = make()
    gemini.save_checkpoint(tmp_path / "a", model, optimizer)
    with failing("unlink", errno.EIO, "__0_0.distcp"):
        gemini.save_checkpoint(tmp_path / "b", model, optimizer, keep_last=1)
    assert names(tmp_path) == [".a.deleting", "b", "latest"]
    gemini.save_checkpoint(tmp_path / "c", model, optimizer)
    assert names(tmp_path) == ["b", "c", "latest"]


def test_a_folder_with_something_else_in_it_is_not_replaced(tmp_path):
    model, optimizer = make()
    folder = tmp_path / "thesis"
    folder.mkdir()
    (folder / "precious.txt").write_text("precious", encoding="utf-8")
    with pytest.raises(CheckpointError, match="is no checkpoint of gemini; nothing was changed"):
        gemini.save_checkpoint(folder, model, optimizer)
    assert names(folder) == ["precious.txt"] and names(tmp_path) == ["thesis"]
    (folder / "precious.txt").unlink()
    gemini.save_checkpoint(folder, model, optimizer)
