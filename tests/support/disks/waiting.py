"""A disk that does not answer until a test says so."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from nvme.files import calls
from tests.support.disks.faults import path_of

PATIENCE_SECONDS = 20.0  # then the disk fails, and so does the test


class Waiting:
    """`waits`: calls that have come and were not answered. `answer`: they are, and all others."""

    def __init__(self) -> None:
        self._answers = threading.Event()
        self._came = threading.Semaphore(0)
        self.waits = 0

    def answer(self) -> None:
        self._answers.set()

    def answer_in(self, seconds: float) -> threading.Timer:
        timer = threading.Timer(seconds, self.answer)
        timer.start()
        return timer

    def until_asked(self) -> None:
        """Wait until a call does."""
        assert self._came.acquire(timeout=PATIENCE_SECONDS), "nobody asked the disk"

    def wait(self) -> None:
        self.waits += 1
        self._came.release()
        if not self._answers.wait(PATIENCE_SECONDS):
            raise OSError(errno.ETIMEDOUT, "the test never let the disk answer")


@contextmanager
def waiting(call: str, part: str = "", *, after: int = 0) -> Iterator[Waiting]:
    """`nvme.files.calls.CALL` waits for files with `part` in their path; the first `after` calls
    do not. What still waits at the end is answered."""
    real, lock, seen, disk = getattr(calls, call), threading.Lock(), [0], Waiting()

    def wait(target: Any, *args: Any) -> Any:
        if part in path_of(target):
            with lock:
                seen[0] += 1
                late = seen[0] > after
            if late:
                disk.wait()
        return real(target, *args)

    with mock.patch.object(calls, call, wait):
        try:
            yield disk
        finally:
            disk.answer()
