"""Gradients of a step whose norm has no order that shows; see `canonical.exact`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NoReturn

import torch

from gemini.chunk.storage import Chunk
from gemini.comm.ballot import Agreement, Ballot
from gemini.optim.rules.clipping import Clip
from gemini.optim.step.gradients import Measured
from gemini.runtime.canonical.exact import bins_of, integer_of, over_ranks
from gemini.runtime.wrap.precision import check_order

from .gradients import StepGradients


class CanonicalGradients(StepGradients):
    """Gradients of all trainable chunks of one engine, measured exactly."""

    def measure_leaving(self) -> None:
        super().measure_leaving()
        for chunk in self._chunks:
            chunk.gradient.measure = bins_of

    def reduced(self) -> list[Chunk]:
        if self._sharding.comm.world_size == 1 and self._cycle.reducer.is_late:
            _refuse_late()
        return super().reduced()

    def _vote(self, chunks: Sequence[Chunk], norm_type: float | None) -> Agreement:
        agreement, comm = super()._vote(chunks, norm_type), self._sharding.comm
        if agreement.deviated:
            late = comm.numbers([self._cycle.reducer.is_late], torch.float64)
            comm.all_reduce(late).wait()
            if late.item():
                _refuse_late()
        return agreement

    def ballot(self, chunks: Sequence[Chunk], norm_type: float | None) -> Ballot:
        """Ballot of this rank, of which the first has the sum of squares of all. Collective."""
        ballot = super().ballot(chunks, None if norm_type == 2 else norm_type)
        ballot = replace(ballot, deviated=ballot.deviated or self._cycle.reducer.is_late)
        if norm_type != 2:
            return ballot
        comm, found = self._sharding.comm, Measured()
        squares = self._squares(chunks)
        if squares is None:  # a norm of order inf says which is not finite
            found = self._executor.measure(self._runs_of(chunks), math.inf)
        (total,) = over_ranks(comm, [squares or 0])
        return replace(
            ballot,
            power_sum=total if comm.rank == 0 else 0.0,
            first_nonfinite=found.first_nonfinite,
        )

    def _squares(self, chunks: Sequence[Chunk]) -> int | None:
        bins = []
        for chunk in chunks:
            gradient = chunk.gradient
            if gradient.offloaded_dtype is None or gradient.found is None:
                gradient_bins = bins_of(gradient.load())
            else:
                gradient_bins = gradient.found
            bins.append(gradient_bins)
        return integer_of(bins)

    def clip(self, clip: Clip, device: object) -> torch.Tensor | None:
        check_order(clip.norm_type)
        return super().clip(clip, None)


def _refuse_late() -> NoReturn:
    raise RuntimeError(
        "a gradient came after the others of its micro-batch were reduced. Weights and state are "
        "those of the last step: call zero_grad() to go on, and wrap with canonical=False what "
        "differs so from one backward to the next"
    )
