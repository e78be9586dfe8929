"""Gradients measured by kernels, and blocks updated by torch's operators on the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gemini.optim.matrices.sites import DeviceSite, Site, SiteUpdater
from gemini.optim.rules.clipping import Clip
from gemini.optim.rules.control_vector import ControlVector
from gemini.optim.rules.report import Outcome
from gemini.optim.rules.rule import UpdateRule
from gemini.optim.state.memory import Memory
from gemini.optim.target import AmpInputs
from gemini.optim.update.cpu_update import StepInputs
from gemini.tickets import Done, Ticket

from .executor import AnyUpdater, step_counts
from .gradients import GradientRun
from .triton_step import TritonStep


class OperatorStep(TritonStep):
    """`TritonStep` for rules that need more than an element: the host counts, and knows what a step
    agrees on."""

    counts_on_host = True

    def __init__(
        self,
        rule: UpdateRule,
        group_of: Sequence[int | None],
        control_vector: ControlVector,
        memory: Memory,
        *,
        runs: Sequence[GradientRun] = (),
        names: Sequence[str] | None = None,
        rounding_seed: int | None = None,
    ) -> None:
        super().__init__(rule, group_of, control_vector, memory, runs=runs, names=names)
        self._rule = rule
        self._rounding_seed = rounding_seed
        self._used_scale = 1.0  # of the step that was begun last

    @property
    def path(self) -> str:
        return "torch"

    def updater_at(self, site: Site, hypers: Sequence[Any], active: Sequence[int]) -> AnyUpdater:
        """Of a step of the parameters that are `active`."""
        return SiteUpdater(site, self._rule)

    def next_steps(self) -> Sequence[int]:
        return [count + 1 for count in step_counts(self)]

    def begin(
        self, hypers: Sequence[Any], active: Sequence[int], power_sum: float, clip: Clip
    ) -> AnyUpdater:
        scale = self.control_vector.read().scale
        inputs = StepInputs.clipping(clip, power_sum, scale, self._rounding_seed)
        return self._begun(scale, inputs, hypers, active)

    def skips(self, amp: AmpInputs) -> bool:
        return amp.found_inf is not None and bool(amp.found_inf > 0)

    def begin_amp(
        self,
        hypers: Sequence[Any],
        active: Sequence[int],
        amp: AmpInputs | None,
        *,
        may_fail: bool,
    ) -> AnyUpdater:
        given = None if amp is None else amp.grad_scale
        scale = 1.0 if given is None else float(given)
        inputs = StepInputs(1.0 / scale, rounding_seed=self._rounding_seed)
        return self._begun(scale, inputs, hypers, active)

    def _begun(
        self, scale: float, inputs: StepInputs, hypers: Sequence[Any], active: Sequence[int]
    ) -> AnyUpdater:
        self._used_scale = scale
        self.staging.begin()
        return self.updater_at(DeviceSite(self._memory, self.staging, inputs), hypers, active)

    def outcome(self) -> Ticket[Outcome]:
        return Done(Outcome(loss_scale=self._used_scale))

    def count(self, active: Sequence[int]) -> None:
        self.counts[list(active)] += 1

    def undo(self) -> None:
        """Nothing was counted yet."""
