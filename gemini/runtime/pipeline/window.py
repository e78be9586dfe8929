"""Window: one call of a schedule, as one stage sees it, from its first micro-batch to its last.

Where the plan has room, all of the stage is gathered when the window opens and released when it
closes. Where it has not, the calls of all micro-batches are one cycle: chunks are gathered and
released along it, and the next one is planned with what was found.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from gemini.runtime.autograd.calls import Calls
from gemini.runtime.gradients.waiting import Gradients
from gemini.runtime.meetings import Meetings
from gemini.runtime.parts import Parts
from gemini.runtime.step.promotion import Promotion


class Window:
    """The window of one engine: micro-batches from the first to the last."""

    def __init__(
        self,
        parts: Parts,
        calls: Calls,
        meetings: Meetings,
        gradients: Gradients,
        promotion: Promotion,
    ) -> None:
        self._parts = parts
        self._calls = calls
        self._meetings = meetings
        self._gradients = gradients
        self._promotion = promotion
        self._is_sampled = False

    def open(self) -> None:
        """Micro-batches follow, if they have not begun."""
        parts = self._parts
        if parts.in_schedule:
            return
        self._calls.begin_cycle()
        parts.in_schedule = True
        for chunk in parts.chunks:
            chunk.gradient.apart = True
        if not parts.all_gathered and not parts.manager.hold():
            parts.manager.fills_room = True

    def sample(self, inputs: Any, num_microbatches: int) -> None:
        """The first micro-batch that counts, with these inputs."""
        if not self._is_sampled:
            self._is_sampled = True
            told_apart = [inputs] * num_microbatches if self._calls.tells_inputs_apart else None
            self._parts.sampler.begin(told_apart, again=self._parts.manager.deviated)

    @property
    def splits_backward(self) -> bool:
        """Weights may be differentiated apart from inputs: what that reads stays gathered."""
        return self._parts.all_gathered or self._parts.manager.holds

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Around a micro-batch's backward, or a part of it."""
        self.open()
        with self._calls.microbatch():
            yield

    def reduce(self, divisor: int) -> None:
        """All micro-batches are done: reduce the mean of `divisor` of them. Collective."""
        parts = self._parts
        self._gradients.check_complete()
        self._meetings.come_together()
        self._close()
        collector = parts.sampler.collector
        collector.before_change()
        parts.reducer.reduce_deferred(1 / divisor)
        collector.after_change()
        self._gradients.exchange_presence()
        parts.ledger.note()
        self._promotion.graph_is_open = False

    def end(self) -> None:
        """Of a schedule without a backward, or of one that an error has cut short.

        Of the latter no gradient is whole: they are dropped, and `zero_grad` must follow.
        """
        parts = self._parts
        if not parts.in_schedule:
            return
        self._close()
        if parts.reducer.active or parts.reducer.leftover:
            self._gradients.drop_broken()

    def _close(self) -> None:
        parts = self._parts
        parts.in_schedule = self._is_sampled = False
        for chunk in parts.chunks:
            chunk.gradient.apart = False
        self._calls.unpin()
        parts.manager.let_go()
