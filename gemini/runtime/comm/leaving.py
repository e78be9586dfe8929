"""The end of a rank: what failed unasked is in its exit status, and gloo's threads are at rest.

Work that goes on behind a call (a save, the tail of a step) may fail when nobody asks for it any
more. Then the program says so on stderr, and ends with status 120.

A thread of gloo lets go of a tensor after it has told who waits, and needs the interpreter's lock
for it. Where the machine is busy it may come so late that Python has begun to end. Then the process
is aborted, with its work done: "terminate called without an active exception".

So what holds a group that was destroyed is let go of here, and with the group its threads end. A
group that was not destroyed, or that others hold (functions of torch.distributed.nn do, where that
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

_members: weakref.WeakSet[Communicator] = weakref.WeakSet()


def watch(member: Communicator) -> None:
    """It holds a group of several ranks, over gloo."""
    rest_at_exit()
    _members.add(member)


@cache
def rest_at_exit() -> None:
    """When this process ends, let go of groups and give gloo's threads time."""
    atexit.register(_rest)  # in front of what was registered before


def _rest() -> None:
    if not dist.is_initialized():
        for member in list(_members):
            member.leave_group()
        gc.collect()
    time.sleep(_REST_SECONDS)


_unasked: dict[Hashable, tuple[int, Callable[[], str]]] = {}  # with the process they are of


def ask_at_the_end(key: Hashable, error: Callable[[], str]) -> None:
    """Ask when this process ends, until `was_asked(key)`; not in processes that it forks.

    error: waits for the work; what went wrong that nobody was told, empty where nothing did.
    """
    _unasked[key] = os.getpid(), error
    if multiprocessing.parent_process() is not None:
        _watch_end_of_child(os.getpid())


@cache
def _watch_end_of_child(pid: int) -> None:
    """A process of multiprocessing ends without `atexit`; before its files of blocks go, at 0."""
    multiprocessing.util.Finalize(None, _at_end_of_child, exitpriority=1)


def was_asked(key: Hashable) -> None:
    _unasked.pop(key, None)


def _errors() -> list[str]:
    own = [error for pid, error in _unasked.values() if pid == os.getpid()]
    return [text for error in own if (text := error())]


class _Failed(io.TextIOBase):
    """`sys.stderr` of a program whose last work failed.

    A program that has come to its end has its exit status, but for one thing: where a stream cannot
    be flushed at the very end, Python makes it 120.
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
    """Threads have ended."""
    errors = _errors()
    if errors:
        sys.stderr = _Failed(sys.stderr)
        sys.stderr.write("".join(f"{text}\n" for text in errors))


def _at_end_of_child() -> None:
    errors = _errors()
    if errors:
        sys.stderr.write("".join(f"{text}\n" for text in errors))
        raise SystemExit(1)
