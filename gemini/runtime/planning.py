"""What there is to plan with, measured and agreed on by all ranks, and the plans made from it."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace

from gemini.chunk.layout import ITEMSIZE, ChunkLayout
from gemini.memtracer.trace import (
    ASSUMED_SIGNATURE,
    Kind,
    Trace,
    TraceError,
    reduce_traces,
    sequential_trace,
)
from gemini.placement.budgets import resolve
from gemini.placement.gather import GatherSteps
from gemini.placement.plan import Plan
from gemini.placement.planner import (
    PlanInputs,
    Planned,
    make_plan,
    plan_above,
    plan_within,
    reduce_inputs,
)
from gemini.placement.policy import (
    AutoPlacement,
    ConstPlacement,
    Placement,
    StaticPlacement,
    never_released,
)
from gemini.placement.sizes import UNLIMITED, Bandwidths, BudgetError, Budgets, StateBytes
from gemini.placement.tiers import Tier
from gemini.units import BLOCK_NUMEL, ChunkId

from .backend import Backend
from .comm import Communicator
from .machine import look_at_machine

log = logging.getLogger("gemini")

# Before an optimizer says what it keeps: no rule of `optim` keeps more than Adam
ASSUMED_STATE_BYTES = 8
MASTER_BYTES = 4
MIN_BLOCK_NUMEL = 1024  # of `NvmeConfig`
# A usual disk and usual memory, in bytes a second. They order homes; they do not limit anything
USUAL = Bandwidths(
    host_to_device=20e9, device_to_host=20e9, nvme_read=1.5e9, nvme_write=1.2e9, collective=10e9,
    device_memory=500e9, host_memory=20e9, flops=1e12,
)  # fmt: skip
CPU_MEMORY = 20e9


@dataclass(slots=True)
class Planning:
    """Inputs that are the same on all ranks. `make` is collective: ranks compare their plans."""

    comm: Communicator
    policy: Placement
    inputs: PlanInputs
    has_trace: bool  # else non-model data is an assumption
    settled: bool = field(init=False)  # homes were chosen for a trace, or were asked to rise
    planned: Planned = field(init=False)  # of training
    # of evaluation, and of training with inputs of other signatures, in the same homes
    others: dict[tuple[Kind, str], Planned] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Blocks are as small as they must be: their size is a choice of the optimizer to come."""
        self.settled = self.has_trace
        while True:
            try:
                self.make()
                return
            except BudgetError:
                if self.inputs.block_numel <= MIN_BLOCK_NUMEL:
                    raise
            self.inputs = replace(self.inputs, block_numel=self.inputs.block_numel // 4)

    @property
    def plan(self) -> Plan:
        return self.planned.plan

    @property
    def kept(self) -> frozenset[ChunkId]:
        """Chunks that are never released, by the policy. A plan may keep others while it holds."""
        return never_released(self.policy, [c.payload_bytes for c in self.inputs.layout.chunks])

    @property
    def nvme_folder(self) -> str | None:
        return self.policy.nvme_dir if isinstance(self.policy, AutoPlacement) else None

    def make(self) -> None:
        """Plan with the inputs there are. Raises BudgetError on every rank, or on none."""
        policy = self.policy
        if isinstance(policy, AutoPlacement) and not self.has_trace:
            policy = replace(policy, steady_cap_ratio=1.0)  # the assumption is margin enough
        self.planned = make_plan(self.inputs, policy)
        self.others.clear()
        self._compare(self.plan)

    def _compare(self, plan: Plan) -> None:
        digests = self.comm.gather_objects(plan.digest())
        if len(set(digests)) > 1:
            raise AssertionError(f"ranks made different plans from the same inputs: {digests}")

    def with_state(
        self, state: StateBytes, *, nvme_frac: float, block_numel: int, depth: int
    ) -> None:
        """An optimizer is there: plan its state. Parameter shards stay where they are."""
        before = self.inputs
        self.inputs = replace(
            self.inputs,
            state=state,
            nvme_state_frac=nvme_frac,
            block_numel=block_numel,
            depth=depth,
            fixed_params=tuple(shard.param_home for shard in self.plan.shards),
        )
        try:
            self.make()
        except BudgetError:
            self.inputs = before
            raise

    def follow(self, trace: Trace) -> bool:
        """Plan a measured iteration in the homes there are; whether this changed what is planned.

        What was planned with a trace is kept as long as the same calls come, whatever else was
        measured: so a trace that was made ahead of time does not depend on what ran beside it.
        """
        if isinstance(self.policy, StaticPlacement):
            return False
        if trace.kind == "train" and all(m.phase == "forward" for m in trace.moments):
            return False
        known = self._planned_for(trace.kind, trace.signature)
        calls = trace.calls(self.inputs.layout.chunk_of())
        if known is not None and known.steps.needs == tuple(c for c in calls if c is not None):
            return False
        inputs = replace(self.inputs, trace=trace)
        try:
            planned = plan_within(self.plan, inputs, self.policy)
        except BudgetError as error:
            log.warning("the iteration needs more memory than was left for it: %s", error)
            return False
        if trace.kind == "train" and (known is self.planned or not self.has_trace):
            self.inputs, self.planned, self.has_trace = inputs, planned, True
        else:
            self.others[trace.kind, trace.signature] = planned
        return True

    def follow_all(self, trace: Trace | None) -> bool:
        """Plan with what all ranks measured, in the homes there are; whether that was possible.

        Collective. `trace`: of this rank; None where it has none. Ranks that ran other sequences
        keep the plan they have. The inputs of one rank need not be those of another: the plan is
        for all. Where the device has no budget there is nothing to keep to: payloads are freed
        behind their use, as ZeRO-3 does.
        """
        if isinstance(self.policy, StaticPlacement) or self.inputs.budgets.device >= UNLIMITED:
            return False
        traces = [found for found in self.comm.gather_objects(trace) if found is not None]
        if len(traces) < self.comm.world_size:
            return False
        try:
            reduced = replace(reduce_traces(traces), signature=ASSUMED_SIGNATURE)
            inputs = replace(self.inputs, trace=reduced)
            self.planned = plan_within(self.plan, inputs, self.policy)
        except (TraceError, BudgetError) as error:
            log.warning("what the ranks measured is not planned with: %s", error)
            return False
        self.inputs, self.has_trace = inputs, True
        self._compare(self.plan)
        return True

    def higher(self) -> Planned | None:
        """What is planned, with homes raised to what the first trace leaves room for; once.

        Collective. None where nothing rises. `adopt` makes it the plan.
        """
        if self.settled or not self.has_trace or isinstance(self.policy, StaticPlacement):
            return None
        self.settled = True
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

    def adopt(self, planned: Planned) -> None:
        """Shards and state are where this says."""
        self.planned = planned
        homes = tuple(shard.param_home for shard in planned.plan.shards)
        self.inputs = replace(self.inputs, fixed_params=homes)
        self.others.clear()

    def _planned_for(self, kind: Kind, signature: str) -> Planned | None:
        """What is planned with a trace of such an iteration."""
        trace = self.inputs.trace
        of_any = trace.signature == ASSUMED_SIGNATURE
        if self.has_trace and trace.kind == kind and (of_any or trace.signature == signature):
            return self.planned
        return self.others.get((kind, signature))

    def steps_for(self, kind: Kind, signature: str) -> GatherSteps | None:
        """The gathers that are planned for such an iteration."""
        planned = self._planned_for(kind, signature)
        return None if planned is None else planned.steps

    @property
    def payload_room_bytes(self) -> int:
        """What payloads may take at any moment of forward and backward, beside all else there is.

        A moment that needs more than this has more room of its own.
        """
        plan, profile = self.plan, self.planned.profile
        total = profile.total(Tier.DEVICE)
        if isinstance(self.policy, ConstPlacement):
            total = [n - m for n, m in zip(total, profile.rows[Tier.DEVICE, "non-model"],
                                           strict=True)]  # fmt: skip
        for gather in plan.gathers:
            for moment in range(gather.begin, gather.release):
                if moment < plan.num_trace_moments or gather.release > plan.num_trace_moments:
                    total[moment % plan.num_trace_moments] -= plan.chunks[
                        gather.chunk
                    ].payload_bytes
        budget = self.inputs.budgets.device
        return budget - max(total[: plan.num_trace_moments], default=0)


def begin_planning(
    layout: ChunkLayout,
    policy: Placement,
    backend: Backend,
    comm: Communicator,
    *,
    has_master: bool,
    max_prefetch: int,
    trace: Trace | None,
) -> Planning:
    """Measure, agree, and plan the homes of parameters for an optimizer that is yet to come.

    `trace`: of this model. Raises BudgetError for budgets that cannot hold the model.
    """
    state = StateBytes(ASSUMED_STATE_BYTES + (MASTER_BYTES if has_master else 0), has_master)
    budgets = resolve(policy, look_at_machine(backend, comm), _model_bytes(layout, state))
    if trace is None:
        non_model = 0
        if isinstance(policy, AutoPlacement) and budgets.device < UNLIMITED:
            non_model = round(budgets.device * policy.warmup_non_model_data_ratio)
        used = sequential_trace(layout.params, non_model)
    else:
        used = trace
    bandwidths = USUAL if backend.has_host_tier else replace(USUAL, device_memory=CPU_MEMORY)
    gathered = comm.gather_objects((used, budgets, bandwidths))
    traces, limits, links = zip(*gathered, strict=True)
    used, budgets, bandwidths = reduce_inputs(traces, limits, links)
    fixed = None
    if backend.shards_start_on_host and budgets == Budgets():
        fixed = tuple(Tier.HOST for _ in layout.chunks)
        if not isinstance(policy, StaticPlacement):
            policy = StaticPlacement()
    inputs = PlanInputs(
        layout=layout, trace=used, state=state, budgets=budgets, bandwidths=bandwidths,
        has_host_tier=backend.has_host_tier, max_prefetch=max_prefetch, block_numel=BLOCK_NUMEL,
        fixed_params=fixed,
    )  # fmt: skip
    return Planning(comm, policy, inputs, trace is not None)


def _model_bytes(layout: ChunkLayout, state: StateBytes) -> int:
    """Parameters, gradients and state of one rank."""
    total = 0
    for chunk in layout.chunks:
        each = ITEMSIZE[chunk.dtype]
        if chunk.trainable:
            each = 2 * each + state.per_element
        total += chunk.shard_numel * each
    return total
