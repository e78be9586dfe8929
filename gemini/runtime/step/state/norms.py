"""Norms and lines of an engine's parameters, for rules that ask for them before an update."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gemini.chunk.local import group_of as split_of
from gemini.chunk.storage import Chunk
from gemini.mesh.roles import WORLD
from gemini.optim.rules.clipping import Clip
from gemini.optim.rules.line_rule import LineRule
from gemini.optim.rules.rule import NormRule
from gemini.optim.state.lines import Lines
from gemini.optim.state.space import Block, BlockSegment
from gemini.optim.state.tiered_state import TieredState
from gemini.optim.step.norms import Cover, add_lines, square_sums, trusted, with_lines
from gemini.optim.update.cpu_update import StepInputs
from gemini.runtime.parts import Parts

from .shard_blocks import Shards


class _ShardCover(Cover):
    """Shards and their gradients. Of gradients in other memory one at a time is loaded."""

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
    lines: Lines,
) -> list[Any]:
    """Hyperparameters by parameter, None where a step leaves one alone. Collective.

    Raises what went wrong on this rank, or RuntimeError where another's disk failed.
    """
    inputs = StepInputs.clipping(clip, power_sum, parts.control_vector.read().scale)
    cover = _ShardCover(chunks)
    if isinstance(rule, LineRule):
        largest = clip.norm(power_sum) * inputs.factor  # of all gradients together
        of_lines = lines.sums([one is not None for one in hyper], [largest] * len(hyper))
        found = [sums.values for sums in of_lines.values()]

        def lines_here() -> Tensor:
            add_lines(state, cover, of_lines, inputs)
            return torch.cat([*found, torch.zeros(0)])

        sizes = [one.numel() for one in found]
        of_all = _over_ranks(parts, sum(sizes), lines_here).split(sizes)
        for one, values in zip(found, of_all, strict=True):
            one.copy_(values)
        hyper = with_lines(rule, lines, of_lines, hyper, steps)

    def norms_here() -> Tensor:
        sums = square_sums(rule, state, cover, hyper, steps, inputs)
        return torch.tensor(sums, dtype=torch.float64).flatten()

    norms = _over_ranks(parts, 2 * len(hyper), norms_here)
    if not bool(norms.isfinite().all()):
        found_at = int(norms.isfinite().logical_not().nonzero()[0]) // 2
        raise RuntimeError(
            f"the norm of {parts.layout.params[found_at].name}, or of what it moves along, is not "
            "finite, and its gradient is: weights or state have a NaN or an Inf already. Nothing "
            "was changed; load a checkpoint"
        )
    numels = [spec.numel for spec in parts.layout.params]
    return trusted(rule, hyper, norms.view(-1, 2).tolist(), numels)


def _over_ranks(parts: Parts, numel: int, measure: Callable[[], Tensor]) -> Tensor:
    """[numel] fp64: what all ranks measure, added up. Collective."""
    told, error = torch.zeros(numel + 1, dtype=torch.float64), None
    try:
        told[:-1] = measure()
    except BaseException as raised:  # others wait for this rank's sums
        error, told[-1] = raised, 1.0
    comm = parts.links[WORLD].shards
    summed = told.to(comm.device)
    comm.all_reduce(summed).wait()
    told = summed.cpu()
    if error is not None:
        raise error
    if told[-1]:
        raise RuntimeError(
            "the disk of another rank failed before the update; weights and state are those of the "
            "last step on every rank"
        )
    return told[:-1]
