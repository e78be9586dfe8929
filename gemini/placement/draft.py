"""A plan in the making: what it follows from, homes that are chosen, and what follows. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from gemini.chunk.layout import ChunkLayout
from gemini.memtracer.trace import Trace
from gemini.placement.homes.budget_fill import fill, missing_for_everything
from gemini.placement.timetable.gathers import GatherSteps, gather_steps
from gemini.placement.timetable.moves import moves_of
from gemini.placement.timetable.room import Demand, Vector
from gemini.placement.timetable.steps import (
    GatherSchedule,
    num_uses,
    prefetched_at,
    reductions_of,
    room_ahead,
    schedule_gathers,
)
from gemini.units import BLOCK_NUMEL, BlockId, ChunkId, Moment

from .cost import StepCost, compute_seconds_of, estimate, predict_step
from .plan import Forecast, Plan, ShardPlan, UpdatePath
from .policy import AutoPlacement, ConstPlacement, Placement, StaticPlacement, never_released
from .predict import Profile, predict
from .problem import Homes, Tiers, static_homes
from .sizes import UNLIMITED, Bandwidths, BudgetError, Budgets, StateBytes, chunk_bytes
from .tiers import Tier

# What competes for the device, in every order: parameters, gradients, state
ORDERS = ("psg", "pgs", "spg", "sgp", "gps", "gsp")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanInputs:
    """Everything a plan follows from. The same on all ranks: see `reduce_inputs`."""

    layout: ChunkLayout
    trace: Trace
    state: StateBytes
    budgets: Budgets = field(default_factory=Budgets)  # of one rank
    bandwidths: Bandwidths = field(default_factory=Bandwidths)
    has_host_tier: bool = True  # else the device is RAM
    # of blocks whose state is not on the device: as the backend does it, for all of them
    off_device: UpdatePath = UpdatePath.STREAM
    depth: int = 2  # blocks read ahead of their update
    max_prefetch: int = 1  # payloads begun ahead of their use
    nvme_state_frac: float = 0.0  # of the state's bytes, at least, on NVMe
    block_numel: int = BLOCK_NUMEL
    flops: float = 0.0  # of one forward and backward, where the trace was not timed
    fixed_params: tuple[Tier, ...] | None = None  # homes of parameter shards that exist already


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan with what it is predicted to take."""

    plan: Plan
    profile: Profile
    cost: StepCost
    steps: GatherSteps  # how its gathers are carried out


