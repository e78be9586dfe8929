"""Measuring passes of a step: what its rule asks of whole parameters before it updates them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from gemini.dtypes import DTYPES
from gemini.optim.rules.rule import UpdateRule
from gemini.optim.rules.state_layout import MASTER
from gemini.optim.state.memory import StreamMark
from gemini.optim.state.pieces import Planes
from gemini.optim.state.space import Block, BlockSegment
from gemini.optim.state.tiered_state import TieredState
from gemini.optim.update.cpu_update import StepInputs

if TYPE_CHECKING:
    from gemini.optim.rules.measures import Measure

# Runs the norms of a rule on a device; its arguments are those of `run` but the first.
ByKernels: TypeAlias = Callable[
    [TieredState, "ParamAndGrad", Mapping[int, "Measure"], StepInputs], None
]

TILE_NUMEL = 1 << 18  # by position in a parameter, so that its cuts change little
# a block at most: an operator is a launch there, and waits for no cache
DEVICE_TILE_NUMEL = 1 << 20


class ParamAndGrad:
    """Parameters and gradients of a target, for a measuring pass: of this rank, and sums of all."""

    def param(self, block: Block, part: BlockSegment) -> Tensor:
        """Weights [n] of a segment without a master; to read."""
        raise NotImplementedError

    def grad(self, block: Block, part: BlockSegment) -> Tensor | None:
        """Gradient [n] of a segment, or None; to read."""
        raise NotImplementedError

    def largest(self, param: int) -> float:
        """At least half of the largest magnitude in a parameter's gradient, on all ranks and
        before the step's factor."""
        raise NotImplementedError

    def add_up(
        self, measures: Mapping[int, Measure], measure: Callable[[], None]
    ) -> Mapping[int, Tensor]:
        """Measure, and add up what all ranks found, by parameter. Collective."""
        measure()
        return {i: one.found() for i, one in measures.items()}


