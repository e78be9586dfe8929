"""Planner: a layout, a trace, budgets and bandwidths make a plan. Pure.

1. sizes of every shard and block; what every moment needs of the device
2. homes: the policy's, or by `auto` those with which an iteration is predicted to be shortest
3. gathers in the room that is left, and what follows: moves, memory, time
4. the plan is checked: it is consistent, and its peaks are within the budgets
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gemini.units import NUM_VERSIONS

from .draft import Draft, severity
from .plan import Plan
from .policy import AutoPlacement, Placement, StaticPlacement
from .problem import Homes
from .problem import PlanInputs as PlanInputs
from .result import PlanResult as PlanResult
from .sizes import UNLIMITED, BudgetError
from .tiers import Tier


def make_plan(inputs: PlanInputs, policy: Placement = AutoPlacement()) -> PlanResult:  # noqa: B008
    """Plan of one rank, with its memory and its time.

    Budgets are the numbers of `inputs`, whatever `policy` says of sizes. `auto` and `const` keep to
    them and raise BudgetError where they cannot; `static` places what its fractions say.
    """
    made: list[PlanResult] = []
    refused: list[BudgetError] = []
    for tier in _original_homes(inputs, policy):
        try:
            made.append(_planned(Draft(replace(inputs, original_home=tier), policy)))
        except BudgetError as error:
            refused.append(error.without_frames())
    if not made:
        raise min(refused, key=severity)
    return min(made, key=lambda planned: planned.cost.seconds) if len(made) > 1 else made[0]


def _original_homes(inputs: PlanInputs, policy: Placement) -> Sequence[Tier]:
    """Homes that originals of frozen chunks may have: files only where their memory is limited."""
    if inputs.original_home is not None:
        return [inputs.original_home]
    specs = inputs.layout.chunks
    has_originals = any(not specs[chunk].trainable for chunk in inputs.with_originals)
    limited = inputs.budgets.of(inputs.memory) < UNLIMITED
    if has_originals and limited and not isinstance(policy, StaticPlacement):
        return [inputs.memory, Tier.NVME]
    return [inputs.memory]


def plan_within(plan: Plan, inputs: PlanInputs, policy: Placement) -> PlanResult:
    """Plan in the homes of `plan` for another trace: evaluation, or inputs of another signature.

    Raises BudgetError where what the other trace needs does not fit with what lives there.
    """
    if plan.layout_digest != inputs.layout.digest():
        raise ValueError("a plan's homes hold for its own layout only; make a new plan")
    return _in_homes(_draft_in(plan, inputs, policy), _homes_of(plan))


def plan_above(plan: Plan, inputs: PlanInputs, policy: Placement) -> PlanResult:
    """Plan in the homes of `plan`, and in higher ones where this trace leaves more room.

    Nothing goes down but gradients: they have no home between steps, and stay in memory where their
    state does. Raises BudgetError where what is in memory already leaves no room for the trace.
    """
    floor = _homes_of(plan)
    for i, states in enumerate(floor.state):
        if set(states) <= {Tier.NVME}:
            floor.grad[i] = Tier.NVME
    inputs = replace(inputs, fixed_params=None)
    try:
        return _planned(_draft_in(plan, inputs, policy, floor))
    except BudgetError as error:
        # gradients that may go to files need buffers on their way, for which there may be no room
        error.without_frames()
        return plan_within(plan, inputs, policy)


def plan_below(
    plan: Plan, inputs: PlanInputs, policy: Placement, *, params_stay: bool
) -> PlanResult:
    """Plan in the homes of `plan`, and in lower ones where this trace leaves less room.

    Only gradients are promoted. Parameters go to files where the host has no room for them; but
    those whose state has more versions, and no masters, go to the host at most, as files have the
    last version alone. params_stay: none goes anywhere. Raises BudgetError where no homes leave
    room for the trace.
    """
    ceiling, state = _homes_of(plan), inputs.state
    keeps_versions = state.num_versions > NUM_VERSIONS and not state.has_master
    lowest: list[Tier] = []
    for home, chunk in zip(ceiling.param, inputs.layout.chunks, strict=True):
        least = inputs.memory if keeps_versions and chunk.trainable else Tier.NVME
        lowest.append(home if params_stay else max(home, least, key=_depth))
    floor = replace(
        ceiling,
        param=lowest,
        grad=[Tier.NVME for _ in lowest],
        state=[[Tier.NVME] * len(states) for states in ceiling.state],
    )
    inputs = replace(inputs, fixed_params=None)
    return _planned(_draft_in(plan, inputs, policy, floor, ceiling))


def plan_beside(
    found: PlanResult,
    inputs: PlanInputs,
    training: PlanInputs,
    policy: Placement,
    *,
    params_stay: bool,
) -> tuple[PlanResult, PlanResult]:
    """Plans of an evaluation and of training in the same homes: those of `found`, or lower ones.

    found: of the evaluation, which was made with `inputs`. It has no gradients, so the homes that
    it gives these may hold none. Raises BudgetError where no such homes hold both.
    """
    try:
        return found, plan_within(found.plan, training, policy)
    except BudgetError as error:
        error.without_frames()
    below = plan_below(found.plan, training, policy, params_stay=params_stay)
    return plan_within(below.plan, inputs, policy), below


def _depth(tier: Tier) -> int:
    return list(Tier).index(tier)


def plan_grown(plan: Plan, inputs: PlanInputs, policy: Placement) -> PlanResult:
    """Plan in the homes of `plan`, for a layout in which chunks are trained that were frozen.

    Their state goes to the highest tier that holds it, of those where state may live; a fraction of
    all state that must be on NVMe holds for them too. Raises BudgetError where none does.
    """
    sizes = inputs.chunks
    new = [i for i, chunk in enumerate(sizes) if chunk.trainable and not plan.chunks[i].trainable]
    tiers = [Tier.NVME]
    if inputs.nvme_state_frac < 1:
        tiers = (
            [Tier.DEVICE, Tier.HOST, Tier.NVME] if inputs.has_host_tier else [Tier.DEVICE, *tiers]
        )
    # one tier for all of it: what lives elsewhere already is not moved to make room
    homes = _homes_of(plan)
    for tier in tiers:
        for chunk in new:  # what is in a file may not be updated in memory
            home = Tier.NVME if homes.param[chunk] is Tier.NVME else tier
            homes.state[chunk] = [home] * len(sizes[chunk].blocks)
            homes.grad[chunk] = home
        try:
            return _in_homes(_draft_in(plan, inputs, policy), homes)
        except BudgetError:
            if tier is tiers[-1]:
                raise
    raise AssertionError("there is no tier")


def _draft_in(
    plan: Plan,
    inputs: PlanInputs,
    policy: Placement,
    floor: Homes | None = None,
    ceiling: Homes | None = None,
) -> Draft:
    """New draft; fp32 originals stay on the tier that `plan` gave them."""
    return Draft(
        replace(inputs, original_home=plan.original_home, floor=floor, ceiling=ceiling), policy
    )


def _in_homes(draft: Draft, homes: Homes) -> PlanResult:
    """Finish a plan in its homes. Raises BudgetError where what a moment needs does not fit."""
    for chunk in sorted(draft.never_released):
        homes.never_released[chunk] = True

    def within() -> tuple[float | None, Homes]:
        mine = homes.copy()
        if draft.lacks(mine) is not None:
            draft.give_up_cap()
        mine.saved = draft.saved_beside(mine)
        draft.keep(mine.saved)
        draft.check_room(mine)
        return 0.0 if mine.saved is None else None, mine

    homes = draft.best_number(within)
    planned = draft.finish(homes)
    over = draft.over_budget(planned.profile)
    if over is not None:
        raise over
    return planned


def _planned(draft: Draft) -> PlanResult:
    planned = draft.finish(draft.choose_homes())
    over = draft.over_budget(planned.profile)
    assert over is None, over
    return planned


def _homes_of(plan: Plan) -> Homes:
    return Homes(
        param=[shard.param_home for shard in plan.shards],
        grad=[shard.grad_home or Tier.DEVICE for shard in plan.shards],
        state=[list(shard.state_homes) for shard in plan.shards],
        never_released=[False for _ in plan.shards],
        device_staging=plan.device_staging,
        host_staging=plan.host_staging,
    )
