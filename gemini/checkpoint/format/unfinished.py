"""Folders that are being written or removed: which of them are ours, and whose owner died.

Anybody may have a folder `.thesis.saving`, so a name says nothing. A folder is ours if it has our
lock file, or a manifest: the lock file is the first that is made in one and the last that is
removed, and is locked for as long as its owner lives.

[Note: newborn folders] Between its making and its lock a folder looks dead. Who removes one holds
its lock meanwhile, and who makes one looks, once it has the lock, whether it is there.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from gemini.nvme.files import calls

from .errors import CheckpointError
from .manifest import NAME
from .small_files import read_manifest

LOCK = "saving.lock"
_MAGIC = b"gemini: this folder is being written\n"


def make(path: Path) -> int:
    """Make a folder and hold its lock, a descriptor. See [Note: newborn folders].

    Raises FileExistsError where there is one with content, OSError where it cannot be made.
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
            remove(path)
            raise
        try:
            calls.pwritev(lock, [_MAGIC], 0)
            calls.lock(lock, fcntl.LOCK_EX)
            if os.fstat(lock).st_nlink:
                calls.fsync(lock)
                calls.sync_folder(path)
                return lock
        except BaseException:
            calls.close(lock)
            remove(path)
            raise
        calls.close(lock)


@contextmanager
def locked_if_dead(path: Path) -> Iterator[bool]:
    """Whether a folder is ours and its owner died; locked for as long as this lasts."""
    lock = _open_lock(path / LOCK)
    try:
        if lock is None:
            yield _has_manifest(path)  # complete, and then replaced or about to be deleted
            return
        try:
            calls.lock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
            return
        yield _is_ours(lock, path)
    finally:
        if lock is not None:
            calls.close(lock)


def refuse(path: Path, target: Path, what: str) -> NoReturn:
    """Raise CheckpointError: `path`, which `what` to `target` needs, is somebody's."""
    if owner_lives(path):
        raise CheckpointError(
            f"another {what} to {target} is under way; wait for it, or give another path"
        )
    raise CheckpointError(
        f"cannot {what} to {target}: {path} is in the way, and was not made by this program; move "
        "it, or give another path"
    )


def owner_lives(path: Path) -> bool:
    """Whether somebody holds the lock of a folder."""
    lock = _open_lock(path / LOCK)
    if lock is None:
        return False
    try:
        calls.lock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        calls.close(lock)
    return False


def remove(path: Path) -> None:
    """Remove a folder of ours. What says that it is ours goes last, and stays where anything does:
    whoever comes next goes on."""
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
    """By the content of the lock file; one that is empty and alone was just being made."""
    content = os.pread(lock, len(_MAGIC) + 1, 0)
    return content == _MAGIC or (not content and os.listdir(path) == [LOCK])


def _open_lock(path: Path) -> int | None:
    """Writable where it can be: on NFS only such a descriptor can be locked."""
    for access in (os.O_RDWR, os.O_RDONLY):
        with contextlib.suppress(OSError):
            return calls.open_file(path, access | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    return None


def _has_manifest(path: Path) -> bool:
    try:
        return read_manifest(path) is not None
    except CheckpointError:
        return False
