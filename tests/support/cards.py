"""Speeds of cards on which recorded iterations are replayed, and prices of the same iterations.

A stack of small layers stands for `NUMEL` parameters: links and memory are slower by as much.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from gemini.chunk.layout import ChunkLayout, ParamSpec
from gemini.memtracer.trace import sequential_trace
from gemini.placement.planner import PlanInputs, make_plan
from gemini.placement.policy import StaticPlacement
from gemini.placement.result import PlanResult
from gemini.placement.sizes import Bandwidths
from tests.support.priced import ADAM, BLOCK

NUMEL = 8.03e9
PACKED = 4  # bytes an element: a gradient is read, and written to its buffer, in backward
WIDTH, DEPTH = 64, 12  # of the stack


@dataclass(frozen=True, slots=True)
class CardSpeeds:
    """Seconds of forward and backward on a card, and bytes a second: of a link each way, of its
    memory, and of a disk."""

    forward: float
    backward: float
    link: float = 55e9
    memory: float = 3.0e12
    disk_read: float = 7e9
    disk_write: float = 5e9

    def links(self, numel: int) -> Bandwidths:
        """Speeds for a stack of so many elements."""
        to = numel / NUMEL
        return Bandwidths(
            host_to_device=self.link * to, device_to_host=self.link * to,
            nvme_read=self.disk_read * to, nvme_write=self.disk_write * to,
            device_memory=self.memory * to,
        )  # fmt: skip


CARDS = {
    "8K tokens": CardSpeeds(0.35, 1.05),
    "16K tokens": CardSpeeds(0.8, 2.3),
    "a short pass": CardSpeeds(0.05, 0.1),
    "a slow link": CardSpeeds(1.3, 3.9, link=25e9, memory=0.8e12),
    "four disks": CardSpeeds(0.35, 1.05, disk_read=28e9, disk_write=20e9),
}
# fractions of state and of parameters on the host, and of state on NVMe
HOMES = {
    "resident": (0.0, 0.0, 0.0),
    "state on the host": (1.0, 0.0, 0.0),
    "parameters on the host": (0.0, 1.0, 0.0),
    "all on the host": (1.0, 1.0, 0.0),
    "state on NVMe": (0.0, 0.0, 1.0),
}


def numel_of(result: PlanResult) -> int:
    return sum(block.numel for chunk in result.plan.chunks for block in chunk.blocks)


def planned(home: str) -> PlanResult:
    """Plan of the stack in these homes, beside a device."""
    state, params, on_nvme = HOMES[home]
    specs = [
        ParamSpec(f"layers.{i}.{name}", shape, "bfloat16")
        for i in range(DEPTH)
        for name, shape in (("weight", (WIDTH, WIDTH)), ("bias", (WIDTH,)))
    ]
    inputs = PlanInputs(
        layout=ChunkLayout.build(specs, WIDTH * (WIDTH + 1), 1), trace=sequential_trace(specs),
        state=ADAM, has_host_tier=True, nvme_state_frac=on_nvme, block_numel=BLOCK, max_prefetch=1,
    )  # fmt: skip
    return make_plan(inputs, StaticPlacement(1.0, state, params))


def prices(result: PlanResult, card: CardSpeeds) -> dict[str, float]:
    """Seconds by `update`, of this plan with the pass and the speeds of a card."""
    trace, numel = result.inputs.trace, numel_of(result)
    seconds = [0.0] * len(trace.moments)
    whole: dict[Any, float] = {"forward": card.forward}
    whole["backward"] = card.backward + PACKED * NUMEL / card.memory
    for phase in whole:
        calls = [
            i
            for i, m in enumerate(trace.moments)
            if (m.phase, m.edge) == (phase, "enter") and m.params
        ]
        products = [2.0] * len(calls)
        products[-1] -= phase == "backward"  # the input has no gradient
        for i, product in zip(calls, products, strict=True):
            seconds[i] = whole[phase] * product / sum(products)
    timed = tuple(replace(m, seconds=s) for m, s in zip(trace.moments, seconds, strict=True))
    inputs = replace(
        result.inputs, trace=replace(trace, moments=timed), bandwidths=card.links(numel)
    )
    return replace(result, inputs=inputs).seconds_by_update
