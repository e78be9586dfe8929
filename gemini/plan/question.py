"""Question: a model, a machine and a batch. Whether it fits, the largest batch, all homes. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from math import expm1, sqrt
from typing import TYPE_CHECKING

from gemini.chunk.layout import ChunkLayout
from gemini.memtracer.trace import Trace
from gemini.optim.rules.state_layout import StateLayout
from gemini.placement.fit import (
    Fitted,
    StateRequest,
    assumed_state,
    few_blocks_numel,
    first_inputs,
    fit_ahead,
    fit_request,
    optimizer_state,
)
from gemini.placement.orders import (
    BATCHES,
    LAYERS,
    ORDERS,
    NoLayersError,
    OrderPrice,
    OrderPrices,
    bytes_read,
    layered,
)
from gemini.placement.planner import PlanInputs, PlanResult, plan_within
from gemini.placement.policy import AUTO, KEEP, AutoPlacement
from gemini.placement.problem import average_bytes
from gemini.placement.sizes import FP32_BYTES, BudgetError, wider_chunks
from gemini.placement.speeds import usual_speeds
from gemini.placement.tiers import Tier
from gemini.placement.timetable.allowed import allowed, kept_for_updates
from gemini.placement.timetable.updates import SERIAL, goes_on
from gemini.units import (
    BLOCK_NUMEL,
    ORIGINAL_BLOCK_NUMEL,
    Bytes,
    ChunkId,
    ParamId,
    format_bytes,
)

from .machine import Hardware
from .training import Training

if TYPE_CHECKING:  # which needs torch
    from .activations import Activations

SLACK_BYTES, SLACK_SHARE = 4 << 20, 0.005  # margin of what is measured, and of RAM that is planned
# oneDNN compiles a product in 16 bits for each number of rows, and keeps the last 1024 of them. An
# expert has two products forward, as many for gradients of inputs, and of weights where they are
# trained.
KEPT_PRODUCTS, EXPERT_PRODUCTS = 1024, 2
SPREAD = 15.0  # distinct batch sizes that an expert sees, divided by sqrt(mean): as measured
MAX_BATCH = 1 << 16
MAX_TOKENS, LENGTHS = 1 << 24, 64  # of a forward; parts of a length to which it is told
BLOCKS_OF_ORIGINALS = 4  # in memory: of values that come, compared, and on their way to a file
# Objects of Python for a block at their most, while a step is planned: measured by tracemalloc
# with blocks of 1024 and of 4096 elements (docs/internals.md)
BLOCK_OBJECTS = 1740  # its place in the state and in plans
STATE_FILE_OBJECTS = 2900  # more, if its state is in a file
FILE_OBJECTS = 1550  # more, if its parameters are in a file; its gradients: the same
TAIL_OBJECTS = 130  # more, if it is updated behind a step
ORIGINAL_OBJECTS = 580  # of a block of fp32 originals in a file
SPLIT_TILES = 2  # of scratch in a thread that updates split masters; all updates have one
DEPTH = 2  # of `NvmeConfig`


@dataclass(frozen=True, slots=True)
class ProcessBytes:
    """RAM of a process beyond a plan's peak, at most.

    floor: of the libraries that are loaded, as measured; None where they were not.
    products: compiled for what is no expert. experts: an estimate of theirs, which has no bound.
    objects: of wrapped parameters. blocks: objects of blocks.
    scratch: of the threads that update.
    held: gradients that it still needs in the forward.
    set_up: by how much wrapping passes the peak with all of the above.
    slack: margin of the bound.
    """

    floor: int | None
    products: int
    experts: int
    objects: int
    blocks: int
    scratch: int
    held: int
    set_up: int
    slack: int

    @property
    def above_floor(self) -> int:
        return sum(astuple(self)[1:])

    @property
    def total(self) -> int:
        return self.above_floor + (self.floor or 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Question(Training):
    """Question: a training of a model on a machine, all that an answer depends on."""

    layout: ChunkLayout
    traced: Activations
    machine: Hardware
    itemsizes: Sequence[int]  # bytes of an element of every parameter as it comes
    planes: StateLayout  # of the state, with masters if parameters have fewer bits
    flops_per_token: float = 0.0
    experts: int = 0  # of all layers
    experts_share: float = 1.0  # of a token's rows that one of them gets, on average
    # the same with or without checkpointing, with adapters of a rank, on a base of a kind, with a
    # chunked loss; None where nobody can say
    other: Callable[[bool, int, str | None, bool], Question | None] | None = field(
        default=None, compare=False
    )
    products: int = 0  # of matrices in 16 bits that an iteration computes, each shape once
    # the same with sequences of another length; None where nobody can say
    at: Callable[[int], Question] | None = field(default=None, compare=False)
    no_chain: str = ""  # why micro-batches cannot run layer by layer, if its modules show that

    @property
    def has_trace(self) -> bool:
        """Whether its order of micro-batches can be traced."""
        try:
            return bool(self.trace.moments)
        except NoLayersError:
            return False

    @property
    def _recomputing(self) -> Question:
        """The same with layers computed again, as they are layer by layer; this where nobody can
        say."""
        if self.checkpointing or self.other is None:
            return self
        return self.other(True, self.lora, self.quantize, self.chunked) or self

    @property
    def _flops(self) -> float:
        """Floating-point operations of an iteration."""
        tokens = self.batch * self.seq
        if self.by_layers:
            return self._recomputing.flops_per_token * self.accumulate * tokens
        return self.flops_per_token * tokens

    @property
    def spills(self) -> bool:
        """Whether activations may leave the device."""
        return self.activations != KEEP

    @property
    def policy(self) -> AutoPlacement:
        """Policy with which a module is wrapped to be placed so."""
        machine = self.machine
        return AutoPlacement(
            f"{machine.device_mem}B", f"{machine.host_mem}B", f"{machine.nvme}B", machine.folder,
            activations=self.activations,
        )  # fmt: skip

    @property
    def with_originals(self) -> frozenset[ChunkId]:
        """Chunks whose fp32 values are kept: until masters have them, or for good."""
        return wider_chunks(self.layout, self.itemsizes, frozen=self.keep_originals)

    @property
    def trace(self) -> Trace:
        """Trace with which a module is wrapped: fp32 sums of gradients are no model data of a
        plan. Raises NoLayersError."""
        if self.by_layers and self.no_chain:
            raise NoLayersError(self.no_chain)
        if self.by_layers:
            sums_of = {
                slot.param: FP32_BYTES * slot.numel
                for chunk in self.layout.chunks if chunk.trainable for slot in chunk.slots
            }  # fmt: skip
            return layered(self._recomputing.traced.at(self.batch), self.accumulate, sums_of)
        traced = self.traced.at(self.batch)
        if self.accumulate == 1:
            return traced
        sums = sum(FP32_BYTES * c.shard_numel for c in self.layout.chunks if c.trainable)
        moments = (
            replace(m, non_model_bytes=Bytes(m.non_model_bytes + sums)) for m in traced.moments
        )
        return replace(traced, moments=tuple(moments))

    def planned(self) -> PlanResult:
        """Plan of the run, as `priced` has it."""
        return self.priced()[1]

    def priced(self) -> tuple[PlanInputs, PlanResult]:
        """Plan of the run, with its time at the machine's speeds; homes are chosen without.

        Raises BudgetError where it does not fit.
        """
        inputs, result = self.fitted()
        recomputed = result.plan.recomputed
        priced = replace(
            inputs, bandwidths=self.machine.bandwidths, flops=self._flops,
            recomputed=0 if recomputed is None else len(recomputed.names),
        )  # fmt: skip
        return priced, plan_within(result.plan, priced, self.policy)

    def wrapped(self) -> Fitted:
        """Plan as `GeminiDDP` makes it with this trace. Raises BudgetError if it does not fit."""
        return self._wrapped(self._begun())

    def _wrapped(self, begun: PlanInputs) -> Fitted:
        # staging of a few takes 1 % of such a model; a run may use smaller ones where it must
        return fit_ahead(
            begun, self.policy, begun.num_ahead, is_measured=True,
            least_block_numel=few_blocks_numel(self.layout),
        )  # fmt: skip

    def fitted(self) -> Fitted:
        """Plan as `GeminiDDP` makes it with this trace, and then its optimizer.

        Raises BudgetError where it does not fit.
        """
        begun = self._begun()
        now = self._wrapped(begun)
        shards = now[1].plan.shards
        alone = {chunk.id for chunk in self.layout.chunks if chunk.num_shards == 1}
        state = optimizer_state(
            self.planes, self.layout.chunks,
            in_files={shard.chunk for shard in shards if shard.param_home is Tier.NVME},
            in_payloads=alone | {shard.chunk for shard in shards if shard.in_payload},
        )  # fmt: skip
        return fit_request(
            now, self.policy, StateRequest(state, self.nvme_fraction, None, DEPTH), begun.num_ahead,
            is_measured=True, least_block_numel=few_blocks_numel(self.layout),
        )  # fmt: skip

    def _begun(self) -> PlanInputs:
        """Inputs of the plan when the module is wrapped."""
        has_host_tier = self.machine.device != "cpu"
        inputs = PlanInputs(
            layout=self.layout,
            trace=self.trace,
            state=assumed_state(self.layout),
            budgets=self.machine.budgets(),
            bandwidths=self.machine.run_speeds or usual_speeds(has_host_tier),
            has_host_tier=has_host_tier,
            with_originals=self.with_originals,
        )
        if self.activations == AUTO:  # what a layer takes has a part in its choice
            links = replace(inputs.bandwidths, flops=self.machine.bandwidths.flops)
            inputs = replace(inputs, bandwidths=links, flops=self._flops)
        inputs = first_inputs(inputs, self.policy, update=self.update, canonical=self.canonical)
        average: tuple[tuple[Tier, int], ...] = ()
        if self.ema is not None:
            home = Tier.NVME if self.ema == "nvme" else inputs.memory
            trained = [chunk for chunk in self.layout.chunks if chunk.trainable]
            homes = {chunk.id: home for chunk in trained}
            average = average_bytes(trained, homes, inputs.block_numel)
        return replace(inputs, average=average)

    def fits(self) -> bool:
        try:
            self.fitted()
        except BudgetError:
            return False
        return True

    def process(self, result: PlanResult, iterations: int | None = None) -> ProcessBytes:
        """RAM that a process takes beyond a plan's peak, as `bench.certificate` tries it.

        What malloc keeps unless MALLOC_MMAP_THRESHOLD_ is set comes on top (docs/memory.md).
        iterations: None is many.
        """
        costs = self.machine.process
        peak = result.profile.peak(Tier.HOST if result.plan.has_host_tier else Tier.DEVICE)
        on_cpu = self.machine.device == "cpu"
        products = on_cpu * costs.product * min(KEPT_PRODUCTS, self.products * self.lengths)
        objects = costs.parameter * len(self.layout.params)
        scratch = on_cpu * self._scratch_bytes(result)
        in_thread = self.runs(result) != SERIAL and not result.plan.has_host_tier
        held = self._kept_bytes(result) if in_thread else 0
        experts = self.expert_bytes(iterations)
        set_up = self._set_up_bytes() - peak - products - experts - scratch - held
        return ProcessBytes(
            costs.floor, products, experts, objects, self._block_objects(result), scratch, held,
            max(0, set_up), SLACK_BYTES + int(SLACK_SHARE * peak),
        )  # fmt: skip

    def expert_bytes(self, iterations: int | None = None) -> int:
        """Estimate of products that a CPU compiles for experts, one for each number of rows."""
        if self.machine.device != "cpu" or not self.experts:
            return 0
        numbers = SPREAD * sqrt(self.experts_share * self.batch * self.seq)
        if iterations is not None:  # each comes at random
            numbers *= -expm1(-iterations * self.experts / numbers)
        per_number = EXPERT_PRODUCTS * (2 if self.lora else 3)
        return int(self.machine.process.product * per_number * numbers)

    def _scratch_bytes(self, result: PlanResult) -> int:
        """Bytes of tiles that threads of a CPU keep from update to update."""
        pairs = zip(result.plan.chunks, result.plan.shards, strict=True)
        blocks = [one for c, s in pairs for one in zip(c.blocks, s.state_homes, strict=True)]
        numel = sum(block.numel for block, _ in blocks)
        is_split = self.planes.has_master and not all(
            b.gives_parameters(home) for b, home in blocks
        )
        return (1 + SPLIT_TILES * is_split) * min(self.machine.process.thread, FP32_BYTES * numel)

    def _block_objects(self, result: PlanResult) -> int:
        """Bytes of objects that blocks have, of state and in files."""
        plan = result.plan
        has_tail = goes_on(self.runs(result))
        total = 0
        for sizes, shard in zip(plan.chunks, plan.shards, strict=True):
            files = (shard.param_home is Tier.NVME) + (shard.grad_home is Tier.NVME)
            each = BLOCK_OBJECTS + FILE_OBJECTS * files + TAIL_OBJECTS * has_tail
            on_disk = sum(home is Tier.NVME for home in shard.state_homes)
            total += each * len(sizes.blocks) + STATE_FILE_OBJECTS * on_disk
            if sizes.original_bytes and plan.original_home is Tier.NVME:
                numel = sizes.original_bytes // FP32_BYTES
                total += ORIGINAL_OBJECTS * -(-numel // ORIGINAL_BLOCK_NUMEL)
        return total

    def _set_up_bytes(self) -> int:
        """Most RAM while a module is wrapped.

        Chunks are filled one after the other. Parameters are made with those of their module, or
        read, in the dtype that they come in; where the module has its values, each is there until
        its chunk is full. fp32 originals that go to a file do so by blocks, where a rank has the
        chunk alone: homes are those of a plan that knows nothing of the optimizer.
        """
        plan = self.wrapped()[1].plan
        ram = Tier.HOST if plan.has_host_tier else Tier.DEVICE
        wrapped = most = 0
        waiting = self._value_bytes()
        made = self._made_bytes(waiting)
        for spec, sizes, shard in zip(self.layout.chunks, plan.chunks, plan.shards, strict=True):
            is_wide = spec.id in self.with_originals
            in_file = plan.original_home is Tier.NVME
            if spec.trainable:
                in_file = Tier.NVME in shard.state_homes
            if self.loaded:
                passing = sum(waiting.values())
            else:
                passing = max(made[slot.param] for slot in spec.slots)
            if is_wide and in_file:
                passing += FP32_BYTES * BLOCKS_OF_ORIGINALS * min(BLOCK_NUMEL, spec.shard_numel)
            if ram is Tier.DEVICE:
                passing += sizes.payload_bytes
                if is_wide and not (in_file and sizes.num_shards * sizes.num_replicas == 1):
                    passing += FP32_BYTES * spec.payload_numel
            most = max(most, wrapped + passing)
            for slot in spec.slots:
                del waiting[slot.param]
            wrapped += sizes.shard_bytes * (shard.param_home is ram)
            wrapped += FP32_BYTES * spec.shard_numel * (is_wide and not in_file)
        return most

    def _value_bytes(self) -> dict[ParamId, int]:
        """Bytes of each parameter in the dtype that it comes in."""
        return {
            slot.param: slot.numel * self.itemsizes[slot.param]
            for chunk in self.layout.chunks
            for slot in chunk.slots
        }

    def _made_bytes(self, values: Mapping[ParamId, int]) -> dict[ParamId, int]:
        """Bytes of the values that are made together with those of each parameter: its module's."""
        owners = {param: self.layout.params[param].name.rpartition(".")[0] for param in values}
        totals = Counter[str]()
        for param, nbytes in values.items():
            totals[owners[param]] += nbytes
        return {param: totals[owner] for param, owner in owners.items()}

    def _kept_bytes(self, result: PlanResult) -> int:
        """Bytes by which gradients that a tail keeps in the forward pass the peak."""
        trace = self.trace
        calls = trace.calls(self.layout.chunk_of())
        backward = [moment.phase for moment in trace.moments].index("backward")
        totals = result.profile.total(Tier.DEVICE)
        kept = kept_for_updates(result.plan, calls, backward)
        most = max(a + b for a, b in zip(totals, kept, strict=False))
        return max(0, most - max(totals))

    def runs(self, result: PlanResult) -> str:
        """The `update` that runs with this plan."""
        return allowed(self.update, result.facts_beside_kernels)

    def seconds(self, result: PlanResult) -> float:
        """Seconds of a step, with all its forwards and backwards."""
        times, update = result.seconds_by_update, self.runs(result)
        more = 0.0 if self.by_layers else (self.accumulate - 1) * result.cost.pass_seconds
        return times.get(update, result.cost.seconds) + more

    def orders(self) -> OrderPrices | None:
        """Prices of both orders of micro-batches, each planned by itself; None for one of them."""
        if self.accumulate == 1:
            return None
        found: dict[str, OrderPrice | str] = {}
        for order in ORDERS:
            asked = replace(self, accumulate_order=order)
            try:
                result = asked.planned()
            except BudgetError as error:
                found[order] = f"does not fit: {format_bytes(error.missing_bytes)} more"
            except NoLayersError as error:
                found[order] = str(error)
            else:
                read = bytes_read(result.plan) * (1 if asked.by_layers else self.accumulate)
                found[order] = OrderPrice(order, read, asked.seconds(result))
        return OrderPrices(found[BATCHES], found[LAYERS])


