"""The optimizer state behind an engine's shards: where its blocks are, and the masters among it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gemini.chunk.storage import Chunk
from gemini.nvme import NvmeError
from gemini.optim.rules.config import NvmeConfig, StateConfig
from gemini.optim.rules.rule import UpdateRule, Works
from gemini.optim.rules.state_layout import MASTER
from gemini.optim.state.pieces import Planes
from gemini.optim.state.space import Block, Segment, StateSpace
from gemini.optim.state.state_stream import BlockFiller
from gemini.optim.state.tiered_state import TieredState
from gemini.optim.step.target import Target
from gemini.optim.target import Group, owner_of
from gemini.placement.fit import StateRequest, optimizer_state
from gemini.placement.plan import Plan
from gemini.placement.sizes import UNLIMITED, BudgetError
from gemini.placement.tiers import Tier
from gemini.placement.timetable.updates import is_early
from gemini.runtime.events import EngineEvents
from gemini.runtime.gradients.waiting import Gradients
from gemini.runtime.memory.user_writes import refresh_master
from gemini.runtime.overlap import UpdateOverlap
from gemini.runtime.passes import Passes
from gemini.runtime.schedule.planning import PlanInUse
from gemini.runtime.step.executors import make_shard_executor, run_of, updated_by_kernels
from gemini.runtime.step.tail import StepTail
from gemini.runtime.weights import Weights
from gemini.units import BlockId, ChunkId

from .shard_blocks import HostReader, ShardMasters, Shards

if TYPE_CHECKING:
    from gemini.nvme import BlockStore

    from .kept_steps import KeptSteps
    from .matrices import MatrixBuckets


@dataclass(frozen=True, slots=True)
class StepCalls:
    """Functions of the engine that a step calls."""

    begin: Callable[[], None]  # ends what is under way, and masters follow what the user wrote
    agree_on_trace: Callable[[], None]  # collective, behind the vote
    meet: Callable[[str], None]  # before a method that all ranks must call
    detach: Callable[[], None]  # the optimizer was closed
    gradients: Gradients
    buffers: Callable[[], Iterable[Tensor]]  # persistent ones of the module


class ShardState(Target):
    """State of this rank's shards of all trainable chunks; fp32 masters where there are any."""

    def __init__(
        self,
        *, in_use: PlanInUse, weights: Weights, passes: Passes, overlap: UpdateOverlap,
        events: EngineEvents, calls: StepCalls, groups: Sequence[Group], rule: UpdateRule,
        config: StateConfig,
    ) -> None:  # fmt: skip
        sharding, cycle = weights.sharding, calls.gradients.cycle
        planning, storage = in_use.planning, in_use.storage
        group_of = param_groups_of(sharding.params, groups)  # first: it refuses what is not ours
        if rule.measures:
            from .shard_param_and_grad import check_not_split

            check_not_split(sharding)
        shapes = [spec.shape for spec in sharding.layout.params]
        super().__init__(sharding.params, rule, groups, group_of, shapes)
        self._sharding, self._planning, self._storage = sharding, planning, storage
        self._cycle, self._overlap, self._events = cycle, overlap, events
        self._passes = passes
        self._weights, self._manager, self._ledger = weights, in_use.manager, in_use.ledger
        self._calls = calls
        self._tail = StepTail(weights, passes, overlap, in_use)
        self._reader = HostReader(sharding.backend)  # of masters that a device has
        self._chunks = [chunk for chunk in sharding.chunks if chunk.spec.trainable]
        self._names = [spec.name for spec in sharding.layout.params]
        self._matrices_of: tuple[list[Chunk], MatrixBuckets] | None = None  # of these chunks
        self._was_loaded = False
        self.parks_as = config.nvme  # files that parking writes
        self._make_state(config.nvme, config.nvme_fraction)
        matrices = None
        if rule.works is Works.ON_MATRICES:
            from .matrices import matrix_updates

            matrices = matrix_updates(
                sharding, planning, rule, group_of, self._columns, lambda: self._matrices().buckets
            )
        self._executor = make_shard_executor(
            sharding, planning.plan, cycle.control_vector, rule, self._tiered_state.layout,
            self._executor_groups, [run_of(sharding.layout, chunk) for chunk in self._chunks],
            config.cpu_path, matrices, is_stage=passes.stage is not None,
        )  # fmt: skip
        self.kept_steps: KeptSteps | None = None
        if config.nvme.keep_versions and self._tiered_state.nvme is not None:
            from .kept_steps import KeptSteps

            self.kept_steps = KeptSteps(
                self._tiered_state, storage, cycle.control_vector, calls.buffers, events.forward
            )
        self._begin()

    def _begin(self) -> None:
        """Make what takes steps with the state that is made by now."""

    def _make_state(self, nvme: NvmeConfig, fraction: float) -> None:
        """Make the state where the engine's plan has it."""
        layout, columns, chunks = self._rule.layout, self._columns, self._sharding.chunks
        master_weights = self._sharding.precision_settings.master_weights
        if master_weights and any(c.dtype != torch.float32 for c in self._chunks):
            layout = layout.with_master()
        state = optimizer_state(
            layout, [chunk.spec for chunk in chunks],
            in_files={chunk.spec.id for chunk in chunks if chunk.files is not None},
            in_payloads={chunk.spec.id for chunk in chunks if chunk.may_be_payload},
            num_versions=nvme.num_versions, columns=columns,
        )  # fmt: skip
        planning = self._planning
        request = StateRequest(state, fraction, nvme.block_numel, nvme.depth)
        if columns.of_param:
            request = replace(request, waiting=self._matrices().waiting)
        self._waiting = request.waiting
        try:
            planning.plan_state(request)
        except BudgetError as error:
            raise self._naming_matrix(error) from None
        disk = replace(nvme, block_numel=planning.block_numel)
        space = self._space(planning.block_numel)
        self._storage.configure_files(planning.block_numel, disk.depth, disk.meter)
        plan = planning.plan
        if not disk.folders and planning.nvme_folder is not None:
            disk = replace(disk, folders=(planning.nvme_folder,))
        self._tiered_state = TieredState(
            space,
            layout,
            on_nvme=self._planned_on(Tier.NVME, plan, space),
            on_host=self._planned_on(Tier.HOST, plan, space),
            nvme=disk,
            memory=self._sharding.backend,
            label=self._storage.config.label,
            num_ahead=planning.inputs.num_ahead,
            num_waiting=request.waiting.blocks(planning.block_numel),
            columns=columns,
            split=ShardMasters(self._chunks, state),
            room=self._room(),
        )
        if nvme.keep_versions:
            self._check_kept()
        self._split_in_memory = state.split_in_memory
        self._events.keeping.listen(self._refresh_from_payload)
        shards = Shards(self._chunks)
        self._unfilled = Counter(block.shard for block in space.blocks)
        try:
            self._tiered_state.initialise(partial(self._fill_master, shards))
        except BaseException:
            self._events.keeping.leave(self._refresh_from_payload)
            self._tiered_state.close()
            raise
        shards.end()
        self._storage.originals.keep(
            [c.spec.id for c in self._sharding.chunks if not c.spec.trainable]
        )

    @property
    def needs_wholes(self) -> bool:
        """Whether updates need more than one rank's part of a parameter."""
        return self._rule.needs_wholes

    @property
    def names(self) -> dict[int, str]:
        return {id(p): name for p, name in zip(self.params, self._names, strict=True)}

    @property
    def has_master(self) -> bool:
        return self._tiered_state.layout.has_master

    @property
    def by_kernels(self) -> bool:
        """Whether kernels of a device update every element alike, in one pass."""
        rule = self._rule
        alike = rule.works is Works.ON_ELEMENTS and not (rule.measures or rule.by_operators)
        return alike and updated_by_kernels(self._planning.plan, self._sharding.backend)

    def _room(self) -> int:
        """Blocks in host memory that may have a second version: where a budget bounds it, as many
        as it leaves room for."""
        plan = self._planning.plan
        if not is_early(self._overlap.asked) or not self.by_kernels:
            return 0
        blocks = [b for sizes, shard in zip(plan.chunks, plan.shards, strict=True)
                  for b, home in zip(sizes.blocks, shard.state_homes, strict=True)
                  if home is Tier.HOST]  # fmt: skip
        if plan.budgets.host >= UNLIMITED or not blocks:
            return len(blocks)
        # its new weights too
        largest = max(block.state_bytes + block.param_bytes for block in blocks)
        result = self._planning.result
        left = plan.budgets.host - result.profile.peak(Tier.HOST)
        return min(len(blocks), max(0, left // largest))

    @property
    def untouched(self) -> bool:
        """Whether moments and counts are zero: no step was taken and nothing loaded."""
        return self._num_steps == 0 and not self._was_loaded

    @property
    def _small_state(self) -> list[Tensor]:
        """Tensors that every rank has whole: counts of steps, and what a rule keeps of measures."""
        return [self._executor.counts, *self._measuring.tensors]

    def _matrices(self) -> MatrixBuckets:
        """Buckets of the matrices that are trained now."""
        from .matrices import matrices_of

        if self._matrices_of is None or self._matrices_of[0] != self._chunks:
            found = matrices_of(self._sharding, self._chunks, self._columns)
            self._matrices_of = [*self._chunks], found
        return self._matrices_of[1]

    def _naming_matrix(self, error: BudgetError) -> BudgetError:
        """Add the matrix that staging has to hold to an error, where matrices are updated whole."""
        largest = self._matrices().largest() if self._columns.of_param else None
        if largest is None:
            return error
        return error.also(
            f"; blocks on NVMe wait in memory for the largest matrix among them, "
            f"{self._names[largest.param]} {list(largest.shape)}"
        )

    def _check_kept(self) -> None:
        """Raise ValueError where some of the state has one version."""
        state = self._tiered_state
        in_files = any(chunk.files is not None for chunk in self._chunks)
        try:
            if state.in_memory:
                raise ValueError(
                    f"NvmeConfig(keep_versions=...): {len(state.in_memory)} blocks of state are in "
                    "memory, and have one version; expected all on disk: leave "
                    "nvme_offload_fraction=1.0, and give nvme_budget room for all versions"
                )
            if in_files and not state.layout.has_master:
                raise ValueError(
                    "NvmeConfig(keep_versions=...): parameters on NVMe without fp32 masters have "
                    "no version to go back to; keep them in memory, or train with "
                    'precision="bf16" and masters'
                )
        except ValueError:
            state.close()
            raise

    @property
    def committed_step(self) -> int:
        """Step that files of state have; 0 where there are none."""
        return self.tiered_state.committed_step

    def promote_state(self, plan: Plan) -> None:
        """Promote blocks of state to where `plan` has them; see `TieredState.promote`."""
        space = self.tiered_state.space
        self.tiered_state.promote(
            on_nvme=self._planned_on(Tier.NVME, plan, space),
            on_host=self._planned_on(Tier.HOST, plan, space),
        )

    def demote_state(self, plan: Plan) -> None:
        """Demote blocks of state to where `plan` has them; see `TieredState.demote`."""
        space = self.tiered_state.space
        self.tiered_state.demote(
            on_nvme=self._planned_on(Tier.NVME, plan, space),
            on_host=self._planned_on(Tier.HOST, plan, space),
        )

    def extend(self, chunks: Sequence[Chunk]) -> None:
        """Keep state of these chunks too, which were frozen; where the engine's plan has it."""
        self.settle()
        rounded = [c for c in chunks if c.dtype != torch.float32]
        if (
            rounded
            and self._sharding.precision_settings.master_weights
            and not self._tiered_state.layout.has_master
        ):
            raise RuntimeError(
                "the optimizer was made without fp32 masters, as all that was trained was fp32; "
                "what is trained now has 16 bits, so make the optimizer when all of it is trained"
            )
        self._chunks += chunks
        space = self._space(self._planning.block_numel)
        self._check_waiting(len(chunks))
        shards = Shards(self._chunks)
        self._unfilled.update(
            block.shard for block in space.blocks[len(self._tiered_state.space.blocks) :]
        )
        plan = self._planning.plan
        try:
            self._tiered_state.extend(
                space,
                partial(self._fill_master, shards),
                on_nvme=self._planned_on(Tier.NVME, plan, space),
                on_host=self._planned_on(Tier.HOST, plan, space),
            )
        except BaseException:
            del self._chunks[-len(chunks) :]
            raise
        shards.end()

    def _check_waiting(self, num_new: int) -> None:
        """Raise RuntimeError where new matrices ask for more staging than was planned."""
        if not self._columns.of_param or self._waiting.holds(self._matrices().waiting):
            return
        del self._chunks[-num_new:]
        raise RuntimeError(
            "the optimizer was made when only smaller matrices were trained, and has no room for "
            "blocks that wait for larger ones; make it when all of them are trained"
        )

    def _space(self, block_numel: int) -> StateSpace:
        """Space of the chunks in the order in which they came to be trained."""
        base = 0
        segments: list[Segment] = []
        for chunk in self._chunks:
            for part in self._sharding.layout.shard_segments(chunk.spec, chunk.rank):
                segments.append(
                    Segment(part.param, part.param_offset, part.numel, base + part.offset)
                )
            base += chunk.spec.shard_numel
        return StateSpace.build(
            segments, [chunk.spec.shard_numel for chunk in self._chunks], block_numel
        )

    def _planned_on(self, tier: Tier, plan: Plan, space: StateSpace) -> frozenset[BlockId]:
        """Blocks of a space that a plan has on a tier. The plan numbers them in layout order."""
        found, place = [], {chunk.spec.id: i for i, chunk in enumerate(self._chunks)}
        of_shard: dict[int, list[BlockId]] = {}
        for block in space.blocks:
            of_shard.setdefault(block.shard, []).append(block.id)
        for shard in plan.shards:
            if shard.chunk in place:
                blocks = of_shard.get(place[shard.chunk], [])
                homes = zip(blocks, shard.state_homes, strict=True)
                found += [block for block, home in homes if home is tier]
        return frozenset(found)

    @property
    def tiered_state(self) -> TieredState:
        """State of the last step in its tiers, for readers: what is under way ends first."""
        self.settle()
        return self._tiered_state

    def settle(self) -> None:
        """Wait until the last step counts. Raises what ended it; then it is undone."""
        self._tail.settle()

    @property
    def trained(self) -> Sequence[Chunk]:
        """Chunks in the order of the shards of the state space."""
        return self._chunks

    @property
    def pinned_seconds(self) -> float:
        """Seconds for which steps waited for an asynchronous save to read what they overwrite."""
        nvme = self._tiered_state.nvme
        return 0.0 if nvme is None else nvme.pinned_seconds

    def movable(self) -> Sequence[Tensor]:
        self._calls.begin()
        self._manager.release_all()
        own = self.tiered_state.movable()
        return [*own, *(tensor for chunk in self._sharding.chunks for tensor in chunk.movable())]

    @property
    def stores(self) -> Sequence[BlockStore]:
        return [*super().stores, *self._storage.stores]

    # -- masters --

    def read_master(self, chunk: Chunk) -> Tensor:
        """[S] fp32 in host memory, which is not pinned: the weights of a trainable chunk's shard as
        the optimizer has them."""
        if not self.has_master:
            values, numel = torch.empty(chunk.spec.shard_numel), self._planning.block_numel
            for into, weights in zip(
                values.split(numel), chunk.load_shard().split(numel), strict=True
            ):
                self._read(into, weights)
        else:  # of every block: what a device has of the shard need not come
            values = torch.zeros(chunk.spec.shard_numel)
            look = _masters(lambda block, master: self._read(values[block.elements], master))
            self.tiered_state.visit(look, self._blocks_of({chunk.spec.id}))
        self._reader.end()
        return values

    def _read(self, into: Tensor, weights: Tensor) -> None:
        """Copy weights to host memory in fp32; before `_reader` has ended, only those of CUDA may
        be on their way."""
        if weights.is_cuda:
            self._reader.read(into, weights.float())
        else:
            into.copy_(weights)

    @torch.no_grad()
    def write_master(self, chunk: Chunk, values: Tensor) -> None:
        """The inverse: fp32 [S] to the masters and, rounded, to the shard."""
        state = self.tiered_state
        fill = _masters(lambda block, master: master.copy_(values[block.elements]))
        with self.shards_with_masters():
            chunk.store_shard(values)
            state.overwrite(fill, self._blocks_of({chunk.spec.id}))

    @contextmanager
    def shards_with_masters(self) -> Iterator[None]:
        """Shards and masters are set together: where a disk fails, shards in memory go back to the
        masters that are kept. Split masters share bits with a shard that failed: both stay."""
        try:
            yield
        except BaseException:
            in_memory = {c.spec.id for c in self._chunks if c.files is None}
            with suppress(NvmeError):  # the disk is gone, and what it had of the masters
                shards = Shards(self._chunks)
                self._tiered_state.visit(shards.store_master, self._blocks_of(in_memory))
            raise

    @torch.no_grad()
    def refresh_masters(self, chunks: Set[ChunkId]) -> None:
        """The user wrote to these shards: masters that do not round to them take their values."""
        shards = Shards(self._chunks)
        fill = _masters(
            lambda block, master: refresh_master(master, shards.of(block)[block.elements])
        )
        self.tiered_state.overwrite(fill, self._blocks_of(chunks))

    @torch.no_grad()
    def _refresh_from_payload(self, chunk: Chunk) -> None:
        """A written payload replaces the shard: refresh masters in memory that share its bits."""
        if chunk.spec.id not in self._split_in_memory:
            return
        chunk.wait_gathered()
        written = chunk.written()
        fill = _masters(lambda block, master: refresh_master(master, written[block.elements]))
        here = {block.id for block in self._tiered_state.in_memory}
        blocks = [block for block in self._blocks_of({chunk.spec.id}) if block.id in here]
        self._tiered_state.overwrite(fill, blocks)

    def give_masters_back(self) -> None:
        """To where they started from, for what comes after this optimizer."""
        if self._tiered_state.layout.has_master:
            for chunk in self._chunks:
                self._storage.originals.put(chunk.spec.id, self.read_master(chunk))

    def _blocks_of(self, chunks: Set[ChunkId]) -> list[Block]:
        return [
            block
            for block in self._tiered_state.space.blocks
            if self._chunks[block.shard].spec.id in chunks
        ]

    @property
    def _uses_disk(self) -> bool:
        """Whether some rank has state or parameters on disk: shards are equal, blocks not."""
        return bool(self._planning.plan.blocks_on(Tier.NVME) or self._storage.params)

    def _fill_master(self, shards: Shards, block: Block, planes: Planes) -> None:
        """Masters start as the original fp32 weights, not as the rounded ones."""
        if MASTER not in planes:
            return
        chunk = self._chunks[block.shard]
        original = self._storage.originals.get(chunk.spec.id)
        if original is None:
            original = shards.of(block)
        planes[MASTER].copy_(original[block.elements])
        if chunk.spec.id in self._split_in_memory:  # whose shard the user may have written to
            refresh_master(planes[MASTER], shards.of(block)[block.elements])
        self._unfilled[block.shard] -= 1
        if self._unfilled[block.shard] == 0:
            self._storage.originals.drop(chunk.spec.id)  # one chunk's worth twice, at most


def _masters(look: Callable[[Block, Tensor], object]) -> BlockFiller:
    """Visitor of blocks, and filler, that `look`s at masters alone."""

    def show(block: Block, planes: Planes) -> None:
        if MASTER in planes:
            look(block, planes[MASTER])

    return show


def param_groups_of(params: Sequence[Tensor], groups: Sequence[Group]) -> list[int | None]:
    """The param group of each of an engine's parameters; None for one that is not optimized."""
    found: list[int | None] = [None] * len(params)
    index_of = {id(param): i for i, param in enumerate(params)}
    for index, group in enumerate(groups):
        for param in group["params"]:
            if id(param) in index_of:
                found[index_of[id(param)]] = index
            elif owner_of(param) is not owner_of(params[0]):  # nor of another part of it
                raise ValueError(
                    f"group {index} of the optimizer has a parameter of shape {tuple(param.shape)} "
                    "that is not a parameter of the wrapped module; make the optimizer from "
                    "model.parameters()"
                )
    return found
