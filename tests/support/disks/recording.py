"""What our code told a disk, in order: `nvme.files.calls` with every call written down.

    with recorded(folder) as log:
        ...

The calls are carried out too, but for syncs, which only matter when the power fails.
"""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from nvme.files import calls

ROOT = 0  # the inode of the recorded folder


@dataclass(frozen=True)
class Names:
    """Entries of folders that change together: (folder, name, inode or None)."""

    entries: tuple[tuple[int, str, int | None], ...]


@dataclass(frozen=True)
class Write:
    inode: int
    offset: int
    data: bytes


@dataclass(frozen=True)
class Resize:
    inode: int
    nbytes: int
    shrinks: bool  # else the file becomes at least as long


@dataclass(frozen=True)
class Sync:
    """What was written to a file, or the names in a folder, are on the disk."""

    inode: int


@dataclass(frozen=True)
class Note:
    """The test says what has happened."""

    text: Any


Op = Names | Write | Resize | Sync | Note


@dataclass
class Log:
    """The calls, and the tree that they have made."""

    root: Path
    ignored: tuple[str, ...] = ()
    ops: list[Op] = field(default_factory=list)
    folders: dict[int, dict[str, int]] = field(default_factory=lambda: {ROOT: {}})
    links: dict[int, str] = field(default_factory=dict)
    inodes: int = 1
    fds: dict[int, int] = field(default_factory=dict)
    lock: threading.RLock = field(default_factory=threading.RLock)

    def ignores(self, path: Path) -> bool:
        return any(part in path.name for part in self.ignored)

    def note(self, text: Any) -> None:
        self.ops.append(Note(text))

    def find(self, path: Any) -> tuple[int, str, int | None] | None:
        """(folder, name, inode) of a path in the recorded folder; None for one that is outside."""
        path = Path(os.fspath(path))
        if path == self.root:
            return ROOT, "", ROOT
        if self.ignores(path):
            return None
        try:
            *parents, name = path.relative_to(self.root).parts
        except ValueError:
            return None
        folder = ROOT
        for parent in parents:
            folder = self.folders[folder][parent]
        return folder, name, self.folders[folder].get(name)

    def new(self) -> int:
        self.inodes += 1
        return self.inodes - 1

    def set_names(self, *entries: tuple[int, str, int | None]) -> None:
        for folder, name, inode in entries:
            if inode is None:
                self.folders[folder].pop(name, None)
            else:
                self.folders[folder][name] = inode
        self.ops.append(Names(entries))


@contextmanager
def recorded(root: Path, ignored: tuple[str, ...] = ()) -> Iterator[Log]:
    """Record the calls on an empty folder, but for files that have a part of `ignored` in their
    names."""
    assert not any(root.iterdir())
    log = Log(root, ignored)
    with mock.patch.multiple(calls, **{name: _of(log, name) for name in _RECORDED}):
        yield log


def _of(log: Log, name: str) -> Any:
    real, record = getattr(calls, name), _RECORDED[name]

    def call(*args: Any, **kwargs: Any) -> Any:
        with log.lock:
            return record(log, real, *args, **kwargs)

    return call


def _open_file(log: Log, real: Any, path: Any, flags: int, mode: int = 0o777) -> int:
    fd: int = real(path, flags, mode)
    log.fds.pop(fd, None)
    place = log.find(path)
    if place is not None:
        folder, name, inode = place
        if inode is None:
            assert flags & os.O_CREAT and stat.S_ISREG(os.fstat(fd).st_mode)
            inode = log.new()
            log.set_names((folder, name, inode))
        log.fds[fd] = inode
    return fd


def _close(log: Log, real: Any, fd: int) -> None:
    log.fds.pop(fd, None)
    real(fd)


def _pwritev(log: Log, real: Any, fd: int, buffers: Any, offset: int) -> int:
    done: int = real(fd, buffers, offset)
    if fd in log.fds:
        data = b"".join(bytes(buffer) for buffer in buffers)[:done]
        log.ops.append(Write(log.fds[fd], offset, data))
    return done


def _allocate(log: Log, real: Any, fd: int, offset: int, nbytes: int) -> None:
    real(fd, offset, nbytes)
    if fd in log.fds:
        log.ops.append(Resize(log.fds[fd], offset + nbytes, shrinks=False))


def _truncate(log: Log, real: Any, fd: int, nbytes: int) -> None:
    real(fd, nbytes)
    if fd in log.fds:
        log.ops.append(Resize(log.fds[fd], nbytes, shrinks=True))


def _punch(log: Log, real: Any, fd: int, offset: int, nbytes: int) -> bool:
    taken: bool = real(fd, offset, nbytes)
    if taken and fd in log.fds:
        log.ops.append(Write(log.fds[fd], offset, bytes(nbytes)))
    return taken


def _sync(log: Log, real: Any, fd: int) -> None:
    if fd in log.fds:
        log.ops.append(Sync(log.fds[fd]))
    else:
        real(fd)


def _mkdir(log: Log, real: Any, path: Any, mode: int = 0o777) -> None:
    real(path, mode)
    place = log.find(path)
    if place is not None:
        inode = log.new()
        log.folders[inode] = {}
        log.set_names((place[0], place[1], inode))


def _remove(log: Log, real: Any, path: Any) -> None:
    real(path)
    place = log.find(path)
    if place is not None:
        log.set_names((place[0], place[1], None))


def _rename(log: Log, real: Any, old: Any, new: Any) -> None:
    real(old, new)
    before, after = log.find(old), log.find(new)
    if before is None or after is None:
        return
    log.set_names((before[0], before[1], None), (after[0], after[1], before[2]))


def _exchange(log: Log, real: Any, one: Any, other: Any) -> None:
    real(one, other)
    a, b = log.find(one), log.find(other)
    assert a is not None and b is not None
    log.set_names((a[0], a[1], b[2]), (b[0], b[1], a[2]))


def _symlink(log: Log, real: Any, target: Any, path: Any) -> None:
    real(target, path)
    place = log.find(path)
    if place is not None:
        inode = log.new()
        log.links[inode] = os.fspath(target)
        log.set_names((place[0], place[1], inode))


_RECORDED: dict[str, Any] = {
    "open_file": _open_file,
    "close": _close,
    "pwritev": _pwritev,
    "allocate": _allocate,
    "truncate": _truncate,
    "punch": _punch,
    "fsync": _sync,
    "fdatasync": _sync,
    "mkdir": _mkdir,
    "rmdir": _remove,
    "unlink": _remove,
    "rename": _rename,
    "exchange": _exchange,
    "symlink": _symlink,
}
