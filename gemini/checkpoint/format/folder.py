"""Folder of a checkpoint: written under a temporary name, complete before it is renamed.

    PARENT/.NAME.saving   while it is written, with a lock file of rank 0
    PARENT/NAME           a checkpoint: it has a manifest, which was written last
    PARENT/latest         a symlink to the newest checkpoint
    PARENT/.latest.RANDOM the link, before it is renamed to `latest`
    PARENT/.NAME.deleting a checkpoint that is being deleted (`keep_last`)

A dead folder (its process was killed) is recognised by its content and its lock, reported, and
removed by the next save. A name alone proves nothing: anybody may have a folder `.thesis.saving`.
A folder is ours if it has our lock file, or a manifest. The lock file is the first file that is
made in a folder and the last that is removed, and is locked for as long as its owner lives.

[Note: order on disk] A name is synced before anything that depends on it begins. The files of a
checkpoint are synced before it is renamed into its place; the rename before `latest` points to it
and before the checkpoint that it replaced is removed; the removal of a name before the files under
it are removed. So after a power failure every name has a whole checkpoint, or none.

[Note: newborn folders] A folder looks dead between its making and its lock. So a process that
removes a folder has its lock meanwhile, and a process that made one checks, once it has the lock,
that the lock file still exists.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import shutil
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from gemini.nvme.files import calls
from gemini.optim.state.deferred_signals import DeferredSignals

from .manifest import (
    METADATA,
    NAME,
    CheckpointError,
    FormatError,
    Manifest,
    is_plain_name,
    on_disk,
    read_manifest,
)

log = logging.getLogger("gemini")

LATEST = "latest"
LOCK = "saving.lock"
_MAGIC = b"gemini: this folder is being written\n"
_SAVING, _DELETING = ".saving", ".deleting"
_LINK = re.compile(rf"\.{LATEST}\.[0-9a-f]{{8}}")


class SaveFolder:
    """Folder of one save, on the rank that commits it. Other ranks write into `path`."""

    def __init__(self, target: Path) -> None:
        """Make and lock `path`. Raises CheckpointError, before anything is changed, if `target`
        cannot be a checkpoint."""
        self.target = target
        self.path = saving_path(target)
        check_target(target)
        with on_disk("save to", target):
            calls.make_folders(target.parent)
            remove_dead(target.parent)
            try:
                with DeferredSignals():  # else Ctrl-C may leave the lock to nobody
                    self._lock = make_locked(self.path)
                    self._dropped = weakref.finalize(self, calls.close, self._lock)
                    self._dropped.atexit = False  # a save may go on until the process ends
            except FileExistsError:
                refuse(self.path, target, "save")

    def commit(self, manifest: Manifest, metadata: bytes, keep_last: int | None) -> None:
        """Make the folder a checkpoint. All data files are written and synced."""
        parent = self.target.parent
        with on_disk("read", parent):
            older = list(checkpoints(parent))
        sequence = max((found.sequence for _, found in older), default=0) + 1
        last = replace(manifest, sequence=sequence).encode()
        # The manifest goes last: a folder that has one is complete. For the syncs below see
        # [Note: order on disk].
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
            remove_folder(self.path)
        if keep_last is not None:
            older = [(path, found) for path, found in older if path != self.target]
            older.sort(key=lambda entry: entry[1].sequence)
            for path, _ in older[: max(0, len(older) + 1 - keep_last)]:
                _delete(path)

    def abandon(self) -> None:
        """Remove the folder, or the old checkpoint that the rename has put in its place."""
        remove_folder(self.path)
        self._let_go()

    def _let_go(self) -> None:
        """Release the lock, and remove its file from a finished checkpoint."""
        if self._dropped.detach():
            with contextlib.suppress(OSError):
                calls.unlink(self.target / LOCK)
            calls.close(self._lock)


def saving_path(target: Path) -> Path:
    return target.parent / f".{target.name}{_SAVING}"


def check_target(target: Path) -> None:
    """Raise CheckpointError if `target` cannot be a checkpoint's path."""
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
    """Path of a checkpoint: `path` itself, or the newest checkpoint in that folder.

    Logs the folders of dead saves next to it. Raises FormatError if there is no checkpoint.
    """
    if not path.exists():
        partial = " (a save to it did not end)" if saving_path(path).exists() else ""
        raise FormatError(f"{path} does not exist{partial}; expected a checkpoint")
    if path.is_dir() and not (path / METADATA).exists() and (path / LATEST).exists():
        path = path / LATEST
        if path.resolve().parent != path.parent.resolve():
            raise FormatError(f"{path} leads out of its folder; give the checkpoint itself")
    path = path.resolve()
    for left in dead(path.parent):
        log.warning("ignored %s: a save that did not end", left)
    return path


