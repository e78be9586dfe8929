"""Plans of iterations in the present homes: one for each kind, signature and bytes that wait.

Beside the plan of training, for which homes were chosen. Gathers of an iteration follow its own.
"""

from __future__ import annotations

from dataclasses import dataclass

from gemini.memtracer.forecast import covers
from gemini.memtracer.trace import Kind, Trace
from gemini.placement.planner import PlanInputs, PlanResult
from gemini.placement.sizes import BudgetError

MAX_PLANS = 32


@dataclass(frozen=True, slots=True)
class Lowered:
    """Homes that leave an iteration the room that it asks for, or as much as any do."""

    inputs: PlanInputs
    result: PlanResult
    refused: BudgetError | None  # with all bytes that it lacks; None: it fits
    training: PlanResult | None = None  # in these homes, where the iteration is none of it


@dataclass(frozen=True, slots=True)
class IterationPlan:
    """Plan of one iteration in the present homes, and the trace that it was made with."""

    trace: Trace
    result: PlanResult | None  # None: it lacks no more than measurements may be wrong by
    lacks: bool = False  # it fits in no homes, and this is a plan of one that asks for less

    def holds(self, trace: Trace, noise_bytes: int) -> bool:
        """Whether it is made with this trace, or with a bound of it that is no measurement."""
        return self.trace is trace or (not self.lacks and covers(self.trace, trace, noise_bytes))


class IterationPlans(dict[tuple[Kind, str, int], IterationPlan]):
    """Plans by kind, signature, and bytes of gradients that wait as it begins.

    At most `MAX_PLANS`: the one that was not used the longest leaves.
    """

    def find(self, kind: Kind, signature: str, waiting_bytes: int) -> IterationPlan | None:
        """Plan of such an iteration, which is the last used from now on; None: there is none."""
        found = self.pop((kind, signature, waiting_bytes), None)
        if found is not None:
            self[kind, signature, waiting_bytes] = found
        return found

    def keep(self, planned: IterationPlan, waiting_bytes: int) -> None:
        """Keep a plan until homes change, or so many others were used since.

        It takes the place of an older one of the same kind, signature and bytes.
        """
        key = planned.trace.kind, planned.trace.signature, waiting_bytes
        self.pop(key, None)
        self[key] = planned
        if len(self) > MAX_PLANS:
            del self[next(iter(self))]
