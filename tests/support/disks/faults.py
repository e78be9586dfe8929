"""Disks and files that fail: limits, changed bytes, and system calls that err where a test says."""

from __future__ import annotations

import os
import resource
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from nvme.files import calls


@contextmanager
def file_size_limit(nbytes: int) -> Iterator[None]:
    """RLIMIT_FSIZE of this process (`ulimit -f`)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def flip(path: Path, offset: int, bits: int = 0xFF) -> None:
    """Change bits of one byte."""
    with path.open("r+b") as file:
        before = os.pread(file.fileno(), 1, offset)
        os.pwrite(file.fileno(), bytes([before[0] ^ bits]), offset)


def path_of(target: Any) -> str:
    """Of a descriptor or a path."""
    if isinstance(target, int):
        return os.readlink(f"/proc/self/fd/{target}")
    return os.fspath(target)


@contextmanager
def failing(
    call: str,
    errno: int,
    part: str = "",
    *,
    after: int = 0,
    times: int = 1 << 30,
    first: Callable[..., Any] | None = None,
    behind: int = 0,
) -> Iterator[list[str]]:
    """`nvme.files.calls.CALL` fails with `errno` for files with `part` in their path; those paths.

    after: calls that go well before. times: calls that fail. first: called before each failure.
    behind: offset in the file before which a transfer goes well, and is not counted.
    """
    real, lock, seen, failed = getattr(calls, call), threading.Lock(), [0], []

    def fail(target: Any, *args: Any) -> Any:
        path = path_of(target)
        if part not in path or (behind and args[-1] < behind):
            return real(target, *args)
        with lock:
            number = seen[0]
            seen[0] += 1
        if number < after or number >= after + times:
            return real(target, *args)
        if first is not None:
            first(target, *args)
        failed.append(path)
        raise OSError(errno, os.strerror(errno), path)

    with mock.patch.object(calls, call, fail):
        yield failed


@contextmanager
def short(call: str, nbytes: int, part: str = "", *, after: int = 0) -> Iterator[list[int]]:
    """`preadv` or `pwritev` moves at most `nbytes` at a time; the lengths that were cut."""
    real, seen, cut = getattr(calls, call), [0], []

    def move(fd: int, buffers: list[Any], offset: int) -> int:
        (buffer,) = buffers
        view = memoryview(buffer)
        if part not in path_of(fd):
            return real(fd, buffers, offset)  # type: ignore[no-any-return]
        seen[0] += 1
        if view.nbytes <= nbytes or seen[0] <= after:
            return real(fd, buffers, offset)  # type: ignore[no-any-return]
        cut.append(view.nbytes)
        return real(fd, [view[:nbytes]], offset)  # type: ignore[no-any-return]

    with mock.patch.object(calls, call, move):
        yield cut


def spoil_block(optimizer: Any, index: int) -> Callable[[], None]:
    """Flip a byte of a committed block on disk; what is returned puts it back."""
    state = optimizer.targets[0].tiered_state.nvme
    state.empty_staging()  # what was read ahead
    extent = state.store.committed_extent(index)
    with state.store.paths[0].open("r+b") as file:
        file.seek(extent.offset)
        byte = file.read(1)
        file.seek(extent.offset)
        file.write(bytes([byte[0] ^ 1]))
    return lambda: _put_back(state.store.paths[0], extent.offset, byte)


def _put_back(path: Path, offset: int, byte: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(byte)
