"""Shards of an engine and their gradients, as measuring passes see them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gemini.chunk.local import group_of as split_of
from gemini.chunk.storage import Chunk
from gemini.optim.state.space import Block, BlockSegment
from gemini.optim.step.measuring import ParamAndGrad
from gemini.runtime.sharding import Sharding
from gemini.units import WORLD

from .shard_blocks import Shards

if TYPE_CHECKING:
    from gemini.optim.rules.measures import Measure


class ShardParamAndGrad(ParamAndGrad):
    """Shards and their gradients. Of gradients in other memory one at a time is loaded."""

    def __init__(self, sharding: Sharding, chunks: Sequence[Chunk], largest: float) -> None:
        """largest: norm of all gradients together."""
        self._sharding = sharding
        self._largest = largest
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

    def largest(self, param: int) -> float:
        return self._largest

    def add_up(
        self, measures: Mapping[int, Measure], measure: Callable[[], None]
    ) -> Mapping[int, Tensor]:
        """Raises what went wrong on this rank, or RuntimeError where another's disk failed."""
        sizes = [one.found().numel() for one in measures.values()]
        told, error = torch.zeros(sum(sizes) + 1, dtype=torch.float64), None
        try:
            measure()
            told[:-1] = torch.cat([*(one.found() for one in measures.values()), told[:0]])
        except BaseException as raised:  # others wait for this rank's sums
            error, told[-1] = raised, 1.0
        comm = self._sharding.links[WORLD].shards
        summed = told.to(comm.device)
        comm.all_reduce(summed).wait()
        told = summed.cpu()
        if error is not None:
            raise error
        if told[-1]:
            raise RuntimeError(
                "the disk of another rank failed before the update; weights and state are those of "
                "the last step on every rank"
            )
        found = dict(zip(measures, told[:-1].split(sizes), strict=True))
        for param, sums in found.items():
            if not bool(sums.isfinite().all()):
                raise RuntimeError(
                    f"the norm of {self._sharding.layout.params[param].name}, or of what it moves "
                    "along, is not finite, and its gradient is: weights or state have a NaN or an "
                    "Inf already. Nothing was changed; load a checkpoint"
                )
        return found


def check_not_split(sharding: Sharding) -> None:
    """Raise ValueError for a parameter of which torch has given ranks different parts."""
    for param, spec in zip(sharding.params, sharding.layout.params, strict=True):
        if spec.trainable and split_of(param) != WORLD:
            raise ValueError(
                f"{spec.name} is split by torch, so no norm over these ranks is that of all of it; "
                "expected an optimizer that asks for none, as HybridAdam"
            )
