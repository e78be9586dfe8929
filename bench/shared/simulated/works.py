"""Work beside what the simulated device computes: it runs as late as it may, or by chance before.

The host's part of it runs late too, so what it asks anybody then must be what it was when the work
was given to the device.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

import torch

Work = Callable[[], None]


class SimWorks:
    """Works of one device, in order; at most one runs."""

    def __init__(self) -> None:
        self._coming: deque[SimWork] = deque()
        self._is_running = False

    def add(self, works: Sequence[Work]) -> list[SimWork]:
        """Nobody has come behind them yet."""
        found = [SimWork(self, work) for work in works]
        for work in found:
            work.first = found[0]
        self._coming += found
        return found

    @property
    def may_run(self) -> bool:
        """Whether one waits, and none runs."""
        return bool(self._coming) and not self._is_running

    def run_next(self) -> None:
        work = self._coming.popleft()
        self._is_running = True
        try:
            with torch.no_grad():
                work.run()
        finally:
            self._is_running = False

    def run_until(self, last: SimWork) -> None:
        """All up to this one."""
        if self._is_running:
            raise AssertionError("work beside the device waits for work that comes behind it")
        while not last.is_done:
            self.run_next()


class SimWork:
    """One of several that were given together."""

    def __init__(self, works: SimWorks, work: Work) -> None:
        self._works = works
        self._work: Work | None = work
        self.first = self
        self.seconds = 0.0  # of the first: that all of them took so far
        self._waited: float | None = None  # by who came behind it first
        self.is_done = False

    def run(self) -> None:
        assert self._work is not None
        started = time.perf_counter()
        work, self._work = self._work, None
        try:
            work()
        finally:
            self.is_done = True
        self.first.seconds += time.perf_counter() - started

    def ready(self) -> bool:
        return self.is_done

    def order(self) -> None:
        """What the device does next comes behind it."""
        before = self.first.seconds
        self._works.run_until(self)
        if self._waited is None:
            self._waited = self.first.seconds - before

    def wait(self) -> None:
        self.order()

    def settle(self) -> None:
        self.order()

    def times(self) -> tuple[float, float]:
        """See `gemini.tickets.SideStreamTicket`."""
        return self.first.seconds, self._waited or 0.0
