"""Inputs of the planner, measured and agreed on by all ranks, and the plans made from them."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

from gemini.chunk.layout import ChunkLayout
from gemini.memtracer.trace import (
    ASSUMED_SIGNATURE,
    Kind,
    Trace,
    TraceError,
    reduce_traces,
    sequential_trace,
)
from gemini.optim.rules.state_layout import WEIGHT_DTYPE
from gemini.placement.fit import (
    Fitted,
    StateRequest,
    assume,
    assumed_state,
    block_sizes,
    fit,
    fit_state,
    fit_within,
    usual_speeds,
    with_ahead,
)
from gemini.placement.homes.budgets import Machine, in_words_of, resolve
from gemini.placement.overruns import BudgetWarning, Overruns, user_stacklevel
from gemini.placement.plan import Plan, UpdatePath
from gemini.placement.planner import PlanInputs, PlanResult, plan_above, plan_grown, plan_within
from gemini.placement.policy import (
    AutoPlacement,
    ConstPlacement,
    Placement,
    StaticPlacement,
    has_budgets,
    never_released,
)
from gemini.placement.sizes import (
    UNLIMITED,
    BudgetError,
    Budgets,
    least_bandwidths,
    least_budgets,
    wider_chunks,
)
from gemini.placement.tiers import Tier
from gemini.placement.timetable.allowed import buffers_ahead
from gemini.placement.timetable.gathers import GatherSteps, told_apart
from gemini.runtime.comm.communicator import Communicator
from gemini.runtime.memory.backend import Backend
from gemini.runtime.memory.machine import look_at_machine, ranks_here
from gemini.units import ChunkId

log = logging.getLogger("gemini")


@dataclass(slots=True)
class Planning:
    """Plans of one engine, and their inputs, which are the same on all ranks.

    Planning is collective: ranks compare their plans.
    """

    comm: Communicator
    policy: Placement
    inputs: PlanInputs
    has_trace: bool  # else non-model data is an assumption
    machine: Machine = field(default_factory=Machine)
    # inputs at wrapping, and whether they were measured
    _begun: tuple[PlanInputs, bool] = field(init=False)
    # cache of `payload_room_bytes`, with the plan and the inputs that it was computed from
    _room: tuple[PlanResult, PlanInputs, int] | None = field(default=None, init=False)
    homes_are_final: bool = field(init=False)  # chosen for a trace, or asked to rise
    result: PlanResult = field(init=False)  # of training
    overruns: Overruns = field(init=False)  # of the budgets
    _num_ahead: int = field(init=False)  # buffers asked for; `inputs` has what there is room for
    _refusals: set[str] = field(default_factory=set)  # iterations that did not fit once
    _doubtful: bool = False
    # plans of evaluation, and of training with inputs of other signatures, in the same homes
    others: dict[tuple[Kind, str], PlanResult] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.homes_are_final = self.has_trace
        self.overruns = Overruns(self.policy, self.inputs.budgets)
        begun, self._num_ahead = self.inputs, self.inputs.num_ahead

        def fitted(num_ahead: int) -> Fitted:
            wanted = replace(begun, num_ahead=num_ahead)
            return fit(wanted, self.policy, is_measured=self.has_trace)

        self._take(lambda: with_ahead(fitted, self._num_ahead))
        self._begun = replace(begun, num_ahead=self.inputs.num_ahead), self.has_trace

    @property
    def plan(self) -> Plan:
        return self.result.plan

    @property
    def never_released(self) -> frozenset[ChunkId]:
        """Chunks that are never released, by the policy. A plan may keep others while it holds."""
        return never_released(self.policy, [c.payload_bytes for c in self.inputs.layout.chunks])

    @property
    def nvme_folder(self) -> str | None:
        return self.policy.nvme_dir if isinstance(self.policy, AutoPlacement) else None

    def _take(self, fitted: Callable[[], tuple[PlanInputs, PlanResult]]) -> None:
        """Use the inputs and the plan that `fitted` makes, and compare plans over ranks.

        Raises BudgetError on every rank, or on none, and then nothing has changed.
        """
        try:
            self.inputs, self.result = fitted()
        except BudgetError as error:
            raise in_words_of(self.policy, self.machine, error) from None
        self.others.clear()
        self._compare(self.plan)

    def _compare(self, plan: Plan) -> None:
        digests = self.comm.gather_objects(plan.digest())
        if len(set(digests)) > 1:
            raise AssertionError(f"ranks made different plans from the same inputs: {digests}")

    def with_state(self, request: StateRequest) -> None:
        """Plan an optimizer's state. Parameter shards stay where they are.

        Blocks have the size that files were cut with; without files `block_numel` is a wish (ADR
        0002).
        Raises BudgetError, and ValueError for a wish that is not the policy's; then nothing has
        changed.
        """

        def fitted(num_ahead: int) -> Fitted:
            now = replace(self.inputs, num_ahead=num_ahead), self.result
            return fit_state(self._begun, now, self.policy, request, is_measured=self.has_trace)

        num_ahead = self._num_ahead if request.state.has_master else 0
        self._take(lambda: with_ahead(fitted, num_ahead))

    def keep_originals(self, chunks: Collection[ChunkId]) -> None:
        """Plan originals for `chunks`, which were rounded on this rank.

        Collective: a chunk that any rank names has an original. Parameters stay where the plan has
        them.
        """
        before = self.inputs.with_originals
        if all(self.inputs.layout.chunks[chunk].trainable for chunk in before):
            return  # masters take the place of these
        kept = frozenset[ChunkId]().union(*self.comm.gather_objects(frozenset(chunks)))
        if kept == before:
            return
        begun, was_measured = self._begun
        self._begun = replace(begun, with_originals=kept), was_measured
        self.inputs = replace(self.inputs, with_originals=kept)
        self.result = plan_within(self.plan, self.inputs, self.policy)
        self._compare(self.plan)

    def keep_averages(self, average: tuple[tuple[Tier, int], ...]) -> None:
        """Plan with averages of weights: `average` has the bytes of all of them by tier.

        Collective. Raises BudgetError where they do not fit, and then nothing has changed.
        """
        wanted = replace(self.inputs, average=average)
        self._take(lambda: fit_within(self.plan, wanted, self.policy, is_measured=self.has_trace))
        begun, was_measured = self._begun
        self._begun = replace(begun, average=average), was_measured

    @property
    def block_numel(self) -> int:
        """Elements of a block, of parameters, gradients and state."""
        return self.inputs.block_numel

    def follow(self, trace: Trace) -> bool:
        """Plan a measured iteration in the present homes; returns whether plans changed.

        A plan made with a trace is kept as long as the same calls come, whatever else was measured:
        so with a trace made ahead of time it does not depend on what else ran on the machine.
        """
        if isinstance(self.policy, StaticPlacement):
            return False
        if trace.kind == "train" and all(m.phase == "forward" for m in trace.moments):
            return False
        known = self._result_for(trace.kind, trace.signature)
        calls = trace.calls(self.inputs.layout.chunk_of())
        needs = told_apart(call for call in calls if call is not None)
        if known is not None and known.steps.needs == needs:
            return False
        inputs = replace(self.inputs, trace=trace)
        try:
            planned = plan_within(self.plan, inputs, self.policy)
        except BudgetError as error:
            self._refused(inputs, error)
            return False
        self.overruns.forget(f"{trace.kind} {trace.signature}")
        if trace.kind == "train" and (known is self.result or not self.has_trace):
            self.inputs, self.result, self.has_trace = inputs, planned, True
        else:
            self.others[trace.kind, trace.signature] = planned
        return True

    def follow_all(self, trace: Trace | None) -> bool:
        """Plan with the traces of all ranks, in the present homes; returns whether it was possible.

        Collective. `trace`: of this rank; None where it has none. Where ranks ran different
        sequences of calls, the present plan stays. Inputs may differ between ranks: one plan is
        for all.
        """
        if isinstance(self.policy, StaticPlacement):
            return False
        traces = [found for found in self.comm.gather_objects(trace) if found is not None]
        if len(traces) < self.comm.world_size:
            return False
        try:
            reduced = replace(reduce_traces(traces), signature=ASSUMED_SIGNATURE)
            inputs = replace(self.inputs, trace=reduced)
            self.result = plan_within(self.plan, inputs, self.policy)
        except TraceError as error:
            log.warning("what the ranks measured is not planned with: %s", error)
            return False
        except BudgetError as error:
            self._refused(inputs, error)
            return False
        self.inputs, self.has_trace = inputs, True
        self.overruns.forget(f"{reduced.kind} {reduced.signature}")
        self._compare(self.plan)
        return True

    def take_doubt(self) -> bool:
        """Whether to measure the last iteration that did not fit again, before it is reported.

        A first measurement may have what libraries allocate once, in the first iteration alone.
        """
        doubtful, self._doubtful = self._doubtful, False
        return doubtful

    def _refused(self, inputs: PlanInputs, error: BudgetError) -> None:
        """Note that a measured iteration does not fit together with what lives on the device."""
        trace, before = inputs.trace, self._refusals
        key = f"{trace.kind} {trace.signature}"
        if key not in before:
            before.add(key)
            self._doubtful = True
            return
        said = in_words_of(self.policy, self.machine, error)
        text = (
            f"an iteration needs more memory than was left for it: {said}; {self._remedy(inputs)}"
        )
        if not self.overruns.note(key, text):
            return
        if said.missing_bytes > self.overruns.noise_bytes:
            warnings.warn(text, BudgetWarning, stacklevel=user_stacklevel())
        else:
            log.warning("an iteration needs more memory than was left for it: %s", said)

    def _remedy(self, inputs: PlanInputs) -> str:
        trace, specs = inputs.trace, inputs.layout.params
        if all(moment.module == "" for moment in trace.moments):  # nothing below was hooked
            trace = sequential_trace(specs, trace.peak_non_model_bytes, overlap=True)
        anew = replace(inputs, trace=trace, fixed_params=None, original_home=None)
        try:
            fit(anew, self.policy, is_measured=True, least_block_numel=self.block_numel)
        except BudgetError:
            return "it fits in no homes; activation checkpointing makes it smaller"
        return "in other homes it would fit: wrap the module with the trace= of this batch"

    def higher(self) -> PlanResult | None:
        """Plan result with homes raised to what the first trace leaves room for; once.

        Collective. None where nothing rises. `use_plan` makes it the plan.
        """
        if self.homes_are_final or not self.has_trace or isinstance(self.policy, StaticPlacement):
            return None
        self.homes_are_final = True
        try:
            found = plan_above(self.plan, self.inputs, self.policy)
        except BudgetError as error:
            log.warning("homes stay as they are: %s", error)
            return None
        self._compare(found.plan)
        changed = [
            (old.param_home, old.state_homes) != (new.param_home, new.state_homes)
            for old, new in zip(self.plan.shards, found.plan.shards, strict=True)
        ]
        return found if any(changed) else None

    def grow(self, layout: ChunkLayout) -> None:
        """Plan gradients and state of chunks that were frozen and are trained from now on.

        Collective. Raises BudgetError where they fit nowhere, and then nothing has changed.
        """
        inputs = replace(self.inputs, layout=layout)
        planned = plan_grown(self.plan, inputs, self.policy)
        begun, was_measured = self._begun
        self._begun = replace(begun, layout=layout), was_measured
        self.inputs, self.result = inputs, planned
        self.others.clear()
        self._compare(self.plan)

    def use_plan(self, planned: PlanResult) -> None:
        """Make this the plan: shards and state are in its homes by now."""
        self.result = planned
        homes = tuple(shard.param_home for shard in planned.plan.shards)
        self.inputs = replace(self.inputs, fixed_params=homes)
        self.others.clear()

    def _result_for(self, kind: Kind, signature: str) -> PlanResult | None:
        """Plan result that was made with a trace of such an iteration, or None."""
        trace = self.inputs.trace
        of_any = trace.signature == ASSUMED_SIGNATURE
        if self.has_trace and trace.kind == kind and (of_any or trace.signature == signature):
            return self.result
        return self.others.get((kind, signature))

    def steps_for(self, kind: Kind, signature: str) -> GatherSteps | None:
        """Gather steps that are planned for such an iteration."""
        planned = self._result_for(kind, signature)
        return None if planned is None else planned.steps

    def payload_room_bytes(self) -> int:
        """Bytes that payloads may take at any moment of forward and backward.

        A moment that needs more than this has more room of its own.
        """
        known = self._room
        if known is None or known[0] is not self.result or known[1] is not self.inputs:
            known = self._room = self.result, self.inputs, self._payload_room_bytes()
        return known[2]

    def _payload_room_bytes(self) -> int:
        plan, profile = self.plan, self.result.profile
        total = profile.total(Tier.DEVICE)
        if isinstance(self.policy, ConstPlacement):
            total = [n - m for n, m in zip(total, profile.rows[Tier.DEVICE, "non-model"],
                                           strict=True)]  # fmt: skip
        for moment, nbytes in enumerate(_payload_bytes(plan)):
            total[moment] -= nbytes
        budget = self.inputs.budgets.device
        return budget - max(total[: plan.num_trace_moments], default=0)


def _payload_bytes(plan: Plan) -> Iterator[int]:
    """Bytes of gathered payloads, at every moment of forward and backward."""
    total = plan.num_trace_moments
    changes = [0] * (total + 1)
    for gather in plan.gathers:
        nbytes = plan.chunks[gather.chunk].payload_bytes
        changes[gather.begin] += nbytes
        changes[min(gather.release, total)] -= nbytes
        if gather.release > total:  # into the next iteration
            changes[0] += nbytes
            changes[gather.release - total] -= nbytes
    return accumulate(changes[:-1])


def begin_planning(
    layout: ChunkLayout,
    policy: Placement,
    backend: Backend,
    comm: Communicator,
    *,
    master_weights: bool,
    itemsizes: Sequence[int],
    max_prefetch: int,
    update: str,
    trace: Trace | None,
    ranks_per_node: int | None = None,
) -> Planning:
    """Measure, agree, and plan the homes of parameters for an optimizer that is yet to come.

    master_weights: 16-bit weights have fp32 masters. itemsizes: bytes of an element of every
    parameter as it came, in registration order. trace: of this model. ranks_per_node: None where
    `comm` has all ranks. Raises BudgetError for budgets that cannot hold the model.
    """
    has_master = master_weights and any(chunk.dtype != "float32" for chunk in layout.chunks)
    with_originals = wider_chunks(layout, itemsizes) if master_weights else frozenset()
    num_ahead = buffers_ahead(
        update, has_masters=has_master, has_host_tier=backend.has_host_tier,
        has_budgets=has_budgets(policy),
    )  # fmt: skip
    may_split = frozenset(c.id for c in layout.chunks if c.dtype == WEIGHT_DTYPE)
    state = assumed_state(may_split, has_master)
    machine = look_at_machine(backend, ranks_per_node or ranks_here(comm))
    budgets = resolve(policy, machine)
    bandwidths = usual_speeds(backend.has_host_tier)
    gathered = comm.gather_objects((trace, budgets, bandwidths))
    traces, limits, links = zip(*gathered, strict=True)
    without = [rank for rank, given in enumerate(traces) if given is None]
    if 0 < len(without) < comm.world_size:
        raise ValueError(f"ranks {without} have no trace= and others do; expected all or none")
    budgets, bandwidths = least_budgets(limits), least_bandwidths(links)
    fixed = None
    if backend.shards_start_on_host and not has_budgets(policy):
        fixed, budgets = tuple(Tier.HOST for _ in layout.chunks), Budgets()
        if not isinstance(policy, StaticPlacement):
            policy = StaticPlacement()
    if without:
        used = sequential_trace(layout.params, overlap=budgets.device < UNLIMITED)
    else:
        used = reduce_traces(traces)
    updates_on_host = backend.has_host_tier and not backend.updates_by_triton
    inputs = PlanInputs(
        layout=layout, trace=used, state=state, budgets=budgets, bandwidths=bandwidths,
        has_host_tier=backend.has_host_tier, max_prefetch=max_prefetch,
        off_device=UpdatePath.CPU if updates_on_host else UpdatePath.STREAM, fixed_params=fixed,
        with_originals=with_originals, num_ahead=num_ahead,
    )  # fmt: skip
    inputs = replace(inputs, block_numel=block_sizes(policy, inputs)[0])
    if trace is None:
        inputs = assume(inputs, policy)
    return Planning(comm, policy, inputs, trace is not None, machine)
