"""Window: one call of a schedule, as one stage sees it, from its first micro-batch to its last.

If the plan has room, the whole stage is gathered when the window opens and released when it closes.
If not, the calls of all micro-batches are one cycle: chunks are gathered and released along it, and
the next window is planned with its trace.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from gemini.runtime.autograd.calls import Calls
from gemini.runtime.gradients.waiting import Gradients
from gemini.runtime.meetings import Meetings
from gemini.runtime.passes import Passes
from gemini.runtime.schedule.planning import PlanInUse


class Window:
    """Window of one engine: its micro-batches in one call of a schedule."""

    def __init__(
        self,
        in_use: PlanInUse,
        passes: Passes,
        calls: Calls,
        meetings: Meetings,
        gradients: Gradients,
    ) -> None:
        self._manager, self._sampler, self._ledger = in_use.manager, in_use.sampler, in_use.ledger
        self._sharding, self._reducer = gradients.sharding, gradients.cycle.reducer
        self._passes, self._calls = passes, calls
        self._meetings, self._gradients = meetings, gradients
        self._is_sampled = False

    def open(self) -> None:
        """Open the window before the first micro-batch; do nothing if it is open."""
        if self._passes.in_schedule:
            return
        self._calls.begin_cycle()
        self._passes.begin_schedule()
        for chunk in self._sharding.chunks:
            chunk.gradient.apart = True
        if not self._sharding.all_gathered:
            self._manager.hold()

    def sample(self, inputs: Any, num_microbatches: int) -> None:
        """Begin to sample at the first micro-batch of the schedule, which has these inputs.

        torch may run one before it to find shapes, which is not sampled.
        """
        if not self._is_sampled:
            self._is_sampled = True
            told_apart = [inputs] * num_microbatches if self._calls.tells_inputs_apart else None
            self._sampler.begin(told_apart, again=self._manager.deviated)

    @property
    def splits_backward(self) -> bool:
        """Whether a backward may have two halves: the second reads weights, so all must stay
        gathered."""
        return self._sharding.all_gathered or self._manager.holds

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Context of a micro-batch's backward, or of one half of it."""
        self.open()
        with self._calls.microbatch():
            yield

    def reduce(self, divisor: int) -> None:
        """Close the window and reduce the sum of all micro-batches, divided by `divisor`.

        Collective.
        """
        self._gradients.check_complete()
        self._meetings.barrier()
        self._close()
        collector = self._sampler.collector
        collector.before_change()
        self._reducer.reduce_deferred(1 / divisor)
        collector.after_change()
        self._gradients.end_backward()
        self._ledger.note()
        self._passes.end_graph()

    def end(self) -> None:
        """Close the window of a schedule without a backward, or of one that an error has cut short.

        After an error no gradient is complete: they are dropped, and `zero_grad` must follow.
        """
        if not self._passes.in_schedule:
            return
        self._close()
        if self._reducer.active or self._reducer.leftover:
            self._gradients.drop_broken()

    def _close(self) -> None:
        self._passes.end_schedule()
        self._is_sampled = False
        for chunk in self._sharding.chunks:
            chunk.gradient.apart = False
        self._calls.unpin()
        self._manager.let_go()
