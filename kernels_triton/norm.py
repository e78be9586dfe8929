"""Gradient norm and overflow check in one pass, and pack: copy, scale and cast with the same sums.

    sum over elements of |g|^p (p = 1, 2, any), or max |g| (p = inf)

Bytes per element: the gradient's 2 or 4; pack adds what it writes. Deterministic: every tile sums
in a fixed order in fp32, and one program sums the tiles in a fixed order in fp64.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .rounding import load, pointer, store
from .tiles import C_BAD, C_BAD_RANK, C_SUM, T_COLUMNS, T_COUNTER, T_GRAD, T_NUMEL, T_PARAM

NORM_BLOCK = 4096  # elements read at once
NORM_ROUNDS = 8  # of them, one after the other, in a tile
NORM_WARPS = 8  # with 4, ptxas keeps two rounds in flight: 179 registers, 2 tiles a multiprocessor
FINISH_AT_ONCE = 1024


@triton.jit
def _power_of(x, p, NORM: tl.constexpr):
    """Term |x|^p of the running sum. NORM: 2, 1, 0 for the maximum, -1 for any p."""
    if NORM == 2:
        return x * x
    if NORM == -1:
        magnitude = tl.abs(x)
        power = tl.exp2(tl.log2(tl.where(magnitude > 0, magnitude, 1.0)) * p)
        return tl.where(magnitude > 0, power, magnitude)  # 0 and NaN stay what they are
    return tl.abs(x)


@triton.jit
def _round(
    source_address,
    out_address,
    start,
    remaining,
    total,
    scale,
    exponent,
    GRAD_DTYPE: tl.constexpr,
    OUT_DTYPE: tl.constexpr,
    NORM: tl.constexpr,
    WRITES: tl.constexpr,
    SUMS: tl.constexpr,
    BLOCK: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Add one BLOCK of a tile to the running sums, [BLOCK] fp32."""
    i = tl.arange(0, BLOCK)
    mask = i < remaining
    alignment: tl.constexpr = 0 if MASKED else 16
    x = load(pointer(source_address, start, GRAD_DTYPE, alignment), i, mask, GRAD_DTYPE, MASKED)
    if WRITES:
        x = x * scale
        out = pointer(out_address, start, OUT_DTYPE, alignment)
        store(out, i, x, mask, OUT_DTYPE, MASKED)
    if SUMS:
        term = _power_of(x, exponent, NORM)
        if NORM == 0:
            total = tl.where((term > total) | (term != term), term, total)
        else:
            total += term
    return total


@triton.jit
def norm_kernel(
    tiles,  # int32 [t, 2], of BLOCK * ROUNDS elements
    segments,  # int64 [n, 6]
    sums,  # fp32 [t]
    bad,  # int32 [t]: 1 where a tile has a NaN or an Inf, or its sum overflows
    p,  # fp64 [1]: the exponent where NORM is -1
    destination_scale,  # fp64 [1]: what pack multiplies with
    GRAD_DTYPE: tl.constexpr,
    OUT_DTYPE: tl.constexpr,
    NORM: tl.constexpr,
    WRITES: tl.constexpr,  # pack: store the scaled gradient at the segment's `param` address
    SUMS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROUNDS: tl.constexpr,
):
    """Sum one tile in one program, and pack it with WRITES."""
    program = tl.program_id(0).to(tl.int64)
    segment = tl.load(tiles + 2 * program).to(tl.int64)
    start = tl.load(tiles + 2 * program + 1).to(tl.int64) * (BLOCK * ROUNDS)
    row = segments + segment * T_COLUMNS
    source_address = tl.load(row + T_GRAD)
    out_address = tl.load(row + T_PARAM)
    remaining = tl.load(row + T_NUMEL) - start
    exponent = tl.load(p).to(tl.float32)
    scale = tl.load(destination_scale).to(tl.float32)
    aligned = ((source_address | out_address) & 15) == 0
    total = tl.zeros([BLOCK], tl.float32)
    if (remaining >= BLOCK * ROUNDS) & aligned:
        for k in range(ROUNDS):
            total = _round(
                source_address, out_address, start + k * BLOCK, remaining, total, scale, exponent,
                GRAD_DTYPE, OUT_DTYPE, NORM, WRITES, SUMS, BLOCK, False,
            )  # fmt: skip
    else:
        for k in range(ROUNDS):
            total = _round(
                source_address, out_address, start + k * BLOCK, remaining - k * BLOCK, total,
                scale, exponent, GRAD_DTYPE, OUT_DTYPE, NORM, WRITES, SUMS, BLOCK, True,
            )  # fmt: skip
    if SUMS:
        finite = (total < float("inf")).to(tl.int32)  # false for NaN too
        any_bad = tl.min(finite, axis=0) == 0
        if NORM == 0:
            value = tl.max(total, axis=0)
        else:
            value = tl.sum(total, axis=0)
        tl.store(sums + program, value)
        tl.store(bad + program, (any_bad | (value == float("inf"))).to(tl.int32))


