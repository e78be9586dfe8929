"""Power lost at any point of saving: under every name there is a whole checkpoint, or none."""

import errno
import hashlib
import os
import random

import pytest
import torch
from torch import nn

import gemini
from gemini.checkpoint.__main__ import main
from gemini.checkpoint.format.folder import remove_dead
from nvme.files import calls
from tests.support.checkpoints import make
from tests.support.disks.crashes import check_recording, explore
from tests.support.disks.recording import recorded

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

# (name, keep_last, in the background): the first one, replaced, more of them, deleted, replaced
SAVES = [
    ("a", None, False),
    ("a", None, True),
    ("b", None, False),
    ("c", 2, False),
    ("c", 1, True),
    ("d", 1, False),
]


def small():
    return make(module=nn.Linear(7, 3))


def saves(folder, which):
    """Record saves; every weight of the k-th is k."""
    model, optimizer = small()
    with recorded(folder) as log:
        for k, (name, keep_last, in_background) in enumerate(which, start=1):
            with torch.no_grad():
                for param in model.parameters():
                    param.fill_(k)
            log.note(("begins", k))
            gemini.save_checkpoint(
                folder / "runs" / name,
                model,
                optimizer,
                extra=k,
                async_save=in_background,
                keep_last=keep_last,
            ).wait()
            log.note(("ends", k))
        check_recording(log)
    return log


class Checker:
    """Demands what was promised of a save that had ended, and wholeness of whatever is there."""

    def __init__(self, which):
        self._which = which
        self._model, self._optimizer = small()
        self._known = {}  # content of a folder -> which save it is

    def __call__(self, crash):
        begun = max((k for kind, k in crash.notes if kind == "begins"), default=0)
        ended = max((k for kind, k in crash.notes if kind == "ends"), default=0)
        runs = crash.folder / "runs"
        if not ended and not runs.exists():
            return
        found = self._look(runs, begun, ended)
        if runs.exists():
            remove_dead(runs)
            assert self._look(runs, begun, ended) == found
            left = [path for path in runs.iterdir() if path.name.startswith(".")]
            assert not [path for path in left if path.is_symlink() or any(path.iterdir())]

    def _look(self, runs, begun, ended):
        there = {
            path.name: self._load(path)
            for path in sorted(runs.iterdir())
            if not path.name.startswith(".") and not path.is_symlink()
        }
        for name, k in there.items():
            assert self._which[k - 1][0] == name and k <= begun
        promised = {}
        for k, (name, keep_last, _) in enumerate(self._which[:ended], start=1):
            promised.pop(name, None)  # the newest is the last
            promised[name] = k
            promised = dict(list(promised.items())[-(keep_last or len(promised)) :])
        if begun > ended and (last := self._which[begun - 1][1]) is not None:
            promised = dict(list(promised.items())[max(0, len(promised) + 1 - last) :])
        for name, k in promised.items():
            assert there[name] >= k, f"save {k} had ended, and {name} is save {there.get(name)}"
        latest = runs / "latest"
        assert latest.is_symlink() or not ended
        if latest.is_symlink():
            assert max(ended, 1) <= there[latest.readlink().name] <= begun
        return there

    def _load(self, folder):
        content = hashlib.sha256()
        for path in sorted(folder.iterdir()):
            content.update(path.name.encode() + path.read_bytes())
        key = content.digest()
        if key not in self._known:
            assert main(["verify", str(folder)]) == 0
            k = gemini.load_checkpoint(folder, self._model, self._optimizer)
            weights = self._model.state_dict().values()
            assert all((value == k).all() for value in weights)
            self._known[key] = k
        return self._known[key]


def test_a_power_loss_while_saving_leaves_whole_checkpoints(tmp_path):
    folder = tmp_path / "disk"
    folder.mkdir()
    log = saves(folder, SAVES)
    explored = explore(log, tmp_path / "after", Checker(SAVES), samples=1, most=6)
    assert explored > 150


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
def test_a_power_loss_while_saving_leaves_whole_checkpoints_in_any_of_thousands_of_states(tmp_path):
    folder = tmp_path / "disk"
    folder.mkdir()
    rng = random.Random(0)
    which = [
        (rng.choice("abcd"), rng.choice([None, 1, 2, 3]), rng.random() < 0.3) for _ in range(24)
    ]
    log = saves(folder, which)
    explored = explore(log, tmp_path / "after", Checker(which), samples=60)
    print(f"{explored} states of checkpoints")
    assert explored > 4000
