"""Inputs of the planner, measured and agreed on by all ranks, and the plans made from them."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import TYPE_CHECKING

from gemini.comm.communicator import Communicator
from gemini.memtracer.forecast import covers, with_bytes_added
from gemini.memtracer.layers import without_choice
from gemini.memtracer.trace import (
    ASSUMED_SIGNATURE,
    Kind,
    Trace,
    TraceError,
    reduce_traces,
)
from gemini.placement.fit import StateRequest, fit_ahead, fit_state, fit_within
from gemini.placement.homes.budgets import Machine, in_words_of
from gemini.placement.overruns import BudgetWarning, Overruns, user_stacklevel
from gemini.placement.plan import Plan, Recomputed
from gemini.placement.planner import PlanInputs, PlanResult, plan_above, plan_grown, plan_within
from gemini.placement.policy import (
    AutoPlacement,
    ConstPlacement,
    Placement,
    StaticPlacement,
    never_released,
)
from gemini.placement.renting import HomeMoves, Raised, price, promoted_bytes
from gemini.placement.sizes import (
    BudgetError,
)
from gemini.placement.tiers import Tier
from gemini.placement.timetable.gathers import GatherSteps, told_apart
from gemini.units import ChunkId

from .iteration_plans import IterationPlan, IterationPlans, Lowered, lowered
from .levels import Levels

if TYPE_CHECKING:
    from gemini.chunk.storage import Chunk
    from gemini.runtime.memory.ledger import MemoryLedger
    from gemini.runtime.memory.shard_storage import ShardStorage

    from .sampler import Sampler
    from .tensor_mgr import StatefulTensorMgr

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
    homes_are_final: bool = field(init=False)  # chosen for a trace, or promoted
    result: PlanResult = field(init=False)  # of training
    overruns: Overruns = field(init=False)  # of the budgets
    _num_ahead: int = field(init=False)  # buffers asked for; `inputs` has what there is room for
    _doubted: set[Kind] = field(default_factory=set)  # kinds of which one was measured again
    _doubtful: bool = False
    # in the same homes: of evaluation, of training with inputs of other signatures, and of both
    # beside `waiting_bytes`; the last used one last
    others: IterationPlans = field(default_factory=IterationPlans)
    moves: HomeMoves = field(default_factory=HomeMoves)  # so far
    levels: Levels = field(default_factory=Levels)  # of iterations of several ranks
    # layers that are computed again, by the signature of inputs that this was planned for
    _recomputed: dict[str, Recomputed | None] = field(default_factory=dict, init=False)
    keeps_homes: bool = False  # whatever iterations ask for
    waiting_bytes: int = 0  # of gradients of earlier backwards, as the iteration begins

    def __post_init__(self) -> None:
        self.homes_are_final = self.has_trace
        self.overruns = Overruns(self.policy, self.inputs.budgets)
        self.overruns.homes_follow = self.homes_follow
        if self.has_trace:
            self.levels.like = self.inputs.trace
        begun, self._num_ahead = self.inputs, self.inputs.num_ahead
        self._take(
            lambda: fit_ahead(begun, self.policy, self._num_ahead, is_measured=self.has_trace)
        )
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
        self._forget_plans()
        self.compare(self.plan)

    def _forget_plans(self) -> None:
        """Forget what was planned in other homes than those of the plan of training."""
        self.others.clear()
        self._recomputed.clear()

    def keep_homes(self) -> None:
        """Move nothing from now on: of several ranks that release nothing, nobody has a trace."""
        self.keeps_homes = True
        self.overruns.homes_follow = False

    def compare(self, plan: Plan) -> None:
        digests = self.comm.gather_objects(plan.digest())
        if len(set(digests)) > 1:
            raise AssertionError(f"ranks made different plans from the same inputs: {digests}")

    def plan_state(self, request: StateRequest) -> None:
        """Plan an optimizer's state. Parameter shards stay where they are.

        Blocks have the size that files were cut with; without files `block_numel` is a wish (ADR
        0002).
        Raises BudgetError, and ValueError for a wish that is not the policy's; then nothing has
        changed.
        """
        now = self.inputs, self.result
        self._take(
            lambda: fit_state(
                self._begun, now, self.policy, request, self._num_ahead, is_measured=self.has_trace
            )
        )

    def keep_originals(self, chunks: Collection[ChunkId]) -> None:
        """Plan originals for `chunks`, which were rounded on this rank.

        Collective: a chunk that any rank names has an original. Parameters stay where they are.
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
        self.compare(self.plan)

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

    @property
    def homes_follow(self) -> bool:
        """Whether homes move with what iterations ask for."""
        return self.overruns.limits_device and not self.keeps_homes

    def replan(self, trace: Trace, *, is_coarse: bool = False) -> bool:
        """Plan a measured iteration in the present homes; returns whether plans changed.

        A plan made with a trace is kept as long as the same calls come and ask for no more,
        whatever else was measured: so with a trace made ahead of time it does not depend on what
        else ran on the machine. is_coarse: the root's calls alone were measured.
        """
        if isinstance(self.policy, StaticPlacement):
            return False
        if trace.kind == "train" and all(m.phase == "forward" for m in trace.moments):
            return False
        was_waiting, self.waiting_bytes = self.waiting_bytes, 0
        try:
            return self._replan(trace, is_coarse)
        finally:
            self.waiting_bytes = was_waiting

    def _replan(self, trace: Trace, is_coarse: bool) -> bool:
        known = self._planned_for(trace.kind, trace.signature)
        is_training = known is not None and known.result is self.result
        if known is not None and known.result is not None:
            calls = trace.calls(self.inputs.layout.chunk_of())
            needs = told_apart(call for call in calls if call is not None)
            steps = known.result.steps
            same_calls = is_coarse or steps.needs == needs
            if same_calls and is_training and covers(known.trace, trace, self._noise_bytes):
                return False
            if same_calls and known.trace == trace:
                return False
        inputs = replace(self.inputs, trace=trace)
        try:
            planned = plan_within(self.plan, inputs, self.policy)
        except BudgetError as error:
            self._refused(inputs, error.without_frames())
            return False
        self.overruns.forget(f"{trace.kind} {trace.signature}")
        before = self.inputs.trace
        # the same inputs, with other layers computed again, as was planned
        is_training |= bool(trace.layers) and (
            without_choice(before.signature) == without_choice(trace.signature)
        )
        if trace.kind == "train" and (is_training or not self.has_trace):
            self._recomputed[without_choice(trace.signature)] = planned.plan.recomputed
            self.inputs, self.result, self.has_trace = inputs, planned, True
        else:
            self._keep(IterationPlan(trace, planned))
        return True

    @property
    def _noise_bytes(self) -> int:
        return self.overruns.noise_bytes

    def _keep(self, planned: IterationPlan) -> None:
        self.others.keep(planned, self.waiting_bytes)
        trace, result = planned.trace, planned.result
        if result is None or trace.kind != "train" or not trace.layers:
            return
        found = result.plan.recomputed
        self._recomputed[without_choice(trace.signature)] = found
        asked = result.inputs.trace
        if asked.signature != trace.signature:  # such an iteration is another one from now on
            self.others.keep(replace(planned, trace=asked), self.waiting_bytes)

    def recomputed_for(self, signature: str) -> Recomputed | None:
        """Layers that an iteration with such inputs computes again, of training.

        Of several ranks all compute the same again, since they gather for it, and their inputs
        differ."""
        if self.comm.world_size > 1:
            return self.plan.recomputed
        return self._recomputed.get(signature, self.plan.recomputed)

    def refuse_layers(self, names: Collection[str]) -> None:
        """Plan without these layers from now on, in the present homes: none is computed again."""

        def without(inputs: PlanInputs) -> PlanInputs:
            left = tuple(one for one in inputs.trace.layers if one.name not in names)
            return replace(inputs, trace=replace(inputs.trace, layers=left, recomputed=0))

        inputs = without(self.inputs) if not self.inputs.trace.recomputed else self.inputs
        self._begun = without(self._begun[0]), self._begun[1]
        self.inputs = inputs
        self._forget_plans()
        try:
            self.result = plan_within(self.plan, inputs, self.policy)
        except BudgetError as error:
            self._refused(inputs, error.without_frames())

    def replan_together(self, trace: Trace | None) -> bool:
        """Plan with the traces of all ranks, in the present homes; returns whether it was possible.

        Collective. `trace`: of this rank; None where it has none. Where ranks ran different
        sequences of calls, the present plan stays. Inputs may differ between ranks: one plan is
        for all.
        """
        if isinstance(self.policy, StaticPlacement):
            return False
        reduced = self.reduced(trace)
        if reduced is None:
            return False
        self.levels.begin(reduced.peak_non_model_bytes)
        self.levels.take(reduced)
        reduced = replace(reduced, signature=ASSUMED_SIGNATURE)
        try:
            inputs = replace(self.inputs, trace=reduced)
            self.result = plan_within(self.plan, inputs, self.policy)
        except BudgetError as error:
            self._refused(inputs, error.without_frames())
            return False
        self.inputs, self.has_trace = inputs, True
        self.overruns.forget(f"{reduced.kind} {reduced.signature}")
        self.compare(self.plan)
        return True

    def reduced(self, trace: Trace | None) -> Trace | None:
        """One trace of the traces of all ranks; None where one has none, or ran other calls.

        Collective.
        """
        traces = [found for found in self.comm.gather_objects(trace) if found is not None]
        if len(traces) < self.comm.world_size:
            return None
        try:
            found = reduce_traces(traces)
        except TraceError as error:
            log.warning("what the ranks measured is not planned with: %s", error)
            return None
        self.levels.like = found
        return found

    def should_remeasure(self) -> bool:
        """Whether to measure the last iteration that did not fit again, before it is reported.

        A first measurement may have what libraries allocate once, in the first iteration alone.
        """
        doubtful, self._doubtful = self._doubtful, False
        return doubtful

    def _refused(self, inputs: PlanInputs, error: BudgetError) -> None:
        """Note that a measured iteration does not fit together with what lives on the device.

        Where homes follow, they make room before the next one.
        """
        trace = inputs.trace
        if self._noise_bytes and trace.kind not in self._doubted:
            self._doubted.add(trace.kind)
            self._doubtful = True
        elif not self.homes_follow or error.missing_bytes <= self._noise_bytes:
            self._say(trace, error)

    def _say(self, trace: Trace, error: BudgetError, of: str = "") -> None:
        """Say that an iteration lacks memory, once for all like it; `of` what."""
        said = in_words_of(self.policy, self.machine, error)
        text = f"an iteration{of} needs more memory than was left for it: {said}"
        if not self.overruns.note(f"{trace.kind} {trace.signature}", text):
            return
        if said.missing_bytes > self._noise_bytes:
            warnings.warn(text, BudgetWarning, stacklevel=user_stacklevel())
        else:
            log.warning("an iteration%s needs more memory than was left for it: %s", of, said)

    # -- homes that follow what iterations ask for; see `runtime.step.homes` --

    def has_room(self, trace: Trace, waiting_bytes: int = 0) -> bool:
        """Whether an iteration to come fits in the present homes, beside gradients that wait; then
        there is a plan of it."""
        self.waiting_bytes = waiting_bytes
        known = self._planned_for(trace.kind, trace.signature)
        if known is not None and known.holds(trace, self._noise_bytes):
            return True
        wanted = with_bytes_added(trace, waiting_bytes)
        try:
            planned = plan_within(self.plan, replace(self.inputs, trace=wanted), self.policy)
        except BudgetError as error:
            error.without_frames()
            if error.missing_bytes > self._noise_bytes or error.tier is not Tier.DEVICE:
                return False
            self._keep(IterationPlan(trace, None if known is None else known.result))
        else:
            self._keep(IterationPlan(trace, planned))
        return True

    def lowered(self, trace: Trace, *, params_stay: bool) -> Lowered | None:
        """Homes where an iteration fits beside gradients that wait, or lacks least; None: none."""
        inputs = replace(self.inputs, trace=with_bytes_added(trace, self.waiting_bytes))
        return lowered(self.plan, inputs, self.inputs, self.policy, params_stay=params_stay)

    def peak_bytes(self, trace: Trace) -> int | None:
        """Peak on the device of such an iteration in the homes that it would get; None: none."""
        try:
            found = plan_within(self.plan, replace(self.inputs, trace=trace), self.policy)
        except BudgetError as error:
            error.without_frames()
            lowered = self.lowered(trace, params_stay=False)
            if lowered is None:
                return None
            found = lowered.result
        return max(found.profile.total(Tier.DEVICE)[: found.plan.num_trace_moments])

    def raised(self, trace: Trace) -> Raised | None:
        """Higher homes, if such iterations leave room; None if nothing is promoted."""
        inputs, here = replace(self.inputs, trace=trace), self.plan
        try:
            now = plan_within(here, inputs, self.policy)
            found = plan_above(here, inputs, self.policy)
        except BudgetError as error:
            error.without_frames()
            return None
        if not _differ(here, found.plan):
            return None
        moved, links = promoted_bytes(self.plan, found.plan), inputs.bandwidths
        asked = price(moved, links, has_host_tier=inputs.has_host_tier)
        return Raised(inputs, found, now.cost.seconds - found.cost.seconds, asked)

    def use_lowered(self, trace: Trace, lowered: Lowered) -> None:
        """Use the homes of `lowered`, in which all is by now, for a trace to come."""
        if trace.kind == "train":
            self.has_trace = self.homes_are_final = True
            self.use_plan(lowered.result, lowered.inputs)
            if lowered.refused is not None:
                self.keep_lacking(trace, lowered)
            return
        assert lowered.training is not None
        self.use_plan(lowered.training, self.inputs)
        self._keep(IterationPlan(trace, lowered.result, lowered.refused is not None))

    def keep_lacking(self, trace: Trace, lowered: Lowered) -> None:
        """Keep the plan of an iteration that lacks room in the lowest homes, which these are."""
        self._keep(IterationPlan(trace, lowered.result, lacks=True))

    def say_lacking(self, trace: Trace, lowered: Lowered, *, is_measured: bool) -> None:
        """Say, before its forward, that an iteration fits in no homes."""
        refused, of = lowered.refused, f" of {trace.signature}" if trace.signature else ""
        assert refused is not None
        if is_measured:
            self._say(trace, refused, of)
            return
        said = in_words_of(self.policy, self.machine, refused)
        log.warning("an iteration%s may need more memory than any homes leave: %s", of, said)

    def higher(self) -> PlanResult | None:
        """Plan result with homes raised to what the first trace leaves room for; once.

        Collective. None if nothing is promoted. `use_plan` makes it the plan.
        """
        if self.homes_are_final or not self.has_trace or isinstance(self.policy, StaticPlacement):
            return None
        self.homes_are_final = True
        try:
            found = plan_above(self.plan, self.inputs, self.policy)
        except BudgetError as error:
            log.warning("homes stay as they are: %s", error)
            return None
        self.compare(found.plan)
        return found if _differ(self.plan, found.plan) else None

    @contextmanager
    def growing(self, trainable: Collection[ChunkId]) -> Iterator[None]:
        """Plan gradients and state of chunks that were frozen, and that the body lets train.

        Collective. Raises BudgetError if they fit nowhere; then, and if the body raises, the plan
        is the one before.
        """
        before = self.inputs, self.result, self._begun
        layout = self.inputs.layout.with_trainable(trainable)
        inputs = replace(self.inputs, layout=layout)
        planned = plan_grown(self.plan, inputs, self.policy)
        begun, was_measured = self._begun
        self._begun = replace(begun, layout=layout), was_measured
        self.inputs, self.result = inputs, planned
        self._forget_plans()
        try:
            self.compare(self.plan)
            yield
        except BaseException:
            self.inputs, self.result, self._begun = before
            self._forget_plans()
            raise

    def wait_beside(self, nbytes: int) -> None:
        """Plan the coming iteration beside so many bytes of gradients on the device."""
        self.waiting_bytes = nbytes

    def use_plan(self, planned: PlanResult, inputs: PlanInputs | None = None) -> None:
        """Make this the plan of training: shards and state are in its homes by now.

        inputs: what it was made with, where that is another trace.
        """
        self.result = planned
        homes = tuple(shard.param_home for shard in planned.plan.shards)
        self.inputs = replace(inputs or self.inputs, fixed_params=homes)
        self._forget_plans()

    def asked_by(self, trace: Trace) -> Trace:
        """Trace that counts for homes: one that was given with the module if it is of such an
        iteration and asks for as much, so that homes do not depend on what else was measured."""
        begun, was_given = self._begun
        given = begun.trace
        is_like = (given.kind, given.signature) == (trace.kind, trace.signature)
        return given if was_given and is_like and covers(given, trace, self._noise_bytes) else trace

    def _planned_for(self, kind: Kind, signature: str) -> IterationPlan | None:
        """What was planned for such an iteration, beside the gradients that wait; None: nothing."""
        known = self.others.find(kind, signature, self.waiting_bytes)
        trace = self.inputs.trace
        of_any = trace.signature == ASSUMED_SIGNATURE
        if (
            known is None
            and self.has_trace
            and not self.waiting_bytes
            and trace.kind == kind
            and (of_any or trace.signature == signature)
        ):
            return IterationPlan(trace, self.result)
        return known

    def plan_of_forward(self, signature: str) -> Plan | None:
        """Plan of training with such inputs here; None: nobody knows what they ask for."""
        one_rank = self.comm.world_size == 1
        planned = self._planned_for("train", signature if one_rank else self.levels.signature)
        return None if planned is None or planned.result is None else planned.result.plan

    def steps_for(self, kind: Kind, signature: str) -> GatherSteps | None:
        """Gather steps that are planned for such an iteration."""
        planned = self._planned_for(kind, signature)
        return None if planned is None or planned.result is None else planned.result.steps

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


@dataclass(frozen=True, eq=False, slots=True)
class PlanInUse:
    """Plan in use of one engine, with what carries it out and what watches it."""

    planning: Planning
    storage: ShardStorage  # has shards and gradients in their homes
    manager: StatefulTensorMgr  # gathers and releases
    sampler: Sampler  # measures iterations
    ledger: MemoryLedger  # counts bytes

    def follow(self) -> None:
        """Read files ahead in the order of the plan, which has changed."""
        self.storage.adopt_plan(self.planning.plan)

    def place_gradients(self, chunks: list[Chunk]) -> None:
        """Put gradients into the homes of the plan."""
        self.storage.place_gradients(self.planning.plan, chunks)


def _differ(plan: Plan, other: Plan) -> bool:
    """Whether homes of parameters or of state differ."""
    return any(
        (old.param_home, old.state_homes) != (new.param_home, new.state_homes)
        for old, new in zip(plan.shards, other.shards, strict=True)
    )


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
