"""System calls that make, change and sync files, in one place.

They are looked up here at every call, so a test puts another function in the place of one: it
records what a disk was told, or fails as a disk does.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import importlib.util
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

_libc = ctypes.CDLL(None, use_errno=True)
_FALLOC_FL_KEEP_SIZE, _FALLOC_FL_PUNCH_HOLE = 0x01, 0x02
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


def _call(name: str, module: Any = os) -> Any:
    """A call of the system, or one that refuses by name: planning needs none."""

    def absent(*_: Any) -> NoReturn:
        raise OSError(
            errno.ENOSYS, f"{name} is not on this system: files of state and checkpoints need Linux"
        )

    return getattr(module, name, absent)


_fcntl = importlib.import_module("fcntl") if importlib.util.find_spec("fcntl") else None
LOCK_SH, LOCK_EX, LOCK_NB = (
    int(getattr(_fcntl, name, 0)) for name in ("LOCK_SH", "LOCK_EX", "LOCK_NB")
)
O_DIRECT = int(getattr(os, "O_DIRECT", 0))

open_file = os.open
close = os.close
lock: Callable[[int, int], None] = _call("flock", _fcntl)
preadv: Callable[[int, Sequence[Any], int], int] = _call("preadv")
pwritev: Callable[[int, Sequence[Any], int], int] = _call("pwritev")
allocate: Callable[[int, int, int], None] = _call("posix_fallocate")
truncate = os.ftruncate
fsync = os.fsync
fdatasync: Callable[[int], None] = _call("fdatasync")
mkdir = os.mkdir
rmdir = os.rmdir
unlink = os.unlink
rename = os.rename
symlink = os.symlink


def punch(fd: int, offset: int, nbytes: int) -> bool:
    """Give whole pages of a file back to the file system. Returns False where it does not take
    them."""
    mode = _FALLOC_FL_KEEP_SIZE | _FALLOC_FL_PUNCH_HOLE
    fallocate = getattr(_libc, "fallocate64", None) or getattr(_libc, "fallocate", None)
    if fallocate is None:
        return False
    at, length = ctypes.c_int64(offset), ctypes.c_int64(nbytes)
    return bool(fallocate(fd, mode, at, length) == 0)


def exchange(one: Path, other: Path) -> None:
    """Swap two names in one step. Raises OSError where the file system cannot."""
    result = _libc.renameat2(
        _AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE
    )
    if result:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), str(other))


# -- made of the above --


def reserve(fd: int, runs: Sequence[tuple[int, int]]) -> None:
    """Allocate runs of a file: (offset, bytes) of each. Raises OSError.

    A request for more than the free space is refused before it is tried, as the attempt would fill
    the disk for everybody.
    """
    status = os.fstatvfs(fd)
    total = sum(nbytes for _, nbytes in runs)
    if status.f_blocks and total > status.f_bfree * status.f_frsize:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    for offset, nbytes in runs:
        allocate(fd, offset, nbytes)


def sync_folder(path: Path) -> None:
    """Sync a folder: names made, changed or removed in it are on the disk when this returns."""
    fd = open_file(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fsync(fd)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a file system where folders are not synced
            raise
    finally:
        close(fd)


def sync_file(path: Path) -> None:
    """Sync a file: its data are on the disk when this returns. Raises OSError."""
    fd = open_file(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fsync(fd)
    finally:
        close(fd)


def make_folders(path: Path) -> None:
    """Make a folder and its missing parents, durably. Raises OSError."""
    missing = [path]
    while not missing[-1].parent.exists():
        missing.append(missing[-1].parent)
    for folder in reversed(missing):
        with contextlib.suppress(FileExistsError):
            mkdir(folder)
            sync_folder(folder.parent)


def write_whole(path: Path, data: bytes) -> None:
    """Write a new file with `data`, synced. Raises OSError; a short write is continued."""
    fd = open_file(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        done = 0
        while done < len(data):
            moved = pwritev(fd, [data[done:]], done)
            if not moved:
                raise OSError(errno.EIO, "the write came up short", str(path))
            done += moved
        fsync(fd)
    finally:
        close(fd)