@triton.jit
def finish_tiles(tiles, segments, sums, bad, num_tiles, NORM: tl.constexpr, AT_ONCE: tl.constexpr):
    """Total of tiles, and 1 + the counter of the first segment that is not finite (0: none), both
    fp64."""
    i = tl.arange(0, AT_ONCE)
    total = tl.zeros([AT_ONCE], tl.float64)
    first = tl.full([AT_ONCE], 0x7FFFFFFF, tl.int32)
    for start in range(0, num_tiles, AT_ONCE):
        mask = start + i < num_tiles
        value = tl.load(sums + start + i, mask=mask, other=0.0).to(tl.float64)
        if NORM == 0:
            total = tl.where(value > total, value, total)
        else:
            total += value
        segment = tl.load(tiles + 2 * (start + i), mask=mask, other=0)
        is_bad = tl.load(bad + start + i, mask=mask, other=0) != 0
        first = tl.where(is_bad & (segment < first), segment, first)
    if NORM == 0:
        result = tl.max(total, axis=0)
    else:
        result = tl.sum(total, axis=0)
    worst = tl.min(first, axis=0)
    is_any = worst != 0x7FFFFFFF
    counter = tl.load(segments + worst.to(tl.int64) * T_COLUMNS + T_COUNTER, mask=is_any, other=-1)
    return result, (counter + 1).to(tl.float64)


@triton.jit
def tally_votes(votes, num_ranks, NORM: tl.constexpr):
    """Total of all ranks' votes, summed in the order of ranks; 1 + the first parameter that is not
    finite on any (0: none); and the first rank that has it; all fp64."""
    total = tl.full([], 0.0, tl.float64)
    first = tl.full([], 0.0, tl.float64)
    where = tl.full([], 0.0, tl.float64)
    for rank in range(num_ranks):
        value = tl.load(votes + rank)
        if NORM == 0:
            total = tl.where(value > total, value, total)
        else:
            total += value
        found = tl.load(votes + num_ranks + rank)
        is_first = (found > 0) & ((first == 0) | (found < first))
        first = tl.where(is_first, found, first)
        where = tl.where(is_first, rank * 1.0, where)
    return total, first, where


@triton.jit
def finish_kernel(
    tiles,  # int32 [t, 2]
    segments,  # int64 [n, 6]
    sums,  # fp32 [t]
    bad,  # int32 [t]
    num_tiles,
    out_sum,  # fp64 [1]
    out_bad,  # fp64 [1]
    NORM: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """Store `finish_tiles` in the control vector, or in this rank's vote. One program."""
    total, first_bad = finish_tiles(tiles, segments, sums, bad, num_tiles, NORM, AT_ONCE)
    tl.store(out_sum, total)
    tl.store(out_bad, first_bad)


@triton.jit
def tally_kernel(
    votes,  # fp64 [2 * ranks]
    num_ranks,
    control,  # fp64: see `control_fields.py`
    NORM: tl.constexpr,
):
    """Store `tally_votes` in the control vector. One program."""
    total, first_bad, rank = tally_votes(votes, num_ranks, NORM)
    tl.store(control + C_SUM, total)
    tl.store(control + C_BAD, first_bad)
    tl.store(control + C_BAD_RANK, rank)
