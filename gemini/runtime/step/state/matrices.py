"""Matrices of an engine for a rule that updates them whole: which rank has which run, and where."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import Any

from gemini.chunk.layout import ChunkSpec
from gemini.chunk.local import group_of as split_of
from gemini.chunk.storage import Chunk
from gemini.optim.matrices.plan import Bucket, WholeParam, buckets_of
from gemini.optim.rules.matrix_rule import MOMENTUM
from gemini.optim.rules.rule import UpdateRule
from gemini.optim.rules.state_layout import Columns
from gemini.optim.step.executors import MatrixUpdates
from gemini.placement.sizes import Waiting
from gemini.placement.tiers import Tier
from gemini.runtime.schedule.planning import Planning
from gemini.runtime.sharding import Sharding
from gemini.units import WORLD


@dataclass(frozen=True, slots=True)
class MatrixBuckets:
    """The buckets of an engine's matrices, in the order of its state."""

    buckets: tuple[Bucket, ...]
    waiting: Waiting

    def largest(self) -> WholeParam | None:
        """Largest matrix, which staging must hold."""
        every = (whole for bucket in self.buckets for whole in bucket.whole_params)
        return max(every, key=lambda whole: whole.numel, default=None)


def matrices_of(sharding: Sharding, chunks: Sequence[Chunk], columns: Columns) -> MatrixBuckets:
    """Buckets of the parameters in these chunks that keep a momentum.

    Raises ValueError for a parameter that torch has split: no rank has all of its matrix.
    """
    whole_params = [whole for chunk in chunks for whole in _whole_params(sharding, chunk, columns)]
    buckets = tuple(buckets_of(whole_params))
    numel = num_runs = 0
    for bucket in buckets:
        params = {whole.param for whole in bucket.whole_params}
        spans = [span for chunk in chunks if (span := _span(chunk.spec, params))]
        numel = max(numel, *(sum(of_rank) for of_rank in zip(*spans, strict=True)))
        num_runs = max(num_runs, len(spans))
    return MatrixBuckets(buckets, Waiting(numel, num_runs))


def _span(spec: ChunkSpec, params: Set[int]) -> list[int]:
    """Elements of each rank's shard from the first to the last of these parameters."""
    slots = [slot for slot in spec.slots if slot.param in params]
    if not slots:
        return []
    low, high = slots[0].offset, slots[-1].offset + slots[-1].numel
    edges = range(0, spec.payload_numel, spec.shard_numel)
    return [max(0, min(high, lo + spec.shard_numel) - max(low, lo)) for lo in edges]


def _whole_params(sharding: Sharding, chunk: Chunk, columns: Columns) -> list[WholeParam]:
    layout, spec = sharding.layout, chunk.spec
    by_rank = [
        {part.param: (part.param_offset, part.numel) for part in layout.shard_segments(spec, rank)}
        for rank in range(spec.num_shards)
    ]
    found = []
    for slot in spec.slots:
        shape, param = layout.params[slot.param].shape, slot.param
        if len(shape) < 2 or not columns.has(param, MOMENTUM.name):
            continue
        if split_of(sharding.params[param]) != WORLD and not _has_whole_matrices(
            sharding.params[param]
        ):
            raise ValueError(
                f"{layout.params[param].name} is split by torch, so no rank has all of its matrix; "
                "give it to a group with use_muon=False"
            )
        runs = tuple(of_rank.get(param, (0, 0)) for of_rank in by_rank)
        found.append(WholeParam(param, tuple(shape), _contiguous(shape), runs, spec.group))
    return found


def _has_whole_matrices(param: Any) -> bool:
    """Whether it is a stack whose matrices torch has given to ranks whole."""
    return param.dim() > 2 and all(p.is_replicate() or p.is_shard(0) for p in param.placements)


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    stride = [1]
    for size in reversed(shape[1:]):
        stride.insert(0, stride[0] * size)
    return tuple(stride)


def matrix_updates(
    sharding: Sharding,
    planning: Planning,
    rule: UpdateRule,
    group_of: Sequence[int | None],
    columns: Columns,
    buckets: Callable[[], Sequence[Bucket]],
) -> MatrixUpdates:
    """Maker of updaters over an engine's shards."""

    def params_on_disk() -> set[int]:  # shards have the same homes on all ranks
        on_disk = [shard.chunk for shard in planning.plan.shards if Tier.NVME in shard.state_homes]
        return {slot.param for chunk in on_disk for slot in sharding.layout.chunks[chunk].slots}

    transports = {group: links.shards for group, links in sharding.links.items()}
    return MatrixUpdates(rule, group_of, columns, transports, buckets, params_on_disk)
