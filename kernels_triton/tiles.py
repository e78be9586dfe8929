"""Segment and tile tables, which kernels read by index, as the vector of `control_fields.py`.

Tables let one launch update every segment of every shard. A segment is a run of elements of one
parameter: the address of its parameter and of its gradient, its offset into the slab of every state
plane, its length, its counter, which is the index of its parameter's step count and coefficients,
and where in its parameter it starts. A tile is BLOCK elements of one segment, the work of one
program. Both tables are device tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor

from . import control_fields as fields

# columns of the segment table, int64
PARAM, GRAD, STATE, NUMEL, COUNTER, FIRST = range(6)
NUM_COLUMNS = 6
T_PARAM, T_GRAD, T_STATE = tl.constexpr(PARAM), tl.constexpr(GRAD), tl.constexpr(STATE)
T_NUMEL, T_COUNTER = tl.constexpr(NUMEL), tl.constexpr(COUNTER)
T_FIRST, T_COLUMNS = tl.constexpr(FIRST), tl.constexpr(NUM_COLUMNS)

C_SUM, C_BAD, C_NORM = (tl.constexpr(c) for c in (fields.SUM, fields.BAD, fields.NORM))
C_FACTOR, C_SKIP = tl.constexpr(fields.FACTOR), tl.constexpr(fields.SKIP)
C_MAX_NORM, C_MAX_VALUE = tl.constexpr(fields.MAX_NORM), tl.constexpr(fields.MAX_VALUE)
C_LOSS_SCALE, C_USED_SCALE = tl.constexpr(fields.LOSS_SCALE), tl.constexpr(fields.USED_SCALE)
C_GOOD_STEPS = tl.constexpr(fields.GOOD_STEPS)
C_HYSTERESIS_LEFT = tl.constexpr(fields.HYSTERESIS_LEFT)
C_SKIPPED_STEPS = tl.constexpr(fields.SKIPPED_STEPS)
C_GROWTH_FACTOR = tl.constexpr(fields.GROWTH_FACTOR)
C_BACKOFF_FACTOR = tl.constexpr(fields.BACKOFF_FACTOR)
C_GROWTH_INTERVAL = tl.constexpr(fields.GROWTH_INTERVAL)
C_HYSTERESIS = tl.constexpr(fields.HYSTERESIS)
C_MIN_SCALE, C_MAX_SCALE = tl.constexpr(fields.MIN_SCALE), tl.constexpr(fields.MAX_SCALE)
C_BAD_RANK = tl.constexpr(fields.BAD_RANK)
C_SEED = tl.constexpr(fields.SEED)

TRITON_DTYPES = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
}


@dataclass(frozen=True, slots=True)
class SegmentRow:
    """One row of the segment table. Addresses in bytes, offsets and lengths in elements."""

    param: int  # address of the visible parameter, 0 where only the gradient is read
    grad: int  # address
    state: int  # offset into every plane's slab, a multiple of 64
    numel: int
    counter: int  # index of its parameter's step count and coefficients
    first: int = 0  # its first element, in its parameter
    marks: int = 0  # address of the bits of what changes, 0 where none are kept; in a table apart


def segment_table(
    segments: Sequence[SegmentRow], device: torch.device, memory: Tensor | None = None
) -> Tensor:
    """Table of segments, int64 [n, 6], in `memory` if it is given."""
    rows = [[s.param, s.grad, s.state, s.numel, s.counter, s.first] for s in segments]
    table = torch.tensor(rows, dtype=torch.int64).reshape(-1, NUM_COLUMNS)
    if device.type == "cuda":
        table = table.pin_memory()
    if memory is not None:
        return memory.copy_(table, non_blocking=True)
    return table.to(device, non_blocking=True)


def marks_table(segments: Sequence[SegmentRow], device: torch.device) -> Tensor:
    """Addresses of the bits of segments, int64 [n]."""
    assert all(s.marks for s in segments), "a launch has bits of all segments, or of none"
    table = torch.tensor([s.marks for s in segments], dtype=torch.int64)
    if device.type == "cuda":
        table = table.pin_memory()
    return table.to(device, non_blocking=True)


def tile_table(numels: Sequence[int], block: int, device: torch.device) -> Tensor:
    """Table of tiles, int32 [t, 2]: (segment, tile within it), in segment order. Empty segments
    have no tile."""
    counts = torch.tensor([-(-numel // block) for numel in numels], dtype=torch.int64)
    segment = torch.repeat_interleave(torch.arange(len(numels)), counts)
    first = torch.cumsum(counts, 0) - counts
    tile = torch.arange(int(counts.sum())) - torch.repeat_interleave(first, counts)
    return torch.stack([segment, tile], dim=1).to(torch.int32).to(device)
