"""What a step updates in memory, given to the device beside what it computes next (ADR 0002).

Nothing of it can fail on a disk, so nobody votes, and no thread is needed: the host gives all of it
to the device before `step()` returns. What computes comes behind the updates of a shard when it is
about to use that shard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Protocol

import torch

from gemini.optim.rules.report import TailResult, Traffic
from gemini.optim.state.memory import Memory
from gemini.optim.state.space import Block
from gemini.tickets import SideStreamTicket


class Holding(Protocol):
    """Who keeps what the updates of a shard need."""

    def end(self) -> None:
        """What was borrowed so far is on its way back: what comes next is behind that."""
        ...

    def let_go(self, shard: int) -> None:
        """Nothing of it is updated any more."""
        ...


class ShardUpdate:
    """A ticket for one shard. `wait()`: what the device does next comes behind its updates."""

    def __init__(self, work: SideStreamTicket, let_go: Callable[[], None]) -> None:
        self._work = work
        self._let_go = let_go
        self._has_waited = False

    def ready(self) -> bool:
        return self._has_waited

    def wait(self) -> None:
        if not self._has_waited:
            self._work.order()
            self._has_waited = True
            self._let_go()  # only now: what takes this memory next is behind the updates, too


class SideStreamWork:
    """A ticket for what a step gave to a device beside what it computes. It keeps nothing of it.

    traffic: of what the host has given so far.
    """

    def __init__(self) -> None:
        self.traffic = Traffic()
        self.works: Sequence[SideStreamTicket] = ()

    def ready(self) -> bool:
        return self.works[-1].ready()

    def wait(self) -> TailResult:
        """The host waits."""
        self.works[-1].settle()
        seconds, _ = self.works[-1].times()
        return TailResult(
            True, self.traffic, 0.0, seconds, sum(work.times()[1] for work in self.works)
        )


class SideStreamUpdates:
    """Updates of the blocks that one step has in memory.

    of_shard: a ticket for each shard with such blocks. behind: for all of them.
    """

    def __init__(
        self,
        memory: Memory,
        blocks: Sequence[Block],
        updates: Iterator[Block],
        views: Holding,
        moved: Callable[[], Traffic],
    ) -> None:
        """updates: gives `blocks`, each when it is updated."""
        self.behind = SideStreamWork()
        self._updates = updates
        self._views = views
        self._moved = moved
        ends = {block.shard: place + 1 for place, block in enumerate(blocks)}
        cuts = sorted(set(ends.values()))
        works = [self._work(end - begin) for begin, end in zip((0, *cuts[:-1]), cuts, strict=True)]
        # behind the last: the way back
        given = self.behind.works = memory.run_on_side_stream([*works, self._work(1)])
        self.of_shard = {
            shard: ShardUpdate(given[cuts.index(end)], partial(views.let_go, shard))
            for shard, end in ends.items()
        }

    def _work(self, count: int) -> Callable[[], None]:
        """Updates so many blocks more."""

        def update() -> None:
            before = self._moved()
            with torch.no_grad():
                for _ in range(count):
                    next(self._updates, None)
                self._views.end()
            self.behind.traffic += self._moved() - before

        return update

    def order(self) -> None:
        """What the device does next comes behind all of them."""
        for ticket in self.of_shard.values():
            ticket.wait()
        self.behind.works[-1].order()
