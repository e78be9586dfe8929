"""Updates of a step in memory, on a side stream of the device (ADR 0002).

No update of them can fail on a disk, so no rank votes, and no thread is needed: the host queues all
of them before `step()` returns. The stream that computes waits for the updates of a shard when it
is about to use that shard.
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
    """Keeper of the gradients that updates of a shard read."""

    def end(self) -> None:
        """Begin to copy back all borrowed memory; later work of the stream follows the copies."""
        ...

    def let_go(self, shard: int) -> None:
        """Drop the gradient of a shard: all of it is updated."""
        ...


class ShardUpdate:
    """Ticket of one shard. `wait()`: the stream that computes waits for its updates."""

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
            self._let_go()  # only now: whoever takes this memory next waits for the updates, too


class SideStreamWork:
    """Ticket of all that a step queued on the side stream. It keeps no tensor alive.

    traffic: bytes of what the host has queued so far.
    """

    def __init__(self) -> None:
        self.traffic = Traffic()
        self.works: Sequence[SideStreamTicket] = ()

    def ready(self) -> bool:
        return self.works[-1].ready()

    def wait(self) -> TailResult:
        """Wait on the host for all updates; returns their times and bytes."""
        self.works[-1].settle()
        seconds, _ = self.works[-1].times()
        return TailResult(
            True, self.traffic, 0.0, seconds, sum(work.times()[1] for work in self.works)
        )


class SideStreamUpdates:
    """Updates of the blocks that one step has in memory.

    of_shard: a ticket for each shard with such blocks. work: the ticket of all of them.
    """

    def __init__(
        self,
        memory: Memory,
        blocks: Sequence[Block],
        updates: Iterator[Block],
        views: Holding,
        moved: Callable[[], Traffic],
    ) -> None:
        """updates: yields `blocks`, each when it is updated."""
        self.work = SideStreamWork()
        self._updates = updates
        self._views = views
        self._moved = moved
        ends = {block.shard: place + 1 for place, block in enumerate(blocks)}
        cuts = sorted(set(ends.values()))
        works = [self._work(end - begin) for begin, end in zip((0, *cuts[:-1]), cuts, strict=True)]
        # one more work after the last block: copies back that have not begun
        queued = self.work.works = memory.run_on_side_stream([*works, self._work(1)])
        self.of_shard = {
            shard: ShardUpdate(queued[cuts.index(end)], partial(views.let_go, shard))
            for shard, end in ends.items()
        }

    def _work(self, count: int) -> Callable[[], None]:
        """Function that updates the next `count` blocks."""

        def update() -> None:
            before = self._moved()
            with torch.no_grad():
                for _ in range(count):
                    next(self._updates, None)
                self._views.end()
            self.work.traffic += self._moved() - before

        return update

    def order(self) -> None:
        """Order all updates before what the computing stream does next."""
        for ticket in self.of_shard.values():
            ticket.wait()
        self.work.works[-1].order()
