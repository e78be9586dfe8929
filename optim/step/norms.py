"""Norms of whole parameters before an update, of a rule that asks for them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor

from gemini.optim.rules.rule import NormRule
from gemini.optim.rules.state_layout import MASTER
from gemini.optim.state.pieces import Planes
from gemini.optim.state.space import Block, BlockSegment
from gemini.optim.state.tiered_state import TieredState
from gemini.optim.update.cpu_update import StepInputs

TILE_NUMEL = 1 << 18  # by position in a parameter, so that its cuts change little


class Cover(Protocol):
    """What belongs to segments of blocks, [n] each; to read."""

    def param(self, block: Block, part: BlockSegment) -> Tensor:
        """Where there is no master."""
        ...

    def grad(self, block: Block, part: BlockSegment) -> Tensor | None:
        """None where there is none."""
        ...


@torch.no_grad()
def square_sums(
    rule: NormRule,
    state: TieredState,
    cover: Cover,
    hyper: Sequence[Any],
    steps: Sequence[int],
    inputs: StepInputs,
) -> list[tuple[float, float]]:
    """By parameter: sums of p^2 and of u^2 over what is here, in fp64. Reads all state once.

    hyper: None for a parameter that the step leaves alone; its sums are 0. inputs: what gradients
    go through on their way in.
    """
    factor, limit = inputs.factor, inputs.limit
    found: defaultdict[int, list[tuple[float, float]]] = defaultdict(list)

    def look(block: Block, planes: Planes) -> None:
        for part in block.segments:
            grad = None if hyper[part.param] is None else cover.grad(block, part)
            if grad is None:
                continue
            here = slice(part.offset, part.offset + part.numel)
            kept = [plane[here] for name, plane in planes.items() if name != MASTER]
            weight = planes[MASTER][here] if MASTER in planes else cover.param(block, part)
            for tile in _tiles(part):
                param = weight[tile].to(kept[0].dtype)
                given = grad[tile].to(param.device, param.dtype).mul(factor).clamp(-limit, limit)
                inside = [plane[tile] for plane in kept]
                step = rule.moved_along(param, given, inside, hyper[part.param], steps[part.param])
                found[part.param].append((_squares(param), _squares(step)))

    state.visit(look)
    return [
        (math.fsum(p for p, _ in found[i]), math.fsum(u for _, u in found[i]))
        for i in range(len(hyper))
    ]


def _tiles(part: BlockSegment) -> list[slice]:
    """Of a segment, cut where its parameter has multiples of the tile."""
    first = -part.param_offset % TILE_NUMEL
    edges = [0, *range(first or TILE_NUMEL, part.numel, TILE_NUMEL), part.numel]
    return [slice(a, b) for a, b in pairwise(edges)]


def _squares(values: Tensor) -> float:
    wide = values.double()
    return float(torch.dot(wide, wide))


def trusted(rule: NormRule, hyper: Sequence[Any], sums: Sequence[tuple[float, float]]) -> list[Any]:
    """Hyperparameters by parameter, with what their norms say."""
    return [
        None if one is None else rule.trusting(one, math.sqrt(squares), math.sqrt(moved))
        for one, (squares, moved) in zip(hyper, sums, strict=True)
    ]
