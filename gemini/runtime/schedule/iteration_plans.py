"""Plans of iterations in the present homes: one for each kind, signature and bytes that wait.

Beside the plan of training, for which homes were chosen. Gathers of an iteration follow its own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from gemini.memtracer.forecast import covers, with_bytes_added
from gemini.memtracer.trace import Kind, Trace
from gemini.placement.plan import Plan
from gemini.placement.planner import PlanInputs, PlanResult, plan_below, plan_beside, plan_within
from gemini.placement.policy import Placement
from gemini.placement.predict import predict
from gemini.placement.sizes import BudgetError
from gemini.placement.tiers import Tier

MAX_PLANS = 32
_MAX_TRIES = 8  # to find the lowest homes, where an iteration fits in none


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
    result: PlanResult | None  # None: there is none, and it may lack no more than noise
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


def lowered(
    plan: Plan, inputs: PlanInputs, training: PlanInputs, policy: Placement, *, params_stay: bool
) -> Lowered | None:
    """Homes at or below those of `plan` where the iteration of `inputs` fits, or lacks least.

    training: inputs of training, which has the same homes. None: no homes were found.
    """
    asked = inputs.trace

    def below(trace: Trace) -> Lowered:
        its = replace(inputs, trace=trace)
        also: PlanResult | None = None
        found = plan_below(plan, its, policy, params_stay=params_stay)
        if trace.kind != "train":
            found, also = plan_beside(found, its, training, policy, params_stay=params_stay)
        return Lowered(its, found, None, also)

    refused: BudgetError | None = None
    missing = 0
    for attempt in range(_MAX_TRIES):
        try:
            found = below(with_bytes_added(asked, -missing))
        except BudgetError as error:
            if refused is None:
                refused = error.without_frames()
                if asked.kind == "train":  # else it may be training, beside it, that lacks
                    asked = inputs.recomputing(error.recomputed).trace
            # of the host too: what it has no room for stays on the device
            missing += error.missing_bytes << max(0, attempt - _MAX_TRIES // 2)
        else:
            break
    else:
        return None
    if refused is None:
        return found
    # Less at all moments leaves room where the iteration lacks it. So homes, and then what gathers
    # keep in them, are of one that asks at every moment for all that the lowest homes leave.
    some_leave = ({"gradients"}, set[str]())  # the host may have no room for what goes there
    for leave in some_leave if params_stay else ({"parameters", "gradients"}, *some_leave):
        lowest = _tried(below, with_bytes_added(asked, _less(found, asked, leave)))
        if lowest is not None:
            found = lowest
            break
    here, less = found, _less(found, asked, ())

    def within(trace: Trace) -> Lowered:
        its = replace(inputs, trace=trace)
        return Lowered(its, plan_within(here.result.plan, its, policy), None, here.training)

    assert refused.tier is not None
    return replace(
        _tried(within, with_bytes_added(asked, less)) or here,
        refused=BudgetError.missing(
            refused.tier, -min(less), refused.budget_bytes, refused.what, refused.knob
        ),
    )


def _tried(lower: Callable[[Trace], Lowered], trace: Trace) -> Lowered | None:
    """What `lower` makes of a trace, or of one that asks for as much less as buffers take that
    lower homes need; None: nothing."""
    for _ in range(2):
        try:
            return lower(trace)
        except BudgetError as error:
            error.without_frames()
            trace = with_bytes_added(trace, -error.missing_bytes)
    return None


def _less(found: Lowered, asked: Trace, leave: Collection[str]) -> Sequence[int]:
    """Bytes, none above 0, that an iteration may add to what it asks for at every moment, to fit
    in the homes of `found` with no more gathered than its calls need.

    leave: kinds of which nothing stays there beyond what moments need, but in other homes.
    """
    plan, end = found.result.plan, found.result.plan.num_trace_moments
    stays = [shard.in_payload and "parameters" not in leave for shard in plan.shards]
    released = tuple(replace(shard, never_released=False) for shard in plan.shards)
    bare = replace(plan, gathers=(), shards=released)
    room = None if plan.saved is None else plan.saved.room_bytes
    total = predict(bare, asked.non_model_within(room)).total(Tier.DEVICE)
    for chunk, shard in zip(plan.chunks, plan.shards, strict=True):
        if shard.param_home is Tier.DEVICE and "parameters" in leave:
            nbytes = chunk.payload_bytes if shard.in_payload else chunk.shard_bytes
            total = [there - nbytes for there in total]
    for reduction in plan.forecast.reductions if "gradients" in leave else ():
        reduced = plan.chunks[reduction.chunk]
        if plan.shards[reduction.chunk].grad_home is Tier.DEVICE:
            for moment in range(reduction.end + 2 * (reduced.num_shards > 1), len(total)):
                total[moment] -= reduced.shard_bytes
    for moment, chunks in enumerate(asked.chunk_needs(found.inputs.layout.chunk_of())):
        total[moment] += sum(plan.chunks[c].payload_bytes for c in chunks if not stays[c])
    total[end - 1] = max(total[end - 1 :])  # the step asks for what the last moment does
    return [min(0, plan.budgets.device - nbytes) for nbytes in total[:end]]
