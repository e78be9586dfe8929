"""First plans: of blocks as small as they must be, and before anything was measured. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace

from gemini.chunk.layout import ChunkLayout, ChunkSpec
from gemini.memtracer.forecast import without_saved
from gemini.optim.rules.state_layout import ALL_COLUMNS, WEIGHT_DTYPE, Columns, StateLayout
from gemini.placement.homes.budgets import given_budgets
from gemini.placement.plan import Plan
from gemini.placement.planner import PlanInputs, PlanResult, make_plan, plan_within
from gemini.placement.policy import AutoPlacement, Placement, has_budgets, spills
from gemini.placement.problem import DEVICE_BUFFERS
from gemini.placement.saved import Spilling
from gemini.placement.sizes import (
    FP32_BYTES,
    NOT_WAITING,
    UNLIMITED,
    BudgetError,
    StateBytes,
    Waiting,
    with_sums,
)
from gemini.placement.tiers import Tier
from gemini.placement.timetable.allowed import buffers_ahead
from gemini.placement.timetable.steps import MAX_UNDER_WAY
from gemini.placement.timetable.updates import is_early
from gemini.units import (
    BLOCK_NUMEL,
    MIN_BLOCK_NUMEL,
    NUM_VERSIONS,
    STREAMED_BLOCK_NUMEL,
    Bytes,
    ChunkId,
)

# Before an optimizer says what it keeps: no rule of `optim` keeps more than Adam
ASSUMED_STATE_BYTES = 8
_STAGING_SHARE = 32  # staging of large blocks is at most one part in so many of a device's budget
_MOST_BLOCKS = 1024  # each of them costs the host 20 us a step, and the planner as long
_MAX_TRIES = 8


def block_sizes(policy: Placement, inputs: PlanInputs) -> tuple[int, int]:
    """Most and least elements of a block."""
    wanted = policy.block_numel if isinstance(policy, AutoPlacement) else None
    return (usual_block_numel(inputs), MIN_BLOCK_NUMEL) if wanted is None else (wanted, wanted)


def usual_block_numel(inputs: PlanInputs) -> int:
    """Elements of a block, where nobody says; `fit` makes it smaller where it must.

    Large where a device's kernels update what travels there, as far as the budget has room for
    staging: 2^20 elements of Adam with a master take 0.25 ms over PCIe each way, and the host up to
    0.2 ms to begin them, so it would be the host that sets the pace.
    """
    staging = DEVICE_BUFFERS * STREAMED_BLOCK_NUMEL * inputs.state.per_element
    if inputs.streams and _STAGING_SHARE * staging <= inputs.budgets.device:
        return STREAMED_BLOCK_NUMEL
    return BLOCK_NUMEL


def few_blocks_numel(layout: ChunkLayout) -> int:
    """Elements of the smallest blocks that a rank has few of."""
    numel = sum(chunk.shard_numel for chunk in layout.chunks if chunk.trainable)
    return min(BLOCK_NUMEL, max(MIN_BLOCK_NUMEL, 1 << (numel // _MOST_BLOCKS).bit_length()))


def may_split(layout: ChunkLayout) -> frozenset[ChunkId]:
    """Chunks whose masters an optimizer may split."""
    return frozenset(chunk.id for chunk in layout.chunks if chunk.dtype == WEIGHT_DTYPE)


def assumed_state(layout: ChunkLayout, *, master_weights: bool = True) -> StateBytes:
    """State of the optimizer that is yet to come. master_weights: of `PrecisionPolicy`.

    Files and staging may be larger for masters that may be split: planes and weights are whole
    pages.
    """
    has_master = master_weights and any(chunk.dtype != "float32" for chunk in layout.chunks)
    split = may_split(layout) if has_master else frozenset[ChunkId]()
    nbytes = ASSUMED_STATE_BYTES + (FP32_BYTES if has_master else 0)
    return StateBytes(nbytes, has_master, split_on_disk=split)


def optimizer_state(
    layout: StateLayout,
    chunks: Iterable[ChunkSpec],
    *,
    in_files: Collection[ChunkId],
    in_payloads: Collection[ChunkId],
    num_versions: int = NUM_VERSIONS,
    columns: Columns = ALL_COLUMNS,
) -> StateBytes:
    """Bytes of an optimizer's state, with the chunks whose masters are split (ADR 0002).

    Masters on disk are split if the shard is in memory when its block is updated; files stay as
    they were made. Masters in memory are split if what a user writes goes to another memory, the
    payload: finding the elements that were written takes the weights of before, and on disk each
    version has its own. in_files, in_payloads: chunks whose shards live there.
    """
    split = [chunk.id for chunk in chunks if layout.splits(chunk.dtype)]
    return StateBytes(
        layout.bytes_per_element, layout.has_master,
        frozenset(i for i in split if i not in in_files),
        frozenset(i for i in split if i not in in_payloads),
        num_versions, columns, layout if columns.of_param else None,
    )  # fmt: skip


def first_inputs(
    inputs: PlanInputs, policy: Placement, *, update: str, canonical: bool = False
) -> PlanInputs:
    """Inputs of a run's first plan, with what follows from its policy and its `update`: whether
    activations may leave the device, the most elements of a block, buffers for blocks that are
    updated after their step. canonical: gradients have fp32 sums."""
    num_ahead = buffers_ahead(
        update, has_masters=inputs.state.has_master, has_budgets=has_budgets(policy),
        streams=inputs.streams,
    )  # fmt: skip
    inputs = replace(inputs, num_ahead=num_ahead, brings_params=is_early(update))
    if canonical:
        inputs = replace(inputs, budgets=with_sums(inputs.budgets, inputs.layout, MAX_UNDER_WAY))
    limited = inputs.budgets.device < UNLIMITED
    if not (spills(policy) and limited):
        inputs = replace(inputs, trace=without_saved(inputs.trace))
    elif inputs.has_host_tier or policy.has_files:
        spilling = Spilling.within(inputs.budgets.device, has_files=policy.has_files)
        inputs = replace(inputs, spilling=spilling)
    return replace(inputs, block_numel=block_sizes(policy, inputs)[0])


def assume(inputs: PlanInputs, policy: Placement) -> PlanInputs:
    """Inputs with the share of the device that the policy leaves to activations nobody has
    measured.

    Where no budget is given and the model fits twice into the device, nothing is assumed, so that
    nothing leaves the device for them.
    """
    nbytes = 0
    if isinstance(policy, AutoPlacement):
        device = inputs.budgets.device
        given = given_budgets(policy, has_host_tier=inputs.has_host_tier).device < UNLIMITED
        if given or 2 * _model_bytes(inputs) > device:
            nbytes = round(device * policy.warmup_non_model_data_ratio)
    return _assuming(inputs, nbytes)


def _model_bytes(inputs: PlanInputs) -> int:
    """Bytes of parameters, gradients, state, originals and averages of one rank."""
    return sum(nbytes for _, nbytes in inputs.average) + sum(
        chunk.shard_bytes * (1 + chunk.trainable) + chunk.state_bytes + chunk.original_bytes
        for chunk in inputs.chunks
    )


def fit(
    inputs: PlanInputs,
    policy: Placement,
    *,
    is_measured: bool,
    least_block_numel: int | None = None,
) -> tuple[PlanInputs, PlanResult]:
    """Make a plan. Returns it after the inputs it was made with in the end.

    Blocks are those of `inputs`, or smaller where the budget asks for it, down to
    `least_block_numel`, by default the policy's. Activations are measured or assumed. An assumption
    refuses nothing: where it leaves model data no room, activations get what the lowest homes can
    leave them. It gives way before there are more than `_MOST_BLOCKS` blocks. Raises BudgetError
    where the model does not fit (under an assumption: without any activations), with the bytes that
    it then lacks.
    """
    if not is_measured and isinstance(policy, AutoPlacement):
        policy = replace(policy, steady_cap_ratio=1.0)  # the assumption is margin enough
    least = block_sizes(policy, inputs)[1] if least_block_numel is None else least_block_numel
    few = few_blocks_numel(inputs.layout)
    while True:
        try:
            return inputs, make_plan(inputs, policy)
        except BudgetError as error:
            refused, is_least = error, inputs.block_numel <= least
        if is_measured and is_least:
            raise refused
        if not is_measured and (is_least or inputs.block_numel <= few):
            try:
                return _fit_assuming_less(inputs, policy, refused)
            except BudgetError:
                if is_least:
                    raise
        # staging is buffers of a block: a quarter of a block frees three quarters of them
        inputs = replace(inputs, block_numel=max(least, inputs.block_numel // 4))


Fitted = tuple[PlanInputs, PlanResult]


def fit_within(plan: Plan, inputs: PlanInputs, policy: Placement, *, is_measured: bool) -> Fitted:
    """Plan in the homes of `plan`. Assumed activations give way by the bytes that are missing."""
    try:
        return inputs, plan_within(plan, inputs, policy)
    except BudgetError as error:
        if is_measured or error.tier is not Tier.DEVICE:
            raise
        assumed = max(0, inputs.trace.peak_non_model_bytes - error.missing_bytes)
    less = _assuming(inputs, assumed)
    return less, plan_within(plan, less, policy)


def with_ahead(fitted: Callable[[int], Fitted], num_ahead: int) -> Fitted:
    """Plan of `fitted` with `num_ahead` more buffers, for blocks that are updated after their
    step: only where they cost no smaller blocks, and nothing of what activations are assumed to
    take."""
    without = fitted(0)
    if not num_ahead:
        return without
    try:
        more = fitted(num_ahead)
    except BudgetError:
        return without
    return more if more[0] == replace(without[0], num_ahead=num_ahead) else without


def fit_ahead(
    inputs: PlanInputs,
    policy: Placement,
    num_ahead: int,
    *,
    is_measured: bool,
    least_block_numel: int | None = None,
) -> Fitted:
    """`fit` with as many more buffers, if `with_ahead` has room for them."""

    def fitted(extra_buffers: int) -> Fitted:
        more = replace(inputs, num_ahead=extra_buffers)
        return fit(more, policy, is_measured=is_measured, least_block_numel=least_block_numel)

    return with_ahead(fitted, num_ahead)


@dataclass(frozen=True, slots=True)
class StateRequest:
    """Request of an optimizer for its state."""

    state: StateBytes
    nvme_frac: float  # of its bytes, at least, on NVMe
    block_numel: int | None  # a wish; None: there is none
    depth: int
    waiting: Waiting = NOT_WAITING

    def blocks(self, policy: Placement, inputs: PlanInputs, planned: PlanResult) -> tuple[int, int]:
        """Most and least elements of a block.

        Files of parameters stay as they were cut (ADR 0002). Raises ValueError for a wish that is
        not what the policy says.
        """
        wish = self.block_numel
        most, least = block_sizes(policy, replace(inputs, state=self.state))
        if most == least and wish not in (None, most):
            raise ValueError(
                f"NvmeConfig(block_numel={wish}) beside "
                f"AutoPlacement(block_numel={most}), with which the module was wrapped; expected "
                "one of the two"
            )
        if any(shard.param_home is Tier.NVME for shard in planned.plan.shards):
            return inputs.block_numel, inputs.block_numel
        return (most, least) if wish is None else (wish, wish)

    def inputs(self, inputs: PlanInputs, planned: PlanResult, block_numel: int) -> PlanInputs:
        """Inputs of a plan with this state, where parameters live as `planned` has them."""
        return replace(
            inputs,
            state=self.state,
            nvme_state_frac=self.nvme_frac,
            block_numel=block_numel,
            depth=self.depth,
            waiting=self.waiting,
            fixed_params=tuple(shard.param_home for shard in planned.plan.shards),
            original_home=planned.plan.original_home,
        )


def fit_request(
    now: Fitted,
    policy: Placement,
    request: StateRequest,
    num_ahead: int,
    *,
    is_measured: bool,
    least_block_numel: int = 0,
) -> Fitted:
    """Make a plan with an optimizer's state, parameters where they are `now`.

    num_ahead: buffers that were asked for; without masters none is of use. least_block_numel: of a
    block, where the request has no more. Raises BudgetError for a state that does not fit so.
    """

    def fitted(extra_buffers: int) -> Fitted:
        inputs, planned = replace(now[0], num_ahead=extra_buffers), now[1]
        most, least = request.blocks(policy, inputs, planned)
        return fit(
            request.inputs(inputs, planned, most), policy, is_measured=is_measured,
            least_block_numel=max(least, least_block_numel),
        )  # fmt: skip

    return with_ahead(fitted, num_ahead if request.state.has_master else 0)


def fit_state(
    begun: tuple[PlanInputs, bool],
    now: Fitted,
    policy: Placement,
    request: StateRequest,
    num_ahead: int = 0,
    *,
    is_measured: bool,
) -> Fitted:
    """Plan of `fit_request`, or the bytes that would do.

    begun: the inputs that the module was wrapped with, and whether they were measured. Raises
    BudgetError with the bytes that would do for the module and its optimizer: with more room,
    parameters have other homes too.
    """
    first, was_measured = begun
    try:
        return fit_request(now, policy, request, num_ahead, is_measured=is_measured)
    except BudgetError as error:
        refused = last = error
    # The user would raise a budget and wrap the module again, which may choose other homes for its
    # parameters: so the bytes to name are those of a run from the start, not those missing now.
    budgets = first.budgets
    for _ in range(_MAX_TRIES):
        assert last.tier is not None
        budgets = budgets.with_more(last.tier, last.missing_bytes)
        inputs = replace(first, budgets=budgets)
        inputs = inputs if was_measured else assume(inputs, policy)
        try:
            wrapped = fit(inputs, policy, is_measured=was_measured)
            fit_request(wrapped, policy, request, 0, is_measured=was_measured)
            break
        except BudgetError as error:
            last = error
    assert refused.tier is not None
    missing = budgets.of(refused.tier) - first.budgets.of(refused.tier)
    raise BudgetError.missing(
        refused.tier, missing, refused.budget_bytes, refused.what, refused.knob
    )


def _fit_assuming_less(
    inputs: PlanInputs, policy: Placement, refused: BudgetError
) -> tuple[PlanInputs, PlanResult]:
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
    """Inputs whose trace has `nbytes` of non-model data at every moment."""
    moments = tuple(
        replace(m, non_model_bytes=Bytes(nbytes), saved_bytes=0) for m in inputs.trace.moments
    )
    return replace(inputs, trace=replace(inputs.trace, moments=moments))
