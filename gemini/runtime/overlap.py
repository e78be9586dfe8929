"""Overlap of updates with passes: what `update=` asked for, and what the rules leave of it."""

from __future__ import annotations

from dataclasses import replace

from gemini.comm.communicator import Communicator
from gemini.optim.rules.report import TailResult
from gemini.placement.plan import Plan
from gemini.placement.timetable.allowed import OverlapFacts, against, against_tail, allowed
from gemini.runtime.passes import Passes
from gemini.runtime.schedule.planning import Planning
from gemini.tickets import Ticket
from gemini.units import WORLD

from .weights import Weights


class UpdateOverlap:
    """When one engine updates blocks.

    asked: value of `update=`; see `gemini.placement.timetable.updates`.
    communicator: of all ranks, for tails, which vote while the loop's collectives run; None: steps
        end before they return.
    """

    def __init__(
        self,
        asked: str,
        communicator: Communicator | None,
        planning: Planning,
        weights: Weights,
        passes: Passes,
    ) -> None:
        self.asked, self.communicator = asked, communicator
        self._planning, self._weights, self._passes = planning, weights, passes

    @property
    def plan(self) -> Plan:
        """Plan of training, as it holds now."""
        return self._planning.plan

    @property
    def behind(self) -> Ticket[TailResult]:
        """Ticket of the last step that had a tail."""
        return self._weights.updating.behind

    def in_use(self) -> str:
        """Value of `update=` that runs; the same on all ranks."""
        return allowed(self.asked, self._facts())

    def against_tail(self) -> str | None:
        """Rule that is against a tail, the same on all ranks; None: none is."""
        return against_tail(self._facts())

    def against(self) -> str | None:
        """Rule that is against the `update=` that was asked for; None: none is."""
        return against(self.asked, self._facts())

    def _facts(self) -> OverlapFacts:
        target = self._weights.target
        return replace(
            self._planning.result.facts,
            is_gathered=self._weights.regather.is_needed,
            is_stage=self._passes.stage is not None,
            is_split=set(self._weights.sharding.links) != {WORLD},
            is_joint=target is not None and target.joint is not None,
            needs_wholes=target is not None and target.needs_wholes,
            has_masters=target is not None and target.has_master,
            by_kernels=target is not None and target.by_kernels,
        )
