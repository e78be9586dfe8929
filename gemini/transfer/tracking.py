"""Which elements have changed: bits kept from the first `weights(deltas=True)` on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence

import torch
from torch import Tensor

from gemini.chunk.layout import ITEMSIZE, ChunkSpec, ShardSegment
from gemini.chunk.local import is_dtensor
from gemini.optim.update.changed_bits import positions
from gemini.placement.tiers import Tier
from gemini.runtime.memory.changed_weights import ChangedWeights, bytes_of
from gemini.runtime.memory.shard_storage import ShardStorage
from gemini.runtime.schedule.planning import Planning
from gemini.runtime.sharding import Sharding
from gemini.runtime.step.executors import updated_by_kernels
from gemini.units import WORLD, ParamId

from .deltas import RUN_NUMEL, Size, Sizes, gaps_of, nbytes_of


def tracked(
    sharding: Sharding, planning: Planning, storage: ShardStorage, counters: Sequence[int]
) -> ChangedWeights:
    """Bits of what steps change, of all trained chunks, from now on if there were none. Collective.

    Raises BudgetError where a budget has no room for them, and then nothing has changed.
    """
    marks = storage.changed
    chunks = [spec for spec in sharding.layout.chunks if spec.trainable and spec.group == WORLD]
    if marks is not None and marks.bits.keys() == {chunk.id for chunk in chunks}:
        return marks
    on_device = updated_by_kernels(planning.plan, sharding.backend)
    inputs = planning.inputs
    tier = Tier.DEVICE if on_device else inputs.memory
    total = Counter(dict(inputs.average))
    total[tier] += sum(map(bytes_of, chunks)) - (0 if marks is None else marks.nbytes)
    planning.keep_averages(tuple((tier, n) for tier, n in total.items() if n))
    storage.adopt_plan(planning.plan)

    def zeros(nbytes: int) -> Tensor:
        return sharding.backend.zeros(nbytes, torch.uint8, on_host=not on_device)

    storage.changed = ChangedWeights(chunks, zeros, counters, on_device=on_device)
    return storage.changed


def sizes_of(
    sharding: Sharding, marks: ChangedWeights | None, params: Collection[ParamId]
) -> tuple[Sizes, dict[ParamId, int]]:
    """Sizes of deltas, of every rank, and bytes of an element of those that are worth it, in the
    order of chunks. Collective."""
    if marks is None or not params:
        return [], {}
    shards = sharding.links[WORLD].shards
    own: dict[ParamId, list[Size]] = {}
    for chunk, segment in _segments(sharding, params, shards.rank):
        for start in range(0, segment.numel, RUN_NUMEL):
            found = _positions(marks, chunk, segment, start)
            if found.numel():
                first = segment.param_offset + start
                size = Size(first, found.numel(), gaps_of(found).numel())
                own.setdefault(segment.param, []).append(size)
    sizes: Sizes = shards.gather_objects(own)
    itemsizes: dict[ParamId, int] = {}
    for spec in sharding.layout.chunks:
        for slot in spec.slots:
            itemsize = ITEMSIZE[spec.dtype]
            if slot.param not in params or is_dtensor(sharding.params[slot.param]):
                continue
            if nbytes_of(sizes, slot.param, itemsize) < slot.numel * itemsize:
                itemsizes[slot.param] = itemsize
    return sizes, itemsizes


def changed_positions(
    sharding: Sharding, marks: ChangedWeights, param: ParamId, start: int
) -> tuple[int, Tensor]:
    """Positions int64 [k] of what has changed in the run of a parameter that begins at element
    `start` of it, and the element of this rank's shard [S] where that run begins."""
    rank = sharding.links[WORLD].shards.rank
    for chunk, segment in _segments(sharding, {param}, rank):
        inside = start - segment.param_offset
        return segment.offset + inside, _positions(marks, chunk, segment, inside)
    raise AssertionError(f"rank {rank} has no part of parameter {param}")


def _segments(
    sharding: Sharding, params: Collection[ParamId], rank: int
) -> Iterator[tuple[ChunkSpec, ShardSegment]]:
    for spec in [sharding.layout.chunks[c] for c in sorted({sharding.chunk_of[p] for p in params})]:
        for segment in sharding.layout.shard_segments(spec, rank):
            if segment.param in params:
                yield spec, segment


def _positions(
    marks: ChangedWeights, chunk: ChunkSpec, segment: ShardSegment, start: int
) -> Tensor:
    """Positions in a run of at most RUN_NUMEL elements, from `start` of the segment on."""
    numel = min(RUN_NUMEL, segment.numel - start)
    first = segment.offset + start
    bits = marks.of(chunk.id, first, first + numel)
    assert bits is not None
    found = positions(bits)
    return found[found < numel]  # behind it there is padding
