"""Squares of weights and of directions, which a rule with norms asks for before an update.

    squares[tile] = (sum of p^2, sum of u^2), in fp64
    u = direction(p, g, s0, s1, s2, coefficients), in fp32

Bytes per element: those that an update reads, so 14 of Lamb with a bf16 gradient and an fp32
master. Deterministic: a tile sums in a fixed order, and so does the program that sums the tiles of
a segment.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gemini.kernels_triton.rounding import join_master, load, load_bits, pointer
from gemini.kernels_triton.tiles import (
    T_COLUMNS,
    T_COUNTER,
    T_GRAD,
    T_NUMEL,
    T_PARAM,
    T_STATE,
)
from gemini.kernels_triton.update.frame import NUM_COEFFICIENTS

SUM_AT_ONCE = 1024  # tiles of a segment
_COEFFICIENTS = tl.constexpr(NUM_COEFFICIENTS)


@triton.jit
def _plane(plane, i, mask, MASKED: tl.constexpr):
    if MASKED:
        return tl.load(plane + i, mask=mask, other=0.0)
    return tl.load(plane + i)


@triton.jit
def _tile_squares(
    param_address,
    grad_address,
    start,
    remaining,
    master,
    planes,  # three, of fp32
    row,
    factor,
    limit,
    DIRECTION: tl.constexpr,
    NUM_PLANES: tl.constexpr,
    PARAM_DTYPE: tl.constexpr,
    GRAD_DTYPE: tl.constexpr,
    HAS_MASTER: tl.constexpr,
    SPLIT: tl.constexpr,
    KEEPER: tl.constexpr,
    BLOCK: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Squares of one tile, two fp64 scalars; elements are read as `frame._update_tile` does."""
    i = tl.arange(0, BLOCK)
    mask = i < remaining
    param_alignment: tl.constexpr = 0 if MASKED else (16 if PARAM_DTYPE == tl.float32 else 8)
    grad_alignment: tl.constexpr = 0 if MASKED else (16 if GRAD_DTYPE == tl.float32 else 8)
    grad = pointer(grad_address, start, GRAD_DTYPE, grad_alignment)
    g = load(grad, i, mask, GRAD_DTYPE, MASKED) * factor
    g = tl.maximum(g, -limit, propagate_nan=tl.PropagateNan.ALL)
    g = tl.minimum(g, limit, propagate_nan=tl.PropagateNan.ALL)
    s0 = _plane(planes[0], i, mask, MASKED)
    s1, s2 = s0, s0
    if NUM_PLANES >= 2:
        s1 = _plane(planes[1], i, mask, MASKED)
    if NUM_PLANES == 3:
        s2 = _plane(planes[2], i, mask, MASKED)
    if SPLIT:
        low = load_bits(master, i, mask, MASKED)
        param = pointer(param_address, start, PARAM_DTYPE, param_alignment)
        high = load_bits(param, i, mask, MASKED)
        if KEEPER == 0:
            p = join_master(high, low, s0)
            s0 = tl.abs(s0)
        elif KEEPER == 1:
            p = join_master(high, low, s1)
            s1 = tl.abs(s1)
        else:
            p = join_master(high, low, s2)
            s2 = tl.abs(s2)
    elif HAS_MASTER:
        p = load(master, i, mask, tl.float32, MASKED)
    else:
        param = pointer(param_address, start, PARAM_DTYPE, param_alignment)
        p = load(param, i, mask, PARAM_DTYPE, MASKED)
    u, s0, s1, s2 = DIRECTION(p, g, s0, s1, s2, row)
    if MASKED:
        u = tl.where(mask, u, 0.0)
    weight, direction = p.to(tl.float64), u.to(tl.float64)
    return tl.sum(weight * weight, axis=0), tl.sum(direction * direction, axis=0)


@triton.jit
def direction_kernel(
    tiles,  # int32 [t, 2]
    segments,  # int64 [n, 6]
    coefficients,  # fp32 [counters, 12]
    squares,  # fp64 [t, 2]
    master,  # fp32 or int16 slab, or anything where there is none
    state0,  # fp32 slab
    state1,  # slab, or anything where NUM_PLANES is 1
    state2,  # slab, or anything where NUM_PLANES is less than 3
    factor,
    limit,
    DIRECTION: tl.constexpr,
    NUM_PLANES: tl.constexpr,
    PARAM_DTYPE: tl.constexpr,
    GRAD_DTYPE: tl.constexpr,
    HAS_MASTER: tl.constexpr,
    SPLIT: tl.constexpr,  # `master` is int16: what bf16 parameters lack of theirs
    KEEPER: tl.constexpr,  # the plane that keeps ties; or -1
    BLOCK: tl.constexpr,
):
    """Sum the squares of one tile in one program; see `frame.update_kernel`."""
    program = tl.program_id(0).to(tl.int64)
    row = segments + tl.load(tiles + 2 * program).to(tl.int64) * T_COLUMNS
    start = tl.load(tiles + 2 * program + 1).to(tl.int64) * BLOCK
    coefficient_row = coefficients + tl.load(row + T_COUNTER) * _COEFFICIENTS
    param_address = tl.load(row + T_PARAM)
    grad_address = tl.load(row + T_GRAD)
    offset = tl.multiple_of(tl.load(row + T_STATE), 64) + start
    remaining = tl.load(row + T_NUMEL) - start
    planes = (state0 + offset, state1 + offset, state2 + offset)
    of_master = master + offset
    if SPLIT:
        of_master = tl.multiple_of(of_master, 8)
    if (remaining >= BLOCK) & (((param_address | grad_address) & 15) == 0):
        weight, direction = _tile_squares(
            param_address, grad_address, start, remaining, of_master, planes, coefficient_row,
            factor, limit, DIRECTION, NUM_PLANES, PARAM_DTYPE, GRAD_DTYPE, HAS_MASTER, SPLIT,
            KEEPER, BLOCK, False,
        )  # fmt: skip
    else:
        weight, direction = _tile_squares(
            param_address, grad_address, start, remaining, of_master, planes, coefficient_row,
            factor, limit, DIRECTION, NUM_PLANES, PARAM_DTYPE, GRAD_DTYPE, HAS_MASTER, SPLIT,
            KEEPER, BLOCK, True,
        )  # fmt: skip
    tl.store(squares + 2 * program, weight)
    tl.store(squares + 2 * program + 1, direction)


@triton.jit
def segment_kernel(
    squares,  # fp64 [t, 2]
    ends,  # int64 [n]: 1 + the last tile of each segment
    out,  # fp64 [n, 2]
    AT_ONCE: tl.constexpr,
):
    """Sum the tiles of one segment in one program."""
    segment = tl.program_id(0).to(tl.int64)
    first = tl.load(ends + segment - 1, mask=segment > 0, other=0)
    last = tl.load(ends + segment)
    i = tl.arange(0, AT_ONCE)
    weight = tl.zeros([AT_ONCE], tl.float64)
    direction = tl.zeros([AT_ONCE], tl.float64)
    for start in range(first, last, AT_ONCE):
        mask = start + i < last
        weight += tl.load(squares + 2 * (start + i), mask=mask, other=0.0)
        direction += tl.load(squares + 2 * (start + i) + 1, mask=mask, other=0.0)
    tl.store(out + 2 * segment, tl.sum(weight, axis=0))
    tl.store(out + 2 * segment + 1, tl.sum(direction, axis=0))
