"""End of a rank: errors that nobody has read set its exit status, and gloo's threads come to rest.

Work that continues after a call (a save, the tail of a step) may fail when the program does not ask
for it any more. Then the program prints the error on stderr, and ends with status 120.

A thread of gloo frees a tensor after it has signalled the end of a collective, and needs the
interpreter's lock for that. On a busy machine this may come so late that Python has begun to end.
Then the process is aborted, with its work done: "terminate called without an active exception".

So references to a destroyed group are dropped here, and with the group its threads end. A group
that was not destroyed, or that other code refers to (functions of torch.distributed.nn do, if that
was imported late), has threads that cannot be ended, since they may wait for another rank: they are
given time.
"""

from __future__ import annotations

import atexit
import gc
import io
import multiprocessing
import multiprocessing.util
import os
import sys
import time
import weakref
from collections.abc import Callable, Hashable
from functools import cache
from typing import TYPE_CHECKING, TextIO

import torch.distributed as dist

if TYPE_CHECKING:
    from .communicator import Communicator

_REST_SECONDS = 0.05  # until a thread that can run has run, on a busy machine

_members: weakref.WeakKeyDictionary[Communicator, None] = weakref.WeakKeyDictionary()


def watch(member: Communicator) -> None:
    """Register a communicator of several ranks over gloo, to drop its group at the end."""
    rest_at_exit()
    _members[member] = None


@cache
def rest_at_exit() -> None:
    """Drop groups, and give gloo's threads time, when this process ends."""
    atexit.register(_drop_groups)  # runs before functions that were registered earlier


def _drop_groups() -> None:
    # Only of a destroyed group: the threads of another may wait for a rank that still works.
    if not dist.is_initialized():
        for member in list(_members):
            member.leave_group()
        gc.collect()
    time.sleep(_REST_SECONDS)


_unasked: dict[Hashable, tuple[int, Callable[[], str]]] = {}  # (id of the process, error)


def ask_at_the_end(key: Hashable, error: Callable[[], str]) -> None:
    """Call `error` when this process ends, unless `was_asked(key)` before; not in its forks.

    error: waits for the work and returns an error that was not raised yet, in words, or "".
    """
    _unasked[key] = os.getpid(), error
    if multiprocessing.parent_process() is not None:
        _watch_end_of_child(os.getpid())


@cache
def _watch_end_of_child(pid: int) -> None:
    """Call `_at_end_of_child` in a process of multiprocessing, which ends without `atexit`.

    Priority 1 is before the files of blocks are removed, at priority 0.
    """
    multiprocessing.util.Finalize(None, _at_end_of_child, exitpriority=1)


def was_asked(key: Hashable) -> None:
    _unasked.pop(key, None)


def _errors() -> list[str]:
    own = [error for pid, error in _unasked.values() if pid == os.getpid()]
    return [text for error in own if (text := error())]


class _Failed(io.TextIOBase):
    """Stand-in for `sys.stderr` in a program whose last work failed.

    At its end a program cannot change its exit status but in one way: if a stream cannot be flushed
    then, Python sets the status to 120.
    """

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        return len(text) if self._stream is None else self._stream.write(text)

    def flush(self) -> None:
        if self._stream is not None:
            self._stream.flush()
        if sys.is_finalizing():
            raise OSError("what went on behind the program failed")


@atexit.register
def _at_exit_errors() -> None:
    """Print the errors that nobody has read; all threads have ended by now."""
    errors = _errors()
    if errors:
        sys.stderr = _Failed(sys.stderr)
        sys.stderr.write("".join(f"{text}\n" for text in errors))


def _at_end_of_child() -> None:
    errors = _errors()
    if errors:
        sys.stderr.write("".join(f"{text}\n" for text in errors))
        raise SystemExit(1)
