"""Values of an engine's gradients between backward and step, as all ranks read them together."""

from __future__ import annotations

import math
from collections.abc import Container, Sequence

import torch
from torch import Tensor

from gemini.chunk.storage import Chunk
from gemini.runtime.meetings import Meetings
from gemini.runtime.sharding import Sharding
from gemini.units import ParamId

from .cycle import GradientCycle


class GradientValues:
    """Values of reduced gradients, with their loss scale, before any clip or edit of the user."""

    def __init__(self, sharding: Sharding, meetings: Meetings, cycle: GradientCycle) -> None:
        self._sharding, self._meetings, self._cycle = sharding, meetings, cycle
        self._norms: dict[float, Tensor] = {}  # fp64 [P]; by order
        self._read: dict[ParamId, Tensor] = {}  # what `read` has brought
        meetings.answer("gradient", self._bring)
        meetings.answer("norm", self._bring_norms)

    def have_changed(self) -> None:
        """Forget cached norms: gradients have other values now."""
        self._norms.clear()

    @property
    def are_local(self) -> bool:
        """Whether gradients are this rank's own: the last backward was not reduced, as in DDP."""
        reducer = self._cycle.reducer
        is_sum = self._sharding.comm.world_size > 1 or self._cycle.hook is not None
        return is_sum and reducer.unsynchronised and reducer.leftover

    def read(self, param: ParamId) -> Tensor:
        """Copy of a gradient, fp32 and flat. Every rank calls it, for the same `param` or not."""
        name = self._sharding.layout.params[param].name
        self._meetings.read({f"gradient {param}": f"the gradient of {name}"})
        return self._read.pop(param)

    def norm(self, param: ParamId, order: float) -> Tensor:
        """Norm of a gradient, fp64 0-d, of an order above 0. Every rank calls it, as `read`."""
        if order not in self._norms:
            self._meetings.read({f"norm {order}": f"a norm of order {order} of the gradients"})
        return self._norms[order][param]

    @torch.no_grad()
    def of_this_rank(self, param: ParamId) -> Tensor:
        """Copy, fp32 and flat: the part in this rank's shard, else zeros. Not collective."""
        chunk = self._sharding.chunks[self._sharding.chunk_of[param]]
        total = self._zeros(param)
        if chunk.gradient.exists:
            self._add_shard(total, chunk, param)
        return total

    # -- inside --

    def _bring(self, names: Sequence[str], wanted: Container[str]) -> None:
        """Assemble the gradients that any rank reads; keep what this rank wants. Collective."""
        for name in names:
            param = ParamId(int(name))
            total = self._assembled(param)
            if f"gradient {name}" in wanted:
                self._read[param] = total

    @torch.no_grad()
    def _assembled(self, param: ParamId) -> Tensor:
        if not self.are_local:
            self._cycle.reduce_what_is_left()
        chunk = self._sharding.chunks[self._sharding.chunk_of[param]]
        total = self._zeros(param)
        if chunk.gradient.exists and chunk.counts:
            self._add_shard(total, chunk, param)
        there = total.to(self._sharding.comm.device)
        self._sharding.comm.all_reduce(there).wait()
        return there.to(self._sharding.backend.device)

    def _zeros(self, param: ParamId) -> Tensor:
        numel = math.prod(self._sharding.layout.params[param].shape)
        return torch.zeros(numel, dtype=torch.float32, device=self._sharding.backend.device)

    def _add_shard(self, total: Tensor, chunk: Chunk, param: ParamId) -> None:
        shard = chunk.gradient.load()
        for at, first in self._sharding.own_parts(chunk, param):
            total[first : first + at.stop - at.start] = shard[at]

    def _bring_norms(self, orders: Sequence[str], wanted: Container[str]) -> None:
        for order in orders:
            self._measure(float(order))

    @torch.no_grad()
    def _measure(self, order: float) -> None:
        """Compute the norms of all gradients, in one all-reduce. Collective."""
        comm = self._sharding.comm
        self._cycle.reduce_what_is_left()
        if self._sharding.is_canonical and order == 2:
            self._norms[order] = self._exactly()
            return
        sums = torch.zeros(
            len(self._sharding.params), dtype=torch.float64, device=self._sharding.backend.device
        )
        for chunk in self._sharding.chunks:
            if not chunk.gradient.exists or not chunk.counts:
                continue
            shard = chunk.gradient.load()
            for part in self._sharding.layout.shard_segments(chunk.spec, chunk.rank):
                run = shard[part.offset : part.offset + part.numel]
                norm = norm_of(run, order)
                if math.isinf(order):
                    sums[part.param] = torch.maximum(sums[part.param], norm)
                else:
                    sums[part.param] += norm**order
        sums = sums.to(comm.device)
        comm.all_reduce(sums, largest=math.isinf(order)).wait()
        sums = sums.to(self._sharding.backend.device)
        self._norms[order] = sums if math.isinf(order) else sums ** (1 / order)

    def _exactly(self) -> Tensor:
        """Norms fp64 [P] that no order shows in; NaN where one is not finite. Collective."""
        from gemini.runtime.canonical.exact import ROW_NUMEL, bins_of, integer_of, over_ranks

        squares, broken = [0 for _ in self._sharding.params], [0 for _ in self._sharding.params]
        for chunk in self._sharding.chunks:
            if not chunk.gradient.exists:
                continue
            shard = chunk.gradient.load()
            for part in self._sharding.layout.shard_segments(chunk.spec, chunk.rank):
                # with the zeros behind it, up to the next parameter's row
                numel = -(-part.numel // ROW_NUMEL) * ROW_NUMEL
                found = integer_of([bins_of(shard[part.offset : part.offset + numel])])
                squares[part.param] += found or 0
                broken[part.param] |= found is None
        sums = iter(over_ranks(self._sharding.comm, [*squares, *broken]))
        norms = [math.sqrt(next(sums)) for _ in squares]
        found_here = [math.nan if next(sums) else norm for norm in norms]
        return torch.tensor(found_here, dtype=torch.float64, device=self._sharding.backend.device)


_STRIP_NUMEL = 2**18  # on a CPU torch makes an fp64 copy of all that it takes a norm of


def norm_of(values: Tensor, order: float) -> Tensor:
    """Norm, fp64 0-d, as a norm of norms of strips: the same for every order but 0."""
    strips = values.reshape(-1).split(_STRIP_NUMEL) if order else (values,)
    norms = [torch.linalg.vector_norm(strip, order, dtype=torch.float64) for strip in strips]
    whole: Tensor = torch.linalg.vector_norm(torch.stack(norms), order) if norms[1:] else norms[0]
    return whole
