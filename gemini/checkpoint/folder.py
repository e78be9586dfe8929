"""The folder of a checkpoint: made beside its place, complete before it is renamed into it.

    PARENT/.NAME.saving   while it is written, locked by rank 0 of the job that writes
    PARENT/NAME           a checkpoint: its manifest is there, and was written last
    PARENT/latest         a symlink to the newest one
    PARENT/.latest.RANDOM the link, before it is renamed to `latest`
    PARENT/.NAME.deleting on its way out (`keep_last`)

What is dead is recognised by a lock, reported, and removed by the next save.
"""

from __future__ import annotations

import ctypes
import fcntl
import logging
import os
import secrets
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from .errors import CheckpointError, CorruptError, FormatError
from .manifest import METADATA, NAME, Manifest

log = logging.getLogger("gemini")

LATEST = "latest"
_SAVING, _DELETING = ".saving", ".deleting"
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


class SaveFolder:
    """The folder of one save, on the rank that commits it. Other ranks write into `path`."""

    def __init__(self, target: Path) -> None:
        """Raises CheckpointError, before anything is changed, for a place that cannot take one."""
        self.target = target
        self.path = saving_path(target)
        check_target(target)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            self._lock = self._make()
        except OSError as error:
            raise CheckpointError(f"cannot save to {target}: {error.strerror or error}") from error

    def _make(self) -> int:
        """Make the folder and hold its lock."""
        remove_dead(self.target.parent)
        try:
            self.path.mkdir()
        except FileExistsError:
            raise CheckpointError(
                f"another save to {self.target} is under way; wait for it, or give another path"
            ) from None
        lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(lock, fcntl.LOCK_EX)
        return lock

    def commit(self, manifest: Manifest, metadata: bytes, keep_last: int | None) -> None:
        """Make the folder a checkpoint. All data files are written and synced."""
        parent = self.target.parent
        older = list(checkpoints(parent))
        sequence = max((found.sequence for _, found in older), default=0) + 1
        _write_synced(self.path / METADATA, metadata)
        _write_synced(self.path / NAME, replace(manifest, sequence=sequence).encode())
        _sync_folder(self.path)
        replaced = self.target.is_dir() and any(self.target.iterdir())
        if replaced:
            _exchange(self.path, self.target)
        else:
            os.rename(self.path, self.target)
        _sync_folder(parent)
        _point_latest_to(self.target)
        _sync_folder(parent)
        os.close(self._lock)
        if replaced:
            shutil.rmtree(self.path, ignore_errors=True)
        if keep_last is not None:
            older = [(path, found) for path, found in older if path != self.target]
            older.sort(key=lambda entry: entry[1].sequence)
            for path, _ in older[: max(0, len(older) + 1 - keep_last)]:
                _delete(path)

    def abandon(self) -> None:
        """Remove what was written."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


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
    path = path.resolve()
    for left in dead(path.parent):
        log.warning("ignored %s: a save that did not end", left)
    return path


def read_manifest(path: Path) -> Manifest | None:
    """None where the folder has none. Raises FormatError or CorruptError."""
    file = path / NAME
    try:
        return Manifest.decode(file.read_bytes(), str(file))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CorruptError(f"{file} cannot be read: {error.strerror}") from error


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

    A folder is its owner's while the owner holds its lock; a link that was to become `latest` is
    its owner's while the folder that it points to is locked.
    """
    try:
        names = sorted(os.listdir(parent))
    except OSError:
        return
    for name in names:
        path = parent / name
        is_link = name.startswith(f".{LATEST}.") and path.is_symlink()
        if not is_link and not (name.startswith(".") and name.endswith((_SAVING, _DELETING))):
            continue
        try:
            owned = parent / os.readlink(path) if is_link else path
            lock = os.open(owned, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:
            if is_link and path.is_symlink():
                yield path  # it points to nothing
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield path
        except BlockingIOError:
            continue  # its owner lives
        finally:
            os.close(lock)


def remove_dead(parent: Path) -> None:
    """Remove what `dead` finds, and say so."""
    for path in dead(parent):
        log.warning("removed %s, left by a save that did not end", path)
        if path.is_symlink():
            path.unlink(missing_ok=True)
        else:
            shutil.rmtree(path, ignore_errors=True)


def _delete(path: Path) -> None:
    """Remove a checkpoint so that no half of it is ever taken for one."""
    away = path.parent / f".{path.name}{_DELETING}"
    try:
        os.rename(path, away)
    except OSError as error:
        log.warning("%s was not deleted: %s", path, error)
        return
    shutil.rmtree(away, ignore_errors=True)


def _point_latest_to(target: Path) -> None:
    link = target.parent / f".{LATEST}.{secrets.token_hex(4)}"
    os.symlink(target.name, link)
    try:
        os.replace(link, target.parent / LATEST)
    except OSError:
        os.unlink(link)
        raise


def _exchange(new: Path, old: Path) -> None:
    """Swap two folders in one step. Raises CheckpointError where the file system cannot."""
    libc = ctypes.CDLL(None, use_errno=True)
    result = libc.renameat2(
        _AT_FDCWD, os.fsencode(new), _AT_FDCWD, os.fsencode(old), _RENAME_EXCHANGE
    )
    if result:
        raise CheckpointError(
            f"cannot replace {old} in one step ({os.strerror(ctypes.get_errno())}); save to a new "
            "path"
        )


def _write_synced(path: Path, data: bytes) -> None:
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
