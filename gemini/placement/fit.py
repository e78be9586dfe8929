"""First plans: of blocks as small as they must be, and before anything was measured. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from gemini.placement.planner import PlanInputs, Planned, make_plan
from gemini.placement.policy import AutoPlacement, Placement
from gemini.placement.sizes import UNLIMITED, BudgetError, StateBytes
from gemini.placement.tiers import Tier
from gemini.units import Bytes

MIN_BLOCK_NUMEL = 1024  # of `NvmeConfig`
_MAX_TRIES = 8


def assume(inputs: PlanInputs, policy: Placement) -> PlanInputs:
    """With what the policy leaves to activations that nobody has measured."""
    nbytes = 0
    if isinstance(policy, AutoPlacement) and inputs.budgets.device < UNLIMITED:
        nbytes = round(inputs.budgets.device * policy.warmup_non_model_data_ratio)
    return _assuming(inputs, nbytes)


def fit(
    inputs: PlanInputs, policy: Placement, *, is_measured: bool, least_block_numel: int
) -> tuple[PlanInputs, Planned]:
    """A plan, and the inputs it was made with in the end.

    Blocks are those of `inputs`, or as much smaller as they must be. What activations take is
    either measured, or an assumption, which refuses nothing: where it leaves model data no room,
    activations are left as much as the lowest homes can leave them. Raises BudgetError where the
    model does not fit, of an assumption: without any activations; and with what it then lacks.
    """
    if not is_measured and isinstance(policy, AutoPlacement):
        policy = replace(policy, steady_cap_ratio=1.0)  # the assumption is margin enough
    while True:
        try:
            return inputs, make_plan(inputs, policy)
        except BudgetError as error:
            if inputs.block_numel <= least_block_numel:
                if is_measured:
                    raise
                return _fit_assuming_less(inputs, policy, error)
        inputs = replace(inputs, block_numel=max(least_block_numel, inputs.block_numel // 4))


@dataclass(frozen=True, slots=True)
class StateRequest:
    """What an optimizer asks for."""

    state: StateBytes
    nvme_frac: float  # of its bytes, at least, on NVMe
    block_numel: int  # at most
    least_block_numel: int
    depth: int

    def inputs(self, inputs: PlanInputs, planned: Planned) -> PlanInputs:
        """What there is to plan with, where parameters live as `planned` has them."""
        return replace(
            inputs,
            state=self.state,
            nvme_state_frac=self.nvme_frac,
            block_numel=self.block_numel,
            depth=self.depth,
            fixed_params=tuple(shard.param_home for shard in planned.plan.shards),
        )


def fit_state(
    begun: tuple[PlanInputs, bool],
    now: tuple[PlanInputs, Planned],
    policy: Placement,
    request: StateRequest,
    *,
    is_measured: bool,
) -> tuple[PlanInputs, Planned]:
    """A plan with an optimizer's state, parameters where they are `now`.

    `begun`: the inputs that the module was wrapped with, and whether they were measured. Raises
    BudgetError with what would do for the module and its optimizer: with more room, parameters have
    other homes too.
    """
    first, was_measured = begun
    try:
        return _fit_request(now, policy, request, is_measured)
    except BudgetError as error:
        refused = last = error
    budgets = first.budgets
    for _ in range(_MAX_TRIES):
        assert last.tier is not None
        budgets = budgets.with_more(last.tier, last.missing_bytes)
        inputs = replace(first, budgets=budgets)
        inputs = inputs if was_measured else assume(inputs, policy)
        try:
            wrapped = fit(
                inputs, policy, is_measured=was_measured, least_block_numel=MIN_BLOCK_NUMEL
            )
            _fit_request(wrapped, policy, request, was_measured)
            break
        except BudgetError as error:
            last = error
    assert refused.tier is not None
    missing = budgets.of(refused.tier) - first.budgets.of(refused.tier)
    raise BudgetError.missing(
        refused.tier, missing, refused.budget_bytes, refused.what, refused.knob
    )


def _fit_request(
    now: tuple[PlanInputs, Planned], policy: Placement, request: StateRequest, is_measured: bool
) -> tuple[PlanInputs, Planned]:
    return fit(
        request.inputs(*now),
        policy,
        is_measured=is_measured,
        least_block_numel=request.least_block_numel,
    )


def _fit_assuming_less(
    inputs: PlanInputs, policy: Placement, refused: BudgetError
) -> tuple[PlanInputs, Planned]:
    nothing = _assuming(inputs, 0)
    planned = make_plan(nothing, policy)
    assumed: int = inputs.trace.peak_non_model_bytes
    for _ in range(_MAX_TRIES):
        on_device = refused.tier is Tier.DEVICE
        assumed = assumed - refused.missing_bytes if on_device else assumed // 2
        if assumed <= 0:
            break
        less = _assuming(inputs, assumed)
        try:
            return less, make_plan(less, policy)
        except BudgetError as error:
            refused = error
    return nothing, planned


def _assuming(inputs: PlanInputs, nbytes: int) -> PlanInputs:
    """The same, with so many bytes beside model data at every moment."""
    moments = tuple(replace(m, non_model_bytes=Bytes(nbytes)) for m in inputs.trace.moments)
    return replace(inputs, trace=replace(inputs.trace, moments=moments))