class Measuring:
    """Passes of a target's rule, and the tensors that the rule keeps of them in host memory, the
    same on every rank. Those of a step replace them when it counts (`commit`)."""

    def __init__(
        self,
        rule: UpdateRule,
        shapes: Sequence[Sequence[int]],
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self._rule = rule
        self._shapes = shapes
        self._carried = [
            {
                name: torch.zeros(*size, dtype=dtype)
                for name, shape_of in rule.carried.items()
                if (size := shape_of(shape)) is not None
            }
            for shape in shapes
        ]
        self._next: dict[int, dict[str, Tensor]] = {}

    @property
    def tensors(self) -> list[Tensor]:
        """All of them, in order of parameters."""
        return [tensor for carried in self._carried for tensor in carried.values()]

    def tensors_of(self, param: int) -> dict[str, Tensor]:
        """Tensors of a parameter by name, as they are carried."""
        return dict(self._carried[param])

    def load(self, param: int, given: Mapping[str, Any]) -> None:
        """Load tensors; parameters without any begin anew."""
        for name, carried in self._carried[param].items():
            value = given.get(name)
            carried.zero_() if value is None else carried.copy_(value)

    def commit(self, params: Sequence[int]) -> None:
        """Let the step count, which has updated these parameters."""
        for param in params if self._next else ():
            for name, new in self._next.pop(param, {}).items():
                self._carried[param][name].copy_(new)

    @torch.no_grad()
    def told(
        self,
        state: TieredState,
        param_and_grad: ParamAndGrad,
        hyper: Sequence[Any],
        steps: Sequence[int],
        inputs: StepInputs,
        by_kernels: ByKernels | None = None,
    ) -> list[Any]:
        """Hyperparameters by parameter, None where a step leaves one alone, with what measures
        found. inputs: factor and limit of gradients. by_kernels: a device's norms. Collective."""
        from gemini.optim.rules.measures import MeasuredParam, Norms

        rule, dtype = self._rule, DTYPES[state.layout.dtype]
        found = [None if one is None else rule.begun(one, dtype) for one in hyper]

        def largest(param: int) -> float:
            return param_and_grad.largest(param) * inputs.factor

        self._next = {i: self.tensors_of(i) for i, one in enumerate(hyper) if one is not None}
        for kind in rule.measures:
            measures = {}
            for i, carried in self._next.items():
                shape = self._shapes[i]
                asked = MeasuredParam(rule, found[i], steps[i], shape, partial(largest, i), carried)
                if kind.is_of(shape):
                    measures[i] = kind(asked)
            measure = partial(run, kind.of_state, state, param_and_grad, measures, inputs)
            if kind is Norms and by_kernels is not None:
                measure = partial(by_kernels, state, param_and_grad, measures, inputs)
            for i, sums in param_and_grad.add_up(measures, measure).items():
                found[i] = measures[i].told(sums)
        return found


def run(
    of_state: bool,
    state: TieredState,
    param_and_grad: ParamAndGrad,
    measures: Mapping[int, Measure],
    inputs: StepInputs,
    blocks: Sequence[Block] | None = None,
) -> None:
    """Show this rank's part of parameters to their measures. Reads all state once, or none.

    blocks: of which alone the state is shown; None: all.

    A device computes on what has a gradient there, wherever its state is; the host waits for it
    once, at the end, and for each block that is on disk, whose buffer is used again.
    """
    from gemini.optim.rules.measures import Tile

    dtype = DTYPES[state.layout.dtype]  # of updates
    on_disk = {block.id for block in state.nvme.blocks} if of_state and state.nvme else set()

    def look(block: Block, planes: Planes) -> None:
        for part in block.segments:
            grad = param_and_grad.grad(block, part) if part.param in measures else None
            if grad is None:
                continue
            here = slice(part.offset, part.offset + part.numel)
            others = [plane[here] for name, plane in planes.items() if name != MASTER]
            weight = planes[MASTER][here] if MASTER in planes else None
            if of_state and weight is None:
                weight = param_and_grad.param(block, part)
            place = grad.device
            for tile in _tiles(part, DEVICE_TILE_NUMEL if grad.is_cuda else TILE_NUMEL):
                entering = grad[tile].to(dtype).mul(inputs.factor)
                measures[part.param].add(
                    Tile(
                        entering.clamp(-inputs.limit, inputs.limit),
                        part.param_offset + tile.start,
                        None if weight is None else _at(weight[tile], place).to(dtype),
                        [_at(plane[tile], place) for plane in others],
                    )
                )
            if block.id in on_disk and place.type == "cuda":
                StreamMark(torch.cuda.current_stream(place)).settle()

    if of_state:
        state.visit(look, blocks)
    else:
        for block in state.space.blocks:
            look(block, {})
    away = [one for one in measures.values() if any(found.is_cuda for found in one.sums)]
    here = iter(to_host([found for one in away for found in one.sums]))
    for one in away:
        one.sums = [next(here) for _ in one.sums]


def _at(values: Tensor, place: torch.device) -> Tensor:
    return values.to(place, non_blocking=True)


def to_host(found: Sequence[Tensor]) -> list[Tensor]:
    """Tensors of one dtype in host memory: one copy for all on a device, for which the host
    waits."""
    if not any(one.is_cuda for one in found):
        return list(found)
    device = next(one.device for one in found if one.is_cuda)
    there = torch.cat([one.to(device).view(-1) for one in found])
    here = torch.empty_like(there, device="cpu", pin_memory=True)
    here.copy_(there, non_blocking=True)
    StreamMark(torch.cuda.current_stream(device)).settle()
    parts = here.split([one.numel() for one in found])
    return [part.view(one.shape) for part, one in zip(parts, found, strict=True)]


def _tiles(part: BlockSegment, numel: int) -> list[slice]:
    """Tiles of a segment, cut at multiples of the tile in its parameter."""
    first = -part.param_offset % numel
    edges = [0, *range(first or numel, part.numel, numel), part.numel]
    return [slice(a, b) for a, b in pairwise(edges)]
