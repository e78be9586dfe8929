"""The one save that may be under way in this process, and where its error comes out."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from gemini.runtime.comm.leaving import ask_at_the_end

log = logging.getLogger("gemini")


class BackgroundSave:
    """A ticket for a save that goes on in a thread."""

    def __init__(self, path: str, work: Callable[[], None]) -> None:
        self.path = path
        self._error: BaseException | None = None
        self.was_raised = False
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
    ask_at_the_end("save", _error_at_the_end)
    return _last


def _error_at_the_end() -> str:
    wait()
    return "" if _last is None else _last.error


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
