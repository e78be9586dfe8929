"""The folder of a checkpoint: made beside its place, complete before it is renamed into it.

    PARENT/.NAME.saving   while it is written, with a lock file of rank 0 (see `unfinished`)
    PARENT/NAME           a checkpoint: its manifest is there, and was written last
    PARENT/latest         a symlink to the newest one
    PARENT/.latest.RANDOM the link, before it is renamed to `latest`
    PARENT/.NAME.deleting on its way out (`keep_last`)

What is dead is recognised by its content and its lock, reported, and removed by the next save.

[Note: order on disk] A name is synced before anything that depends on it begins: the files of a
checkpoint before it is renamed into its place, that before `latest` points to it and before what it
replaced is removed, and a name that is to vanish before the files under it. So a disk that lost its
power holds under every name a whole checkpoint or none.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from gemini.nvme.files import calls
from gemini.optim.state.deferred_signals import DeferredSignals

from . import unfinished
from .errors import CheckpointError, FormatError, on_disk
from .manifest import METADATA, NAME, Manifest, is_plain_name
from .small_files import read_manifest

log = logging.getLogger("gemini")

LATEST = "latest"
_SAVING, _DELETING = ".saving", ".deleting"
_LINK = re.compile(rf"\.{LATEST}\.[0-9a-f]{{8}}")


class SaveFolder:
    """The folder of one save, on the rank that commits it. Other ranks write into `path`."""

    def __init__(self, target: Path) -> None:
        """Raises CheckpointError, before anything is changed, for a place that cannot take one."""
        self.target = target
        self.path = saving_path(target)
        check_target(target)
        with on_disk("save to", target):
            calls.make_folders(target.parent)
            remove_dead(target.parent)
            try:
                with DeferredSignals():  # else Ctrl-C may leave the lock to nobody
                    self._lock = unfinished.make(self.path)
                    self._dropped = weakref.finalize(self, calls.close, self._lock)
                    self._dropped.atexit = False  # a save may go on until the process ends
            except FileExistsError:
                unfinished.refuse(self.path, target, "save")

    def commit(self, manifest: Manifest, metadata: bytes, keep_last: int | None) -> None:
        """Make the folder a checkpoint. All data files are written and synced."""
        parent = self.target.parent
        with on_disk("read", parent):
            older = list(checkpoints(parent))
        sequence = max((found.sequence for _, found in older), default=0) + 1
        last = replace(manifest, sequence=sequence).encode()
        for name, data in ((METADATA, metadata), (NAME, last)):
            with on_disk("write", self.path / name):
                calls.write_whole(self.path / name, data)
        with on_disk("sync", self.path):
            calls.sync_folder(self.path)
        replaced = self.target.is_dir() and any(self.target.iterdir())
        if replaced:
            _exchange(self.path, self.target)
        else:
            with on_disk("rename a checkpoint to", self.target):
                calls.rename(self.path, self.target)
        with on_disk("sync", parent):
            calls.sync_folder(parent)
        with on_disk("point to the newest checkpoint with", parent / LATEST):
            _point_latest_to(self.target)
            calls.sync_folder(parent)
        self._let_go()
        if replaced:
            unfinished.remove(self.path)
        if keep_last is not None:
            older = [(path, found) for path, found in older if path != self.target]
            older.sort(key=lambda entry: entry[1].sequence)
            for path, _ in older[: max(0, len(older) + 1 - keep_last)]:
                _delete(path)

    def abandon(self) -> None:
        """Remove what was written, and what it has replaced already."""
        unfinished.remove(self.path)
        self._let_go()

    def _let_go(self) -> None:
        """Give the lock back; a checkpoint in its place does not need its file."""
        if self._dropped.detach():
            with contextlib.suppress(OSError):
                calls.unlink(self.target / unfinished.LOCK)
            calls.close(self._lock)


def saving_path(target: Path) -> Path:
    return target.parent / f".{target.name}{_SAVING}"


def check_target(target: Path) -> None:
    """Raise CheckpointError where a checkpoint cannot be put at `target`."""
    if target.name in ("", "..", LATEST) or target.is_symlink():
        raise CheckpointError(
            f"cannot save to {target}: it is the link to the newest checkpoint, or no name; give "
            "a folder beside it"
        )
    if not target.exists():
        return
    if not target.is_dir():
        raise CheckpointError(f"cannot save to {target}: it is a file; give a new folder")
    if any(target.iterdir()) and not (target / NAME).exists():
        raise CheckpointError(
            f"cannot save to {target}: it exists and is no checkpoint of gemini; nothing was "
            "changed. Give a new folder"
        )


def find(path: Path) -> Path:
    """The checkpoint that `path` means: itself, or the newest of the folder that it is.

    Raises FormatError where there is none. Reports what a dead save left beside it.
    """
    if not path.exists():
        partial = " (a save to it did not end)" if saving_path(path).exists() else ""
        raise FormatError(f"{path} does not exist{partial}; expected a checkpoint")
    if path.is_dir() and not (path / METADATA).exists() and (path / LATEST).exists():
        path = path / LATEST
        if path.is_symlink() and not is_plain_name(os.readlink(path)):
            raise FormatError(f"{path} leads out of its folder; give the checkpoint itself")
    path = path.resolve()
    for left in dead(path.parent):
        log.warning("ignored %s: a save that did not end", left)
    return path


def checkpoints(parent: Path) -> Iterator[tuple[Path, Manifest]]:
    """Checkpoints of a folder that can be read, by name."""
    for path in sorted(parent.iterdir()):
        if path.is_symlink() or not path.is_dir() or path.name.startswith("."):
            continue
        try:
            manifest = read_manifest(path)
        except CheckpointError:
            continue  # not ours to judge here, and never ours to delete
        if manifest is not None:
            yield path, manifest


def dead(parent: Path) -> Iterator[Path]:
    """What saves and deletions in `parent` left whose process died, each locked meanwhile.

    A link that was to become `latest` is its owner's while the folder that it points to is locked.
    """
    try:
        names = sorted(os.listdir(parent))
    except OSError:
        return
    for name in names:
        path = parent / name
        if path.is_symlink():
            target = os.readlink(path)
            ours = _LINK.fullmatch(name) is not None and is_plain_name(target)
            if ours and not unfinished.owner_lives(parent / target):
                yield path
        elif name.startswith(".") and name.endswith((_SAVING, _DELETING)) and path.is_dir():
            with unfinished.locked_if_dead(path) as is_dead:
                if is_dead:
                    yield path


def remove_dead(parent: Path) -> None:
    """Remove what `dead` finds, and say so."""
    found = False
    for path in dead(parent):
        if not found:
            calls.sync_folder(parent)  # what is gone by its name may not come back half empty
            found = True
        log.warning("removed %s, left by a save that did not end", path)
        if path.is_symlink():
            calls.unlink(path)
        else:
            unfinished.remove(path)


def _delete(path: Path) -> None:
    """Remove a checkpoint so that no half of it is ever taken for one."""
    away = path.parent / f".{path.name}{_DELETING}"
    try:
        calls.rename(path, away)
        calls.sync_folder(path.parent)
    except OSError as error:
        log.warning("%s was not deleted: %s", path, error)
        return
    unfinished.remove(away)


def _point_latest_to(target: Path) -> None:
    link = target.parent / f".{LATEST}.{secrets.token_hex(4)}"
    calls.symlink(target.name, link)
    try:
        calls.rename(link, target.parent / LATEST)
    except OSError:
        calls.unlink(link)
        raise


def _exchange(new: Path, old: Path) -> None:
    """Swap two folders in one step. Raises CheckpointError where the file system cannot."""
    try:
        calls.exchange(new, old)
    except OSError as error:
        raise CheckpointError(
            f"cannot replace {old} in one step ({error.strerror}); save to a new path"
        ) from error
