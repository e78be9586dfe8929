"""Weights that stages of a pipeline tie: every stage has a copy, and all copies have one gradient.

S numel of a shard

A copy is a chunk of its stage, in a sharding group of its own, so that a stage gathers it without
the others. Its gradient is reduced over the stage like any other, and waits. Before a step, or a
clip, the gradients of the copies are added up: the sum of two addends has the same bits on both
sides. So all copies take the same step from the same values. Only the first copy is counted in the
norm, and saved, as one tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gemini.chunk.layout import ParamSpec
from gemini.chunk.local import local_of
from gemini.chunk.storage import Chunk
from gemini.comm.communicator import Communicator
from gemini.comm.links import Tie
from gemini.runtime.gradients.cycle import GradientCycle
from gemini.runtime.sharding import Sharding

TIED = "tied "  # begins the last word of a sharding group


class Ties:
    """Parameters of this process that stages tie, until they are wrapped."""

    def __init__(self, pipeline: dist.ProcessGroup, place: int) -> None:
        """Begin without ties. pipeline: ranks of this rank's pipeline, in the order of places."""
        self._ranks = dist.get_process_group_ranks(pipeline)
        self._place = place
        self._waiting: dict[int, tuple[nn.Parameter, Tie]] = {}

    def add(
        self, copies: Sequence[nn.Parameter], names: tuple[str, ...], places: Sequence[int]
    ) -> None:
        """Tie the copies of one parameter, and give all of them the first one's values.

        copies: of this process. names: all names of the parameter in the whole model. places: of
        the pipeline that have a copy, in the order of stages. Collective over these places.
        """
        across = None
        if len(places) > 1:
            ranks = [self._ranks[place] for place in places]
            across = Communicator(dist.new_group(ranks, use_local_synchronization=True))
        for i, param in enumerate(copies):
            is_first = i == 0 and self._place == places[0]
            if across is not None and i == 0:
                across.announce("the tie of stages", names)
                across.broadcast(local_of(param.detach()))
            self._waiting[id(param)] = param, Tie(names, across, is_first)

    def take(
        self, params: Sequence[nn.Parameter], specs: Sequence[ParamSpec]
    ) -> tuple[list[ParamSpec], dict[str, Tie]]:
        """(specs with the names and sharding groups of tied parameters, ties by group).

        The ties are removed from this object.
        """
        found, ties = [], {}
        for param, spec in zip(params, specs, strict=True):
            if id(param) in self._waiting:
                _, tie = self._waiting.pop(id(param))
                first, *others = tie.names
                group = f"{spec.group}+{TIED}{first}"
                spec = replace(spec, name=first, aliases=tuple(others), group=group)
                ties[group] = tie
            found.append(spec)
        return found, ties

    def forget(self) -> None:
        """Remove the ties of parameters that were not wrapped."""
        self._waiting.clear()


@torch.no_grad()
def add_up(parts: Iterable[tuple[Sharding, GradientCycle]]) -> None:
    """Replace the gradients of tied weights by the sum over all copies. Collective over stages.

    parts: of this process, in the order of stages. All stages call it after the same windows, so
    the copies of a weight have a gradient to add on all ranks, or on none.
    """
    tied: dict[str, list[tuple[GradientCycle, Chunk]]] = {}
    for sharding, cycle in parts:
        for chunk in sharding.chunks:
            if chunk.tie is not None and chunk.gradient.own is not None:
                tied.setdefault(chunk.tie.names[0], []).append((cycle, chunk))
    # By name: every rank must reduce its ties in one order, and stages have theirs in different
    # chunks.
    for name in sorted(tied):
        copies = tied[name]
        total = _sum([chunk.gradient.own for _, chunk in copies])
        there = any(cycle.reducer.present[chunk.spec.slots[0].param] for cycle, chunk in copies)
        across = copies[0][1].tie
        assert across is not None
        if across.copies is not None:
            across.copies.all_reduce(total).wait()
            said = across.copies.numbers([there], torch.int32)
            across.copies.all_reduce(said).wait()
            there = bool(said.item())
        for i, (cycle, chunk) in enumerate(copies):
            chunk.gradient.add_own(total.clone() if i else total)
            cycle.reducer.set_present(chunk.spec.slots[0].param, there)


def _sum(values: Sequence[Tensor | None]) -> Tensor:
    """Sum [S], fp32, of the gradients of a chunk's copies in this process, in a new tensor."""
    first, *others = [value.float() for value in values if value is not None]
    return sum(others, first)
