"""Norms of whole parameters and lines of matrices, for rules that ask before an update."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor

from gemini.dtypes import DTYPES
from gemini.optim.rules.line_rule import LineRule
from gemini.optim.rules.lines import LineSums
from gemini.optim.rules.rule import NormRule
from gemini.optim.rules.state_layout import MASTER
from gemini.optim.state.lines import Lines
from gemini.optim.state.pieces import Planes
from gemini.optim.state.space import Block, BlockSegment
from gemini.optim.state.tiered_state import TieredState
from gemini.optim.update.cpu_update import StepInputs

TILE_NUMEL = 1 << 18  # by position in a parameter, so that its cuts change little


class Cover(Protocol):
    """Weights and gradients of segments of blocks, [n] each; to read."""

    def param(self, block: Block, part: BlockSegment) -> Tensor:
        """Weights of a segment without a master."""
        ...

    def grad(self, block: Block, part: BlockSegment) -> Tensor | None:
        """Gradient of a segment, or None."""
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
    """Sums of p^2 and of u^2 of this rank's part of each parameter, in fp64. Reads all state once.

    hyper: None for a parameter that the step leaves alone; its sums are 0. inputs: factor and limit
    of gradients.
    """
    dtype = _dtype_of(state)
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
                param, one = weight[tile].to(dtype), hyper[part.param]
                entering = _entering(grad[tile].to(param.device, dtype), inputs)
                inside = rule.given(
                    [plane[tile] for plane in kept], one, part.param_offset + tile.start, param
                )
                step = rule.moved_along(param, entering, inside, one, steps[part.param])
                found[part.param].append((_squares(param), _squares(step)))

    state.visit(look)
    return [
        (math.fsum(p for p, _ in found[i]), math.fsum(u for _, u in found[i]))
        for i in range(len(hyper))
    ]


@torch.no_grad()
def add_lines(
    state: TieredState, cover: Cover, sums: Mapping[int, LineSums], inputs: StepInputs
) -> None:
    """Add squares of this rank's part of gradients to `sums`, by parameter. Reads no state."""
    dtype = _dtype_of(state)
    for block in state.space.blocks:
        for part in block.segments:
            grad = cover.grad(block, part) if part.param in sums else None
            for tile in _tiles(part) if grad is not None else ():
                assert grad is not None
                entering = _entering(grad[tile].to(dtype), inputs)
                sums[part.param].add(entering, part.param_offset + tile.start)


def with_lines(
    rule: LineRule,
    lines: Lines,
    sums: Mapping[int, LineSums],
    hyper: Sequence[Any],
    steps: Sequence[int],
) -> list[Any]:
    """Hyperparameters by parameter, with rows and columns from sums over whole gradients."""
    lines.begin()
    found = [None if one is None else rule.begun(one, lines.dtype) for one in hyper]
    for i, whole in sums.items():
        rows, columns = lines.advance(i, whole, rule.share(found[i], steps[i]))
        found[i] = rule.factored(found[i], whole.stack, rows, columns)
    return found


def _dtype_of(state: TieredState) -> torch.dtype:
    """dtype in which updates are computed."""
    return DTYPES[state.layout.dtype]


def _entering(grad: Tensor, inputs: StepInputs) -> Tensor:
    return grad.mul(inputs.factor).clamp(-inputs.limit, inputs.limit)


def _tiles(part: BlockSegment) -> list[slice]:
    """Tiles of a segment, cut at multiples of the tile in its parameter."""
    first = -part.param_offset % TILE_NUMEL
    edges = [0, *range(first or TILE_NUMEL, part.numel, TILE_NUMEL), part.numel]
    return [slice(a, b) for a, b in pairwise(edges)]


def _squares(values: Tensor) -> float:
    wide = values.double()
    return float(torch.dot(wide, wide))


def trusted(
    rule: NormRule,
    hyper: Sequence[Any],
    sums: Sequence[tuple[float, float]],
    numels: Sequence[int],
) -> list[Any]:
    """Hyperparameters by parameter, with the trust that norms give."""
    return [
        None if one is None else rule.trusting(one, math.sqrt(squares), math.sqrt(moved), numel)
        for one, (squares, moved), numel in zip(hyper, sums, numels, strict=True)
    ]
