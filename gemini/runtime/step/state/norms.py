"""Norms of an engine's parameters before an update, of a rule that asks for them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gemini.chunk.local import group_of as split_of
from gemini.chunk.storage import Chunk
from gemini.mesh.roles import WORLD
from gemini.optim.rules.clipping import Clip
from gemini.optim.rules.rule import NormRule
from gemini.optim.state.space import Block, BlockSegment
from gemini.optim.state.tiered_state import TieredState
from gemini.optim.step.norms import Cover, square_sums, trusted
from gemini.optim.update.cpu_update import StepInputs
from gemini.runtime.parts import Parts

from .shard_blocks import Shards


class _ShardCover(Cover):
    """Shards and their gradients; of those that wait elsewhere one at a time is here."""

    def __init__(self, chunks: Sequence[Chunk]) -> None:
        self._chunks = chunks
        self._shards = Shards(chunks)
        self._grad: tuple[int, Tensor] | None = None

    def param(self, block: Block, part: BlockSegment) -> Tensor:
        return self._part(self._shards.of(block), block, part)

    def grad(self, block: Block, part: BlockSegment) -> Tensor | None:
        gradient = self._chunks[block.shard].gradient
        if not gradient.exists:
            return None
        if self._grad is None or self._grad[0] != block.shard:
            self._grad = block.shard, gradient.load()
        return self._part(self._grad[1], block, part)

    @staticmethod
    def _part(shard: Tensor, block: Block, part: BlockSegment) -> Tensor:
        start = block.shard_offset + part.offset
        return shard[start : start + part.numel]


def check_not_split(parts: Parts) -> None:
    """Raise ValueError for a parameter of which torch has given ranks different parts."""
    for param, spec in zip(parts.params, parts.layout.params, strict=True):
        if spec.trainable and split_of(param) != WORLD:
            raise ValueError(
                f"{spec.name} is split by torch, so no norm over these ranks is that of all of it; "
                "expected an optimizer that asks for none, as HybridAdam"
            )


def with_norms(
    parts: Parts,
    chunks: Sequence[Chunk],
    state: TieredState,
    rule: NormRule,
    hyper: Sequence[Any],
    steps: Sequence[int],
    clip: Clip,
    power_sum: float,
) -> list[Any]:
    """Hyperparameters by parameter, None where a step leaves one alone. Collective.

    Raises what went wrong on this rank, or RuntimeError where another's disk failed.
    """
    inputs = StepInputs.clipping(clip, power_sum, parts.control_vector.read().scale)
    error: BaseException | None = None
    sums = [(0.0, 0.0)] * len(hyper)
    try:
        cover = _ShardCover(chunks)
        sums = square_sums(rule, state, cover, hyper, steps, inputs)
    except BaseException as raised:  # others wait for this rank's sums
        error = raised
    comm = parts.links[WORLD].shards
    told = [*(value for pair in sums for value in pair), float(error is not None)]
    summed = comm.numbers(told, torch.float64)
    comm.all_reduce(summed).wait()
    *values, failed = summed.tolist()
    if error is not None:
        raise error
    if failed:
        raise RuntimeError(
            "the disk of another rank failed before the update; weights and state are those of the "
            "last step on every rank"
        )
    assert all(map(math.isfinite, values))
    return trusted(rule, hyper, list(zip(values[::2], values[1::2], strict=True)))
