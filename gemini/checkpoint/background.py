"""The one save that may be under way in this process, and where its error comes out."""

from __future__ import annotations

import atexit
import io
import logging
import multiprocessing
import multiprocessing.util
import os
import sys
import threading
from collections.abc import Callable
from typing import TextIO

log = logging.getLogger("gemini")


class BackgroundSave:
    """A ticket for a save that goes on in a thread."""

    def __init__(self, path: str, work: Callable[[], None]) -> None:
        self.path = path
        self._error: BaseException | None = None
        self.was_raised = False
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, args=(work,), name="checkpoint")
        self._thread.start()

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            self._error = error
            log.error("the save to %s failed: %s", self.path, error)

    def ready(self) -> bool:
        """Whether it has ended, well or not."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Return when the checkpoint is complete. Raises CheckpointError."""
        self._thread.join()
        if self._error is not None:
            self.was_raised = True
            raise self._error

    @property
    def is_ours(self) -> bool:
        """Whether this process began it, and not one that it was forked from."""
        return os.getpid() == self._pid

    @property
    def error(self) -> str:
        """What went wrong and was not raised yet; empty where nothing did, or it still runs."""
        if self._error is None or self.was_raised:
            return ""
        return f"the asynchronous save to {self.path} failed: {self._error}"


_last: BackgroundSave | None = None


def start(path: str, work: Callable[[], None]) -> BackgroundSave:
    """Run `work` in a thread. There is no other save under way."""
    global _last
    assert _last is None or _last.ready()
    _last = BackgroundSave(path, work)
    multiprocessing.util.Finalize(None, _at_end_of_child, exitpriority=0)
    return _last


def running() -> str:
    """Path of the save that is under way, or nothing."""
    return "" if _last is None or _last.ready() else _last.path


def take_error() -> str:
    """The error of the last save, once."""
    if _last is None or not _last.ready():
        return ""
    error = _last.error
    _last.was_raised = True
    return error


def wait() -> None:
    """Until no save is under way."""
    if _last is not None:
        _last._thread.join()


# Before the interpreter forbids threads to begin anything, which it does before it joins them.
threading._register_atexit(wait)  # type: ignore[attr-defined]


class _FailedSave(io.TextIOBase):
    """`sys.stderr` of a program whose last save failed.

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
            raise OSError("an asynchronous save failed")


@atexit.register
def _at_exit() -> None:
    """Threads have ended: an error that nobody asked for is said, and is in the exit status."""
    if _last is not None and _last.is_ours and _last.error:
        sys.stderr = _FailedSave(sys.stderr)
        sys.stderr.write(f"{_last.error}\n")


def _at_end_of_child() -> None:
    """The same in a process of multiprocessing, which ends without `atexit`."""
    if _last is not None and _last.is_ours and multiprocessing.parent_process() is not None:
        wait()
        if _last.error:
            raise SystemExit(1)