def checkpoints(parent: Path) -> Iterator[tuple[Path, Manifest]]:
    """Readable checkpoints of a folder with their manifests, ordered by name."""
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
    """Folders and links in `parent` of saves and deletions whose process died.

    Each folder is locked until the next is asked for. A link that was to become `latest` is alive
    while the folder that it points to is locked.
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
            if ours and not owner_lives(parent / target):
                yield path
        elif name.startswith(".") and name.endswith((_SAVING, _DELETING)) and path.is_dir():
            with locked_if_dead(path) as is_dead:
                if is_dead:
                    yield path


def remove_dead(parent: Path) -> None:
    """Remove the paths that `dead` yields, and log them."""
    found = False
    for path in dead(parent):
        if not found:
            calls.sync_folder(parent)  # see [Note: order on disk]
            found = True
        log.warning("removed %s, left by a save that did not end", path)
        if path.is_symlink():
            calls.unlink(path)
        else:
            remove_folder(path)


def _delete(path: Path) -> None:
    """Delete a checkpoint under another name, so that no half of it is taken for one."""
    away = path.parent / f".{path.name}{_DELETING}"
    try:
        calls.rename(path, away)
        calls.sync_folder(path.parent)
    except OSError as error:
        log.warning("%s was not deleted: %s", path, error)
        return
    remove_folder(away)


def _point_latest_to(target: Path) -> None:
    # A symlink cannot be changed in place: a new one is renamed over it, so that `latest` always
    # exists.
    link = target.parent / f".{LATEST}.{secrets.token_hex(4)}"
    calls.symlink(target.name, link)
    try:
        calls.rename(link, target.parent / LATEST)
    except OSError:
        calls.unlink(link)
        raise


def _exchange(new: Path, old: Path) -> None:
    """Swap two folders in one step. Raises CheckpointError if the file system cannot."""
    try:
        calls.exchange(new, old)
    except OSError as error:
        raise CheckpointError(
            f"cannot replace {old} in one step ({error.strerror}); save to a new path"
        ) from error


# -- folders that are being written or removed --


def make_locked(path: Path) -> int:
    """Make a folder, lock it, and return the lock's descriptor. See [Note: newborn folders].

    Raises FileExistsError if a folder with content exists, OSError if none can be made.
    """
    while True:
        with contextlib.suppress(OSError):
            calls.rmdir(path)  # where it is empty: its owner died before it had its lock
        calls.mkdir(path)
        try:
            lock = calls.open_file(
                path / LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666
            )
        except FileNotFoundError:
            continue  # somebody took it for dead
        except OSError:
            remove_folder(path)
            raise
        try:
            calls.pwritev(lock, [_MAGIC], 0)
            calls.lock(lock, calls.LOCK_EX)
            # No link: a process that took the folder for dead has removed it; make another.
            if os.fstat(lock).st_nlink:
                calls.fsync(lock)
                calls.sync_folder(path)
                return lock
        except BaseException:
            calls.close(lock)
            remove_folder(path)
            raise
        calls.close(lock)


@contextmanager
def locked_if_dead(path: Path) -> Iterator[bool]:
    """Whether a folder is ours and its owner died; it stays locked inside the context."""
    lock = _open_lock(path / LOCK)
    try:
        if lock is None:
            yield _has_manifest(path)  # complete, and then replaced or about to be deleted
        else:
            yield _locks(lock) and _is_ours(lock, path)
    finally:
        if lock is not None:
            calls.close(lock)


def refuse(path: Path, target: Path, what: str) -> NoReturn:
    """Raise CheckpointError: `path`, which `what` (a verb) to `target` needs, is in use."""
    if owner_lives(path):
        raise CheckpointError(
            f"another {what} to {target} is under way; wait for it, or give another path"
        )
    raise CheckpointError(
        f"cannot {what} to {target}: {path} is in the way, and was not made by this program; move "
        "it, or give another path"
    )


def owner_lives(path: Path) -> bool:
    """Whether a process has the lock of a folder."""
    lock = _open_lock(path / LOCK)
    if lock is None:
        return False
    try:
        return not _locks(lock)
    finally:
        calls.close(lock)


def _locks(lock: int) -> bool:
    """Lock the file if no process has it locked; return whether it is locked now."""
    try:
        calls.lock(lock, calls.LOCK_EX | calls.LOCK_NB)
    except OSError:
        return False
    return True


def remove_folder(path: Path) -> None:
    """Remove a folder of ours. The lock file and the manifest go last, and stay if any other file
    cannot be removed: the next save then still knows the folder and continues."""
    with contextlib.suppress(OSError):
        marks = {LOCK, NAME} & set(names := os.listdir(path))
        for name in sorted(set(names) - marks):
            inner = path / name
            if inner.is_dir() and not inner.is_symlink():
                shutil.rmtree(inner)
            else:
                calls.unlink(inner)
        calls.sync_folder(path)
        for name in sorted(marks):
            calls.unlink(path / name)
        calls.rmdir(path)


def _is_ours(lock: int, path: Path) -> bool:
    """Whether the lock file has our content, or is empty and alone, as in a newborn folder."""
    content = os.pread(lock, len(_MAGIC) + 1, 0)
    return content == _MAGIC or (not content and os.listdir(path) == [LOCK])


def _open_lock(path: Path) -> int | None:
    """Descriptor of a lock file, None if it cannot be opened. Writable if possible: NFS locks no
    other."""
    for access in (os.O_RDWR, os.O_RDONLY):
        with contextlib.suppress(OSError):
            return calls.open_file(path, access | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    return None


def _has_manifest(path: Path) -> bool:
    try:
        return read_manifest(path) is not None
    except CheckpointError:
        return False
