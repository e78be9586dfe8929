"""PlanResult: a plan with what its makers and its readers ask of it. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

from gemini.placement.timetable.allowed import OverlapFacts, against_early, against_tail
from gemini.placement.timetable.gathers import GatherSteps
from gemini.placement.timetable.updates import (
    BOTH,
    SERIAL,
    SPECULATE,
    TAIL,
    StepCost,
    best_update,
)

from .plan import Plan
from .predict import Profile
from .problem import PlanInputs


@dataclass(frozen=True)
class PlanResult:
    """Plan with its predicted profile, and its price for who asks."""

    plan: Plan
    profile: Profile
    steps: GatherSteps  # how its gathers are carried out
    facts: OverlapFacts  # by which updates may overlap a pass
    inputs: PlanInputs = field(compare=False)

    @property
    def against_tail(self) -> str | None:
        """Reason why no step may have a tail; None: it may."""
        return against_tail(self.facts)

    @property
    def facts_beside_kernels(self) -> OverlapFacts:
        """Facts with what a plan knows of updates: a device's kernels, where no host updates, of
        every element alike."""
        inputs = self.inputs
        has_masters = inputs.state.has_master
        return replace(self.facts, by_kernels=inputs.streams, has_masters=has_masters)

    @property
    def against_early(self) -> str | None:
        """Reason why no block may be updated in backward, as far as a plan knows it; None: some
        may."""
        return against_early(self.facts_beside_kernels)

    @cached_property
    def cost(self) -> StepCost:
        """An iteration whose step updates all."""
        return self._priced(SERIAL)

    @cached_property
    def overlapped(self) -> dict[str, StepCost]:
        """An iteration with each `update` that overlaps a pass, of those that may."""
        tail, early = self.against_tail is None, self.against_early is None
        may = {TAIL: tail, SPECULATE: early, BOTH: tail and early} if self._is_timed else {}
        return {update: self._priced(update) for update, is_allowed in may.items() if is_allowed}

    def _priced(self, update: str) -> StepCost:
        from gemini.placement.timetable.clock import Work, price

        return price(Work(self.plan, self.inputs), update)

    @property
    def _is_timed(self) -> bool:
        """Whether somebody has timed a pass."""
        inputs = self.inputs
        return self.plan.kind == "train" and any(inputs.compute_seconds()[: inputs.backward])

    @property
    def seconds_by_update(self) -> dict[str, float]:
        """Predicted seconds of an iteration, for every `update=` that has a price."""
        seconds = {update: cost.seconds for update, cost in self.overlapped.items()}
        return {SERIAL: self.cost.seconds, **seconds}

    @property
    def best_update(self) -> str:
        """The `update` that is predicted to be fastest; a tail, if it may be, where nobody has
        timed a pass, as for a policy of fractions."""
        is_priced = self._is_timed or self.against_tail is not None
        return best_update(self.seconds_by_update) if is_priced else TAIL
