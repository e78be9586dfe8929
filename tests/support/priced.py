"""Seconds by hand: of a disk and of calls, for which modules are planned; of a clock."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

from gemini.chunk.layout import ChunkLayout, ParamSpec
from gemini.memtracer.trace import sequential_trace
from gemini.placement.planner import PlanInputs
from gemini.placement.sizes import Bandwidths, StateBytes
from optim.step import tail
from tests.support.disks.waiting import when_waited
from tests.support.loops.tails import HeldUpdates

ADAM = StateBytes(12, True)
BLOCK = 1 << 10
READ, WRITE = 2.0, 3.0  # seconds of a block's state
TEN = [BLOCK] * 10
DISK = Bandwidths(nvme_read=12 * BLOCK / READ, nvme_write=12 * BLOCK / WRITE)


def asked(
    numels: Any, forward: Any, *, backward: float = 100.0, world_size: int = 1, trace: Any = None,
    **changes: Any,
) -> PlanInputs:  # fmt: skip
    """A module of each size, on a CPU, with its state on NVMe. Seconds are of each module's call:
    `forward` of each, or one for all; backward of all together."""
    specs = [ParamSpec(f"m{i}.p", (n,), "bfloat16") for i, n in enumerate(numels)]
    forward = forward if isinstance(forward, list) else [forward] * len(numels)
    trace = trace or sequential_trace(specs)
    moments = [
        replace(m, seconds=0.0 if m.edge == "leave" else forward[m.params[0]])
        if m.phase == "forward"
        else replace(m, seconds=backward / len(numels) if m.edge == "enter" else 0.0)
        for m in trace.moments
    ]
    return PlanInputs(
        **{
            "layout": ChunkLayout.build(specs, min(numels), world_size),  # a chunk each
            "trace": replace(trace, moments=tuple(moments)), "state": ADAM, "bandwidths": DISK,
            "has_host_tier": False, "nvme_state_frac": 1.0, "block_numel": BLOCK, **changes,
        }
    )  # fmt: skip


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._then: Callable[[], object] | None = None

    def behind_next(self, then: Callable[[], object]) -> None:
        """This, once it was read again."""
        self._then = then

    def __call__(self) -> float:
        now, then, self._then = self.seconds, self._then, None
        if then is not None:
            then()
        return now


@contextmanager
def given_clock() -> Iterator[Clock]:
    """What steps with a tail, and who waits for them, take for the time."""
    clock = Clock()
    with mock.patch.object(tail, "clock", clock):
        yield clock


@contextmanager
def late_for(clock: Clock, held: HeldUpdates, seconds: float) -> Iterator[None]:
    """Updates go on when this thread has waited for them for so long."""
    left = [seconds]

    def go_on() -> None:
        clock.seconds += left.pop() if left else 0.0
        held.go_on()

    with when_waited(lambda: clock.behind_next(go_on)):
        yield
