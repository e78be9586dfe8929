"""Sums of squares in which no order shows: integers, of which cuts, ranks and tiers change no bit.

A shard is cut at multiples of 256 elements, and a parameter begins at a multiple of 64. So a row of
64 elements has the same elements of one parameter, and zeros behind them, in every layout. Its
squares are added in fp64 in one order; rows are added as integers.

    row     64 squares of fp32, each exact in fp64, added by halves: 32 + 32, 16 + 16, ...
    bins    int64 [NUM_BINS + 1]; bin i counts units of 2 ** (8 * i - 352), the last one rows that
            are not finite. A row has 53 bits: its low 27 go to one bin, the others to another
    limbs   the integer that all bins of a rank are together, in 32 bits each: what ranks add
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gemini.comm.communicator import Communicator
from gemini.optim.step.measuring import to_host

ROW_NUMEL = 64  # every parameter begins at a multiple of it
STRIP_NUMEL = 2**18  # of fp64 copies, which stay in a cache
LEAST_BIT = (
    -352
)  # of a row: its last bit is not below it, as a square of fp32 is 2 ** -298 at least
LOW_BITS, ALL_BITS = 27, 53  # of a row
BIN_BITS = 8
NUM_BINS = (262 - LEAST_BIT) // BIN_BITS + 1  # a row is below 2 ** 262
LIMB_BITS, NUM_LIMBS = 32, 24


def bins_of(values: Tensor) -> Tensor:
    """Bins of the squares of values [n], a multiple of 64, where they are. Waits for nothing."""
    bins = torch.zeros(NUM_BINS + 1, dtype=torch.int64, device=values.device)
    for strip in values.split(STRIP_NUMEL):
        rows = _rows(strip)
        finite = rows.isfinite()
        bins[NUM_BINS] += (~finite).sum()
        mantissa, exponent = torch.frexp(torch.where(finite, rows, 0.0))
        units = (mantissa * 2.0**ALL_BITS).to(torch.int64)
        # a row of zeros has the exponent 0, and nothing to add anywhere
        place = exponent.to(torch.int64) - (ALL_BITS + LEAST_BIT)
        low, high = units & ((1 << LOW_BITS) - 1), units >> LOW_BITS
        for part, at in ((low, place), (high, place + LOW_BITS)):
            bins.index_add_(0, at // BIN_BITS, part << (at % BIN_BITS))
    return bins


def _rows(strip: Tensor) -> Tensor:
    """Sums of squares, fp64, of every 64 elements."""
    wide = strip.to(torch.float64).view(-1, ROW_NUMEL)
    halves = wide * wide
    while halves.shape[1] > 1:
        middle = halves.shape[1] // 2
        halves = halves[:, :middle] + halves[:, middle:]
    return halves.view(-1)


def integer_of(bins: Sequence[Tensor]) -> int | None:
    """Integer that these bins are together, in units of 2 ** LEAST_BIT; None: not all rows are
    finite. Waits for the device."""
    total = 0
    for one in to_host(bins):
        *counts, not_finite = one.tolist()
        if not_finite:
            return None
        total += sum(count << (BIN_BITS * i) for i, count in enumerate(counts))
    return total


def over_ranks(comm: Communicator, integers: Sequence[int]) -> list[float]:
    """Sums over all ranks of each of these integers, rounded once to fp64. Collective."""
    mask = (1 << LIMB_BITS) - 1
    limbs = [integer >> (LIMB_BITS * i) & mask for integer in integers for i in range(NUM_LIMBS)]
    said = comm.numbers(limbs, torch.int64)
    comm.all_reduce(said).wait()
    added, found = said.tolist(), []
    for first in range(0, len(added), NUM_LIMBS):
        parts = added[first : first + NUM_LIMBS]
        whole = sum(part << (LIMB_BITS * i) for i, part in enumerate(parts))
        found.append(whole / (1 << -LEAST_BIT))  # of integers: correctly rounded
    return found
