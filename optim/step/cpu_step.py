"""Executor of the host: its cores measure gradients and update blocks; see `Executor`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gemini.optim.rules.clipping import combined
from gemini.optim.rules.control_vector import ControlVector
from gemini.optim.update.cpu_update import StepInputs
from gemini.optim.update.updaters import CpuUpdater
from gemini.units import ParamId

from .executor import Executor
from .gradients import Bits, GradientRun, Measured, bits_of, checksum

if TYPE_CHECKING:
    from .executor import AnyUpdater
    from .executors import MatrixUpdates


@dataclass(frozen=True, slots=True)
class _Tiles:
    """Measures of some gradients: sum of |g|^p of each tile, first parameter that is not finite."""

    sums: list[float]
    first_nonfinite: ParamId | None
    bits: Sequence[Bits] = ()


class CpuStep(Executor):
    """Executor for gradients, state and counts in host memory."""

    def __init__(
        self,
        updater: CpuUpdater,
        num_counters: int,
        control_vector: ControlVector,
        rounding_seed: int | None = None,
        matrices: MatrixUpdates | None = None,
    ) -> None:
        self._updater, self.path = updater, updater.name
        self._matrices = matrices
        self.control_vector = control_vector
        self._rounding_seed = rounding_seed
        # Random bits go by an element's place in its parameter, so a piece has one parameter then;
        # and a matrix is its own.
        quantised = updater.rule.layout.is_quantised
        self.merges_parameters = rounding_seed is None and not quantised and matrices is None
        self.counts = torch.zeros(num_counters, dtype=torch.float32)

    # -- gradients --

    def measure(self, runs: Sequence[GradientRun], norm_type: float) -> Measured:
        sums: list[float] = []  # of tiles; the total is correctly rounded, in any order
        bits: list[Bits] = []
        for batch in _loadable(runs):
            found = batch[0].gradient.found if norm_type == 2 else None
            if found is None:
                found = self._tiles(batch, [run.gradient.load() for run in batch], norm_type)
            if found.first_nonfinite is not None:
                return Measured(math.nan, found.first_nonfinite)
            bits += found.bits
            if batch[0].counts:
                sums += found.sums
        return Measured(combined(sums, norm_type), None, checksum(bits))

    def measure_leaving(self, run: GradientRun, grad: Tensor) -> _Tiles:
        return self._tiles([run], [grad], 2.0)

    def _tiles(
        self, runs: Sequence[GradientRun], grads: Sequence[Tensor], norm_type: float
    ) -> _Tiles:
        found = self._updater.tile_sums(grads, norm_type)
        first = found.first_nonfinite
        if first is None:
            return _Tiles(found.sums, None, bits_of(runs, grads))
        return _Tiles([], _first_nonfinite(runs[first], grads[first]))

    def power_sum(self, grads: Sequence[Tensor], norm_type: float) -> Tensor:
        total = self._updater.grad_sum(grads, norm_type).power_sum
        return torch.tensor(total, dtype=torch.float64)

    # -- a step --

    def updater_of(
        self, inputs: StepInputs, hypers: Sequence[Any], active: Sequence[int]
    ) -> AnyUpdater:
        updater = replace(self._updater, inputs=inputs)
        if self._matrices is None:
            return updater
        from gemini.optim.matrices.sites import HostSite

        return self._matrices.updater(HostSite(updater), hypers, active)

    def close(self) -> None:
        self._updater.workers.close()


def _loadable(runs: Sequence[GradientRun]) -> list[list[GradientRun]]:
    """Batches of runs: two with gradients on the device, then one for each gradient elsewhere.

    Runs that this rank speaks for are apart from others, as only they count in sums.
    """
    here = [run for run in runs if run.gradient.shard is not None]
    batches = [[run for run in here if run.counts is counts] for counts in (True, False)]
    offloaded = [[run] for run in runs if run.gradient.shard is None]
    return [batch for batch in batches if batch] + offloaded


def _first_nonfinite(run: GradientRun, grad: Tensor) -> ParamId:
    for part in run.parts:
        if not bool(torch.isfinite(grad[part.offset : part.offset + part.numel]).all()):
            return ParamId(part.counter)
    raise AssertionError("a run has a gradient that is not finite outside its parameters")
