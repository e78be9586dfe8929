"""Modules whose iteration is planned and priced by hand: round seconds of a disk, and of calls."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from gemini.chunk.layout import ChunkLayout, ParamSpec
from gemini.memtracer.trace import sequential_trace
from gemini.placement.planner import PlanInputs
from gemini.placement.sizes import Bandwidths, StateBytes

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