class Draft:
    """One run of the planner. `floor`: homes that exist already, below which nothing goes."""

    def __init__(self, inputs: PlanInputs, policy: Placement, floor: Homes | None = None) -> None:
        self.inputs = inputs
        self.policy = policy
        layout, trace = inputs.layout, inputs.trace
        chunk_of = layout.chunk_of()
        self.tiers = Tiers(
            chunks=chunk_bytes(layout, inputs.state, inputs.block_numel),
            state=inputs.state,
            budgets=inputs.budgets,
            bandwidths=inputs.bandwidths,
            world_size=layout.world_size,
            has_host_tier=inputs.has_host_tier,
            depth=inputs.depth,
            off_device=inputs.off_device,
            nvme_state_frac=inputs.nvme_state_frac,
            fixed_params=inputs.fixed_params,
            floor=floor,
        )
        self._digests = layout.digest(), trace.digest()  # of long values: taken once
        self.needs = trace.chunk_needs(chunk_of)
        self.calls = trace.calls(chunk_of)
        self.reductions = (
            reductions_of(
                trace,
                chunk_of,
                [chunk.id for chunk in self.tiers.chunks if chunk.trainable],
                self.tiers.world_size,
            )
            if trace.kind == "train"
            else {}
        )
        kept = isinstance(policy, StaticPlacement) and not policy.shard_grads
        self.whole_grads = kept and layout.world_size > 1
        if self.whole_grads:  # they are reduced by the step
            end = Moment(len(trace.moments))
            self.reductions = {c: replace(r, end=end) for c, r in self.reductions.items()}
        self.never_released = never_released(policy, [c.payload_bytes for c in self.tiers.chunks])
        self.ahead = prefetched_at(self.needs, inputs.max_prefetch)
        self.non_model = [m.non_model_bytes for m in trace.moments]
        cap = policy.steady_cap_ratio if isinstance(policy, AutoPlacement) else 1.0
        self.demand = self._demand(cap)
        weights = [
            sum(layout.params[p].numel for p in m.params) * (1 if m.phase == "forward" else 2)
            if m.edge == "enter"
            else 0
            for m in trace.moments
        ]
        self.compute = compute_seconds_of(
            [m.seconds for m in trace.moments], weights, inputs.flops, inputs.bandwidths.flops
        )

    def _demand(self, cap: float) -> Demand:
        """What the device must hold, with the share of the rest that stays free under the cap."""
        reserved = [0] * len(self.non_model)
        if not isinstance(self.policy, ConstPlacement):
            budget = self.tiers.budgets.device
            cap = cap if budget < UNLIMITED else 1.0
            reserved = [n + round(max(0, budget - n) * (1 - cap)) for n in self.non_model]
        vector = np.array([*reserved, reserved[-1] if reserved else 0], np.int64)
        return Demand(vector, self.needs, self.reductions, self.ahead)

    # -- homes --

    def choose_homes(self) -> Homes:
        if isinstance(self.policy, StaticPlacement):
            return static_homes(self.policy, self.tiers)
        try:
            return self._fastest()
        except BudgetError:
            self.give_up_cap()
            return self._fastest()

    def give_up_cap(self) -> None:
        """What the cap keeps free goes before a plan fails."""
        self.demand = self._demand(1.0)

    def _fastest(self) -> Homes:
        fixed = self.tiers.fixed_params
        may_all_be_here = fixed is None or set(fixed) <= {Tier.DEVICE}
        missing = missing_for_everything(self.tiers, self.demand) if may_all_be_here else None
        if missing == 0:
            return Homes.all_on(Tier.DEVICE, self.tiers.chunks)
        uses = num_uses(self.needs, len(self.tiers.chunks))
        best: tuple[tuple[float, float], Homes] | None = None
        failed: BudgetError | None = None
        for order in ORDERS:
            try:
                homes = fill(self.tiers, self.demand, order)
            except BudgetError as error:
                # what a tier has room for says what is missing behind it
                if failed is None or _severity(error) < _severity(failed):
                    failed = error
                if error.tier is Tier.DEVICE:
                    break  # whatever the order
                continue
            seconds = estimate(homes, self.tiers, uses, sum(self.compute))
            if best is None or seconds < best[0]:
                best = seconds, homes
        if best is None:
            assert failed is not None
            if (
                failed.tier is Tier.DEVICE
                and missing is not None
                and missing <= failed.missing_bytes
            ):
                budget = self.tiers.budgets.device
                raise BudgetError.missing(
                    Tier.DEVICE, missing, budget, "everything, and buffers to move it take more",
                    "raise device_budget by as much",
                )  # fmt: skip
            raise failed
        return best[1]

    # -- the rest --

    def finish(self, homes: Homes) -> Planned:
        order = self._step_order(homes)
        gathered = self._gathered(homes)
        trace = self.inputs.trace
        trainable = {chunk.id for chunk in self.tiers.chunks if chunk.trainable}
        schedule = schedule_gathers(
            self.needs,
            self._gather_room(homes, order),
            gathered,
            self.inputs.max_prefetch,
            stale=trainable if trace.kind == "train" else (),
            may_begin=[call is not None for call in self.calls],
        )
        for chunk_id in schedule.always:
            homes.kept[chunk_id] = True
        plan = self._build(homes, order, schedule)
        plan.validate()
        profile = predict(plan, self.non_model)
        steps = gather_steps(
            self.calls, plan.gathers, [shard.chunk for shard in plan.shards if shard.kept]
        )
        cost = predict_step(plan, self.inputs.bandwidths, self.compute)
        return Planned(plan, profile, cost, steps)

    def lacks(self, homes: Homes) -> tuple[Moment, int] | None:
        """The moment whose payloads lack most room in these homes, and the bytes that they lack."""
        gathered = self._gathered(homes)
        needs = [sum(gathered.get(chunk, 0) for chunk in chunks) for chunks in self.needs]
        left = self._gather_room(homes, self._step_order(homes)) - np.array(needs, np.int64)
        if left.size == 0 or left.min() >= 0:
            return None
        return Moment(int(left.argmin())), -int(left.min())

    def _gathered(self, homes: Homes) -> dict[ChunkId, int]:
        """Bytes of the payloads that are gathered and freed."""
        return {
            chunk.id: int(chunk.payload_bytes)
            for chunk in self.tiers.chunks
            if not homes.kept[chunk.id]
            and (self.tiers.world_size > 1 or homes.param[chunk.id] is not Tier.DEVICE)
        }

    def _step_order(self, homes: Homes) -> tuple[BlockId, ...]:
        """Blocks whose state is not on the device, those on NVMe first: they can still fail."""
        if self.inputs.trace.kind == "eval":
            return ()
        return tuple(
            block.id
            for tier in (Tier.NVME, Tier.HOST)
            for chunk in self.tiers.chunks
            for block, home in zip(chunk.blocks, homes.state[chunk.id], strict=True)
            if home is tier
        )

    def _build(self, homes: Homes, order: tuple[BlockId, ...], schedule: GatherSchedule) -> Plan:
        tiers, trace = self.tiers, self.inputs.trace
        backward = next(
            (i for i, m in enumerate(trace.moments) if m.phase == "backward"), len(self.needs)
        )
        return Plan(
            kind=trace.kind,
            layout_digest=self._digests[0],
            trace_digest=self._digests[1],
            num_trace_moments=len(self.needs),
            world_size=tiers.world_size,
            has_host_tier=tiers.has_host_tier,
            has_master=tiers.state.has_master,
            whole_grads=self.whole_grads,
            budgets=self.inputs.budgets,
            chunks=tiers.chunks,
            shards=tuple(self._shard(homes, chunk.id) for chunk in tiers.chunks),
            off_device=tiers.off_device,
            gathers=schedule.gathers,
            device_staging=homes.device_staging,
            host_staging=homes.host_staging,
            forecast=Forecast(
                tuple(sorted(self.reductions.values(), key=lambda r: (r.last, r.chunk))),
                order,
                moves_of(
                    homes, tiers, schedule.gathers, self.reductions, order, len(self.needs),
                    backward, updates=trace.kind == "train",
                ),
                schedule.gap,
            ),
        )  # fmt: skip

    def _gather_room(self, homes: Homes, order: tuple[BlockId, ...]) -> Vector:
        """Bytes for payloads at every moment, in these homes."""
        tiers = self.tiers
        if isinstance(self.policy, StaticPlacement):
            # the working set and what is prefetched, and nothing kept between uses
            used_chunks = {chunk for chunks in self.needs for chunk in chunks}
            payloads = [tiers.chunks[chunk].payload_bytes for chunk in used_chunks]
            largest_need = max(
                (sum(tiers.chunks[c].payload_bytes for c in chunks) for chunks in self.needs),
                default=0,
            )
            ahead = room_ahead(payloads, self.inputs.max_prefetch)
            return np.full(len(self.needs), largest_need + ahead, np.int64)
        bare = self._build(homes, order, GatherSchedule((), (), 0.0))
        used = np.array(
            predict(bare, self.non_model).total(Tier.DEVICE)[: len(self.needs)], np.int64
        )
        capped = self.demand.non_model[:-1] - np.array(self.non_model, np.int64)
        return np.asarray(tiers.budgets.device - used - capped, np.int64)

    def _shard(self, homes: Homes, chunk: ChunkId) -> ShardPlan:
        sizes = self.tiers.chunks[chunk]
        states = tuple(homes.state[chunk])
        grad = homes.grad[chunk] if sizes.trainable else None
        kept = chunk in self.never_released or self.tiers.world_size == 1
        in_payload = kept and homes.param[chunk] is Tier.DEVICE
        return ShardPlan(
            chunk, homes.param[chunk], homes.kept[chunk], in_payload, grad, states,
            self._why(homes, chunk),
        )  # fmt: skip

    def _why(self, homes: Homes, chunk: ChunkId) -> str:
        if isinstance(self.policy, StaticPlacement):
            return f"placed by {self.policy}"
        tiers = {homes.param[chunk], *homes.state[chunk]}
        if self.tiers.chunks[chunk].trainable:
            tiers.add(homes.grad[chunk])
        if tiers == {Tier.DEVICE}:
            return "all of it fits the device budget"
        if Tier.DEVICE in tiers:
            return "the device budget has room for a part of it"
        return "the device budget has no room for it beside what saves more time a byte"

    def over_budget(self, profile: Profile) -> BudgetError | None:
        """The first tier whose predicted peak passes its budget."""
        if isinstance(self.policy, StaticPlacement):
            return None
        for tier in (Tier.DEVICE, Tier.HOST, Tier.NVME):
            totals = profile.total(tier)
            if isinstance(self.policy, ConstPlacement) and tier is Tier.DEVICE:
                others = profile.rows[tier, "non-model"]
                totals = [n - m for n, m in zip(totals, others, strict=True)]
            missing = max(totals) - self.tiers.budgets.of(tier)
            if missing > 0:
                moment = totals.index(max(totals))
                return BudgetError.missing(
                    tier, missing, self.tiers.budgets.of(tier), f"moment {moment}",
                    f"raise {tier.value}_budget by as much, or use a smaller batch",
                )  # fmt: skip
        return None


def _severity(error: BudgetError) -> tuple[int, int]:
    """How far from a plan: homes are chosen tier by tier, so what fails last lacks least."""
    assert error.tier is not None
    return (list(Tier)[::-1].index(error.tier), error.missing_bytes)