def largest_batch(question: Question) -> int:
    """Largest batch of a rank that fits; 0 where not even 1 does."""
    low, high = 0, 1
    while high <= MAX_BATCH and replace(question, batch=high).fits():
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        if replace(question, batch=middle).fits():
            low = middle
        else:
            high = middle
    return low


def longest_seq(question: Question) -> int | None:
    """Longest sequence that fits with this batch, to a part in 64; 0 where none does, None where
    the model cannot be asked about another. Each length is traced."""
    at = question.at
    if at is None:
        return None
    most = MAX_TOKENS // question.batch
    low, high = 0, min(question.seq, most)
    while high <= most and at(high).fits():
        low, high = high, 2 * high
    high = min(high, most + 1)
    while high - low > max(1, low // LENGTHS):
        middle = (low + high) // 2
        if at(middle).fits():
            low = middle
        else:
            high = middle
    return low


def homes(planned: PlanResult) -> dict[str, dict[str, int]]:
    """Bytes of every kind on every tier, of one rank; frozen parameters are a kind of their own."""
    kinds = ("parameters", "frozen", "gradients", "state", "originals")
    totals = {kind: Counter[str]() for kind in kinds}
    for sizes, shard in zip(planned.plan.chunks, planned.plan.shards, strict=True):
        kind = "parameters" if sizes.trainable else "frozen"
        totals[kind][shard.param_home.value] += sizes.shard_bytes
        if shard.grad_home is not None:
            totals["gradients"][shard.grad_home.value] += sizes.shard_bytes
        for block, home in zip(sizes.blocks, shard.state_homes, strict=True):
            totals["state"][home.value] += block.bytes_on(home)
        if sizes.original_bytes:
            totals["originals"][planned.plan.original_home.value] += sizes.original_bytes
    totals["average"] = Counter({tier.value: nbytes for tier, nbytes in planned.plan.average})
    usual = ("parameters", "gradients", "state")
    return {kind: dict(tiers) for kind, tiers in totals.items() if tiers or kind in usual}
