"""Costs of chunks of many capacities, for all capacities at once. Pure.

P parameters of one key · K capacities · all sizes in elements, in int64

`pack` puts parameters into chunks as `ChunkLayout.build` does, a chunk of every capacity per round,
so the search over hundreds of capacities takes as many array operations as there are chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gemini.chunk.layout import ITEMSIZE, ParamSpec
from gemini.units import MIB, PARAM_ALIGN_NUMEL

COLLECTIVE_BYTES = MIB  # what starting a collective costs, in bytes that the link moves meanwhile
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Sizes:
    """Parameters of one key in layout order, as arrays."""

    starts: Ints  # [P] where each parameter would start if one chunk held all
    ends: Ints  # [P] and where it would end
    first: Ints  # [M] moments: runs of parameters that one module owns
    last: Ints  # [M]
    reused: Ints  # parameters that have other names: used again when the pass ends
    used_numel: int
    itemsize: int
    trainable: bool

    @classmethod
    def of(cls, specs: Sequence[ParamSpec]) -> Sizes:
        """Sizes of specs of one key, in layout order."""
        numels = np.array([spec.numel for spec in specs], dtype=np.int64)
        aligned = -(-numels // PARAM_ALIGN_NUMEL) * PARAM_ALIGN_NUMEL
        starts = np.cumsum(aligned) - aligned
        owners = [spec.name.rpartition(".")[0] for spec in specs]
        first = [i for i in range(len(specs)) if i == 0 or owners[i] != owners[i - 1]]
        last = [i - 1 for i in first[1:]] + [len(specs) - 1]
        reused = [i for i, spec in enumerate(specs) if spec.aliases]
        return cls(
            starts, starts + numels, _ints(first), _ints(last), _ints(reused), int(numels.sum()),
            ITEMSIZE[specs[0].dtype], specs[0].trainable,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Packing:
    """Chunks of one capacity. The capacity is tight: some chunk is as long as it is."""

    capacity: int
    num_chunks: int
    gathered_waste_numel: int  # capacity left over in gathered chunks
    peak_gathered_bytes: int  # of one moment and what is prefetched in it
    traffic_bytes: int  # gathered and reduced a step, with COLLECTIVE_BYTES a collective

    @property
    def cost_bytes(self) -> int:
        """Objective of the search."""
        return self.peak_gathered_bytes + self.traffic_bytes


def pack(sizes: Sizes, capacities: Ints, least: int, max_prefetch: int) -> list[Packing]:
    """Packings of distinct tight capacities, ascending.

    A capacity is lowered to the longest chunk that it makes, which changes no chunk and leaves
    less over; but not below `least`, nor where every chunk is one larger parameter.
    """
    num_params = len(sizes.ends)
    begin = np.zeros(len(capacities), dtype=np.int64)
    bounds = [begin]  # each [K]: index of the first parameter of the next chunk
    longest = np.zeros(len(capacities), dtype=np.int64)
    while (begin < num_params).any():
        base = sizes.starts[np.minimum(begin, num_params - 1)]
        fit = np.searchsorted(sizes.ends, base + capacities, "right")
        end = np.minimum(np.maximum(fit, begin + 1), num_params)
        used = sizes.ends[end - 1] - base
        longest = np.maximum(longest, np.where(used <= capacities, used, 0))
        bounds.append(end)
        begin = end
    table = np.stack(bounds)  # [chunks + 1, K], each column padded with P
    tight = np.maximum(np.where(longest > 0, longest, capacities), least)
    _, columns = np.unique(tight, return_index=True)
    return [_cost(sizes, np.unique(table[:, k]), int(tight[k]), max_prefetch) for k in columns]


def _cost(sizes: Sizes, bounds: Ints, capacity: int, max_prefetch: int) -> Packing:
    """Packing with its cost. bounds: [chunks + 1], index of each chunk's first parameter, and P."""
    num_chunks = len(bounds) - 1
    used = sizes.ends[bounds[1:] - 1] - sizes.starts[bounds[:-1]]
    payload = used * sizes.itemsize
    before = np.concatenate([[0], np.cumsum(payload)])  # bytes of the chunks before each

    def chunk_of(params: Ints) -> Ints:
        return np.searchsorted(bounds, params, "right") - 1

    low, high = chunk_of(sizes.first), chunk_of(sizes.last)
    prefetched = np.minimum(high + 1 + max_prefetch, num_chunks)
    peak = int((before[prefetched] - before[low]).max())
    again = np.unique(chunk_of(sizes.reused))
    again = again[again < num_chunks - 1]  # the last chunk is still gathered
    if len(again):
        peak = max(peak, int(payload[again].max() + payload[-1]))
    gathers, reduces = 2, int(sizes.trainable)
    turning = again[-1] if len(again) else num_chunks - 1  # stays gathered for backward
    moved = (gathers + reduces) * int(payload.sum())
    moved += gathers * int(payload[again].sum()) - int(payload[turning])
    collectives = (gathers + reduces) * num_chunks + gathers * len(again) - 1
    return Packing(
        capacity=capacity,
        num_chunks=num_chunks,
        gathered_waste_numel=int(np.maximum(capacity - used, 0).sum()),
        peak_gathered_bytes=peak,
        traffic_bytes=moved + collectives * COLLECTIVE_BYTES,
    )


def exact_fits(sizes: Sizes, low: int, high: int) -> Ints:
    """Lengths of runs of consecutive parameters within [low, high], ascending.

    Runs begin at any of the first and last parameters only: a stack of blocks repeats its lengths.
    """
    num_params = len(sizes.ends)
    begins = np.arange(num_params)
    if num_params > 2 * RUN_BEGINS:
        begins = np.concatenate([begins[:RUN_BEGINS], begins[-RUN_BEGINS:]])
    base = sizes.starts[begins]
    from_ = np.maximum(np.searchsorted(sizes.ends, base + low, "left"), begins)
    to = np.maximum(np.searchsorted(sizes.ends, base + high, "right"), from_)
    runs: list[Any] = [
        sizes.ends[i:j] - b for i, j, b in zip(from_, to, base, strict=True) if i < j
    ]
    return np.unique(np.concatenate(runs)) if runs else _ints([])


RUN_BEGINS = 300


def _ints(values: Sequence[int]) -> Ints:
    return np.array(values, dtype=np.int64)
