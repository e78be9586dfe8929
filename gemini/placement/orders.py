"""Orders in which the micro-batches of a step run, and the price of each. Pure.

k micro-batches

From the trace of one micro-batch follows that of a step layer by layer: a layer's calls come once
in forward and once in backward, and prologue and epilogue k times. The planner then says of both
traces what is read: k times what one micro-batch reads, or what the layered step reads once.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from gemini.memtracer.trace import Phase, Trace, TraceMoment
from gemini.placement.plan import MoveKind, Plan
from gemini.placement.tiers import Tier
from gemini.units import Bytes, ChunkId, ParamId, format_bytes

LAYERS, BATCHES = ORDERS = ("layers", "batches")
IN_WORDS = {LAYERS: "layer by layer", BATCHES: "one after the other"}
WORTH_SAYING = 0.93  # of the seconds: what saves less is not advised
LAYER_NUMBER = re.compile(r"(?:^|\.)(\d+)(?=\.|$)")  # the first in a module's name is its layer
# Prologues, or epilogues, in a trace at most: all need the same weights, and planning takes time
# for each call. The seconds of those that are left out are added to these.
MOST_REPEATS = 8


class NoLayersError(ValueError):
    """Trace that shows no chain of layers."""


@dataclass(frozen=True, slots=True)
class OrderPrice:
    """Price of a step in one order.

    read_bytes: of parameters that forward and backward of all micro-batches bring to the device,
    of one rank. seconds: of the whole step.
    """

    order: str
    read_bytes: int
    seconds: float

    def __str__(self) -> str:
        return f"reads {format_bytes(self.read_bytes)} of parameters, {self.seconds:.3g} s"


@dataclass(frozen=True, slots=True)
class OrderPrices:
    """Prices of both orders; or, of one that has none, the reason in words."""

    batches: OrderPrice | str
    layers: OrderPrice | str

    @property
    def advised(self) -> str:
        """Order that takes clearly less time; else the one that any model has."""
        if isinstance(self.layers, str):
            return BATCHES
        if isinstance(self.batches, str):
            return LAYERS
        is_worth = self.layers.seconds < WORTH_SAYING * self.batches.seconds
        return LAYERS if is_worth else BATCHES

    def __str__(self) -> str:
        return (
            f"micro-batches one after the other: {self.batches}; layer by layer: {self.layers}; "
            f"advised: --accumulate-order {self.advised}"
        )


@dataclass(frozen=True, slots=True)
class Accumulated:
    """Step that `gemini.accumulate` has run: bytes of parameters that forward and backward brought
    to the device, as planned and as counted. predicted_bytes: None before a plan was made with a
    trace of such a step."""

    order: str
    num_batches: int
    predicted_bytes: int | None
    counted_bytes: int

    def __str__(self) -> str:
        planned = self.predicted_bytes
        said = "nothing" if planned is None else format_bytes(planned)
        return (
            f"accumulated {self.num_batches} micro-batches, {IN_WORDS[self.order]}: "
            f"{format_bytes(self.counted_bytes)} of parameters were read, {said} predicted"
        )


def counted_bytes(plan: Plan, gathers: Mapping[ChunkId, int]) -> int:
    """Bytes of parameters that so many gathers of each chunk brought to the device, as
    `bytes_read` has them."""
    return sum(
        number * plan.chunks[chunk].shard_bytes
        for chunk, number in gathers.items()
        if plan.shards[chunk].param_home is not Tier.DEVICE
    )


def bytes_read(plan: Plan) -> int:
    """Bytes of parameters that forward and backward of a plan's iteration bring to the device, of
    one rank."""
    return sum(
        move.nbytes
        for move in plan.forecast.moves
        if move.kind is MoveKind.PARAM and move.block is None
    )


@dataclass(frozen=True, slots=True)
class _Stages:
    """Moments of one micro-batch: in forward, and in backward of the epilogue (above), of layers,
    and of the prologue (below). name: of the list of layers."""

    name: str
    prologue: tuple[TraceMoment, ...]
    forwards: tuple[tuple[TraceMoment, ...], ...]  # by layer
    epilogue: tuple[TraceMoment, ...]
    above: tuple[TraceMoment, ...]
    backwards: tuple[tuple[TraceMoment, ...], ...]  # by layer; empty where nothing is trained
    below: tuple[TraceMoment, ...]


def layered(trace: Trace, num_batches: int, sums_of: Mapping[ParamId, int]) -> Trace:
    """Trace of a step layer by layer, from that of one micro-batch in which layers are computed
    again: what one leaves for backward are hidden states.

    Those before each layer are there for all micro-batches, and what a layer saves for one at a
    time. sums_of: bytes of fp32 sums of gradients, of trained parameters, which stay until the
    step. Raises NoLayersError.
    """
    stages = _stages(trace.moments)
    firsts = [moments[0].non_model_bytes for moments in stages.forwards]
    hidden = max(0, min(after - before for before, after in pairwise(firsts)))
    floor = min(m.non_model_bytes for m in trace.moments)

    repeats = min(num_batches, MOST_REPEATS)
    share = num_batches / repeats

    def times(moments: Sequence[TraceMoment], beside: int) -> list[TraceMoment]:
        least = min((m.non_model_bytes for m in moments), default=0)
        return [
            replace(m, non_model_bytes=Bytes(beside + m.non_model_bytes - least), saved_bytes=0,
                    seconds=share * m.seconds)
            for m in moments
        ]  # fmt: skip

    def sums(moments: Sequence[TraceMoment]) -> int:
        return sum(sums_of.get(p, 0) for p in {p: None for m in moments for p in m.params})

    def boundaries(i: int) -> int:
        return floor + (i + 1) * num_batches * hidden

    def visit(
        i: int, phase: Phase, moments: Sequence[TraceMoment], beside: int
    ) -> list[TraceMoment]:
        """One call of a layer, with all its parameters and the most that it asks for."""
        if not moments:
            return []
        name = f"{stages.name}.{i}"
        params: tuple[ParamId, ...] = tuple(dict.fromkeys(p for m in moments for p in m.params))
        asked = [m.non_model_bytes for m in moments]
        most = Bytes(beside + max(asked) - min(asked))
        seconds = num_batches * sum(m.seconds for m in moments)
        return [
            TraceMoment(phase, "enter", name, params, most, seconds),
            TraceMoment(phase, "leave", name, params, Bytes(beside)),
        ]

    made = times(stages.prologue, floor) * repeats
    for i, moments in enumerate(stages.forwards):
        made += visit(i, "forward", moments, boundaries(i))
    full = boundaries(len(stages.forwards) - 1)
    around = (*stages.prologue, *stages.epilogue)
    summed = sums(around)
    outer = times((*stages.epilogue, *stages.above), full + summed)
    above = (*times(stages.prologue, full), *outer)
    made += list(above) * repeats
    for i, moments in reversed(list(enumerate(stages.backwards))):
        summed += sums(moments)
        made += visit(i, "backward", moments, boundaries(i) + summed)
    ends = (*times(stages.prologue, floor + summed), *times(stages.below, floor + summed))
    made += list(ends) * repeats if stages.below else []
    signature = f"{trace.signature}, {num_batches} layer by layer"
    return replace(trace, signature=signature, moments=tuple(made), layers=(), recomputed=0)


def _stages(moments: Sequence[TraceMoment]) -> _Stages:
    """Moments by what they belong to. Raises NoLayersError."""
    layers = Counter[str]()
    for module in dict.fromkeys(m.module for m in moments):
        found = LAYER_NUMBER.search(module)
        layers.update([module[: found.start()]] if found else [])
    name = layers.most_common(1)[0][0] if layers else ""

    def layer_of(moment: TraceMoment) -> int | None:
        found = LAYER_NUMBER.search(moment.module)
        return int(found[1]) if found and moment.module[: found.start()] == name else None

    numbers = [layer_of(m) for m in moments]
    count = 1 + max((i for i in numbers if i is not None), default=-1)
    parts = []
    for phase in ("forward", "backward"):
        mine = [(i, m) for i, m in zip(numbers, moments, strict=True) if m.phase == phase]
        places = [place for place, (i, _) in enumerate(mine) if i is not None]
        first, last = (places[0], places[-1] + 1) if places else (len(mine), len(mine))
        by_layer = tuple(tuple(m for i, m in mine if i == layer) for layer in range(count))
        before, behind = tuple(m for _, m in mine[:first]), tuple(m for _, m in mine[last:])
        parts.append((before, behind, by_layer))
    (prologue, epilogue, forwards), (above, below, backwards) = parts
    if count < 2 or not all(forwards):
        raise NoLayersError("has no price: the trace shows no list of layers")
    return _Stages(name, prologue, forwards, epilogue, above, backwards, below)
