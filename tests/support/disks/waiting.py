"""A disk that answers when a test says so, or in a drawn order, and who waits meanwhile."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from nvme import BlockStore
from nvme.files import calls
from optim.step.tail import Gate
from tests.support.disks.faults import path_of


class Waiting:
    """`answer`: calls that have come are answered, and all others."""

    def __init__(self) -> None:
        self._answers = threading.Event()
        self._came = threading.Semaphore(0)

    def answer(self) -> None:
        self._answers.set()

    def until_asked(self) -> None:
        """Wait until a call does."""
        self._came.acquire()

    def wait(self) -> None:
        self._came.release()
        self._answers.wait()


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


class Drawn:
    """Ticket of a transfer that has ended when it is waited for, or if that is drawn."""

    def __init__(self, ticket: Any, ends: Callable[[], bool]) -> None:
        self._ticket, self._ends = ticket, ends

    def ready(self) -> bool:
        if self._ends():
            self.wait()
            self._ends = lambda: True
            return True
        return False

    def wait(self) -> Any:
        return self._ticket.wait()


@contextmanager
def ending(likely: float, seed: int = 0) -> Iterator[None]:
    """Reads and writes of blocks that have ended, when they are asked, as likely as that: 1 is a
    disk that nobody waits for, and with 0 each ends when it is waited for. They do not fail."""
    read, write, chance = BlockStore.read, BlockStore.write, random.Random(seed)

    def drawn(transfer: Callable[..., Any]) -> Callable[..., Drawn]:
        return lambda *args: Drawn(transfer(*args), lambda: chance.random() < likely)

    with (
        mock.patch.object(BlockStore, "read", drawn(read)),
        mock.patch.object(BlockStore, "write", drawn(write)),
    ):
        yield


@contextmanager
def when_waited(then: Callable[[], object]) -> Iterator[list[Gate]]:
    """`then` is called where this thread begins to wait for what is updated beside it; for what."""
    waited: list[Gate] = []
    wait, thread = Gate.wait, threading.get_ident()

    def watched(gate: Gate) -> None:
        if threading.get_ident() == thread and not gate.ready():
            waited.append(gate)
            then()
        wait(gate)

    with mock.patch.object(Gate, "wait", watched):
        yield waited
