"""Problem that the planner solves; tiers of every shard and block, and the buffers and files that
they take. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from math import inf

from gemini.chunk.layout import ChunkLayout, ChunkSpec
from gemini.memtracer.layers import recomputing, with_seconds
from gemini.memtracer.trace import Phase, Trace
from gemini.units import (
    BLOCK_NUMEL,
    FROZEN_BLOCK_BYTES,
    PAGE_BYTES,
    ChunkId,
    ParamId,
    align_up,
    format_bytes,
)

from .plan import SavedHomes, Staging, UpdatePath
from .policy import StaticPlacement, leading_within, never_released
from .saved import Spilling
from .sizes import (
    FP32_BYTES,
    NOT_WAITING,
    Bandwidths,
    BlockBytes,
    Budgets,
    ChunkBytes,
    StateBytes,
    Waiting,
    chunk_bytes,
    file_bytes,
)
from .tiers import Tier

DEVICE_BUFFERS = 3  # of a kind: one travels in, one is updated, one travels out
_STORE_BYTES = 1 << 16  # header of a store
_INDEX_BYTES = 64  # of a store, a block: both slots, and its place in the header
# Problems of one run differ in trace and budgets, and ask for the same sizes: those of its plan
_sizes_of = lru_cache(maxsize=1)(chunk_bytes)


@dataclass(slots=True)
class Homes:
    """A draft of all homes; `plan.ShardPlan` in the making. Indexed by chunk, blocks in order."""

    param: list[Tier]
    grad: list[Tier]
    state: list[list[Tier]]
    never_released: list[bool]
    device_staging: Staging = field(default_factory=Staging)
    host_staging: Staging = field(default_factory=Staging)
    saved: SavedHomes | None = None  # of bytes saved for backward; None: all stay
    recomputed: int = 0  # the first so many layers are computed again in backward

    @classmethod
    def all_on(cls, tier: Tier, chunks: Sequence[ChunkBytes]) -> Homes:
        return cls(
            [tier for _ in chunks],
            [tier for _ in chunks],
            [[tier for _ in chunk.blocks] for chunk in chunks],
            [False for _ in chunks],
        )

    def copy(self) -> Homes:
        return replace(
            self, param=list(self.param), grad=list(self.grad), state=[list(r) for r in self.state]
        )


@dataclass(frozen=True, kw_only=True)
class PlanInputs:
    """Problem that the planner solves: all that a plan follows from. The same on all ranks, which
    reduce it first (ADR 0003)."""

    layout: ChunkLayout
    trace: Trace
    state: StateBytes
    budgets: Budgets = field(default_factory=Budgets)  # of one rank
    bandwidths: Bandwidths = field(default_factory=Bandwidths)
    has_host_tier: bool = True  # else the device is RAM
    # of all blocks whose state is not on the device: one path, that of the backend
    off_device: UpdatePath = UpdatePath.STREAM
    depth: int = 2  # blocks read ahead of their update
    num_ahead: int = 0  # more buffers: blocks are updated after their step, or leave together
    waiting: Waiting = NOT_WAITING  # elements that wait for other blocks of their step
    brings_params: bool = False  # updates make new weights apart from the old ones
    max_prefetch: int = 1  # payloads begun before their use
    nvme_state_frac: float = 0.0  # share of the state's bytes that must be on NVMe
    block_numel: int = BLOCK_NUMEL
    flops: float = 0.0  # operations of a forward and backward, where the trace was not timed
    fixed_params: tuple[Tier, ...] | None = None  # homes of parameter shards that exist already
    with_originals: frozenset[ChunkId] = frozenset()  # frozen ones keep fp32 values
    original_home: Tier | None = None  # where these values live already
    average: tuple[tuple[Tier, int], ...] = ()  # bytes of averages of weights: `average_bytes`
    spilling: Spilling | None = None  # how saved bytes leave the device; None: they stay
    recomputed: int | None = None  # layers computed again in backward; None: as many as is best
    floor: Homes | None = None  # homes that exist already, below which nothing goes
    ceiling: Homes | None = None  # the same, above which nothing goes but gradients
    saved: SavedHomes | None = None  # of bytes saved for backward, as tried; None: all stay

    @cached_property
    def chunks(self) -> tuple[ChunkBytes, ...]:
        """Sizes of every chunk."""
        return _sizes_of(self.layout, self.state, self.block_numel, self.with_originals)

    @property
    def originals_on(self) -> Tier:
        """Tier of the fp32 originals of frozen chunks, all of them."""
        return self.original_home or self.memory

    @property
    def memory(self) -> Tier:
        """Tier of the RAM."""
        return Tier.HOST if self.has_host_tier else Tier.DEVICE

    @property
    def backward(self) -> int:
        """First moment of backward."""
        moments = self.trace.moments
        return next((i for i, m in enumerate(moments) if m.phase == "backward"), len(moments))

    def compute_weights(self) -> list[int]:
        """Share of every moment of the trace in what a pass computes: in backward, gradients of
        inputs, and of the weights that are trained."""
        return [
            sum(self._products(p, m.phase) for p in m.params) if m.edge == "enter" else 0
            for m in self.trace.moments
        ]

    def _products(self, param: ParamId, phase: Phase) -> int:
        spec = self.layout.params[param]
        return spec.numel * (1 if phase == "forward" else 1 + spec.trainable)

    def compute_seconds(self) -> list[float]:
        """Seconds of every moment of the trace: as it was timed, else as `flops` has it."""
        timed = [m.seconds for m in self.trace.moments]
        weights = self.compute_weights()
        if any(timed) or not any(weights) or self.bandwidths.flops == inf:
            return timed
        whole, seconds = sum(weights), self.flops / self.bandwidths.flops
        return [seconds * weight / whole for weight in weights]

    def recomputing(self, number: int) -> PlanInputs:
        """Inputs with the first `number` layers computed again in backward."""
        if number == self.trace.recomputed:
            return self
        trace = self.trace
        if not any(m.seconds for m in trace.moments):
            trace = with_seconds(trace, self.compute_seconds())
        return replace(self, trace=recomputing(trace, number))

    @property
    def streams(self) -> bool:
        """Whether a device updates blocks that live elsewhere, and so travel to it and back."""
        return self.has_host_tier and self.off_device is UpdatePath.STREAM

    def original_bytes(self, tier: Tier) -> int:
        """Bytes of fp32 originals that stay on `tier`."""
        if tier is not self.originals_on:
            return 0
        return sum(chunk.original_bytes for chunk in self.chunks)

    def kept_bytes(self, tier: Tier) -> int:
        """Bytes of originals and averages, which no step moves, and of what is saved for backward
        below the device, with its buffers."""
        total = self.original_bytes(tier) + dict(self.average).get(tier, 0)
        if self.saved is not None:
            total += self.saved.host_bytes * (tier is Tier.HOST)
            total += self.saved.staging_bytes * (tier is self.memory)
        return total

    def fewer_originals(self, tier: Tier) -> str:
        """Remedy for a tier that is too small and holds originals; "" where it holds none."""
        nbytes = self.original_bytes(tier)
        if not nbytes:
            return ""
        return (
            f", or leave keep_originals=True out: {format_bytes(nbytes)} are fp32 originals of "
            "frozen weights"
        )

    def lowest(self, tier: Tier) -> Homes:
        """Homes with everything on `tier` that may be there."""
        homes = Homes.all_on(tier, self.chunks)
        if self.fixed_params is not None:
            homes.param = list(self.fixed_params)
        if self.floor is not None:
            homes.param = _higher(homes.param, self.floor.param)
            homes.state = list(map(_higher, homes.state, self.floor.state))
            homes.grad = _higher(homes.grad, self.floor.grad)
        if self.ceiling is not None:
            homes.param = _lower(homes.param, self.ceiling.param)
            homes.state = list(map(_lower, homes.state, self.ceiling.state))
        return homes

    def may_be_here(self, kind: str, chunk: ChunkId, block: int = 0) -> bool:
        """Whether a chunk (of its state: a block) may live on the device: no ceiling forbids it."""
        if self.ceiling is None:
            return True
        row = self.ceiling.state[chunk][block] if kind == "state" else self.ceiling.param[chunk]
        return row is Tier.DEVICE

    def may_be_lower(self, kind: str, chunk: ChunkId, block: int = 0) -> bool:
        """Whether bytes that the host holds of a chunk (of its state: of a block) may go to
        NVMe."""
        if self.floor is None:
            return not (kind == "param" and self.fixed_params is not None)
        if kind == "state":
            return self.floor.state[chunk][block] is Tier.NVME
        row = self.floor.param if kind == "param" else self.floor.grad
        return row[chunk] is Tier.NVME

    def below(self) -> Tier:
        """Next tier below the device."""
        return Tier.HOST if self.has_host_tier else Tier.NVME

    def staging(self, homes: Homes, *, params_may_promote: bool = False) -> tuple[Staging, Staging]:
        """Buffers on device and host that these homes ask for.

        Files of state, of parameters and of gradients have buffers of their own, each as large as
        the largest block of its kind. A block that is read ahead of the step keeps its parameters
        of memory in its buffer, to undo the step. params_may_promote: parameters on NVMe may move
        to memory later.
        """
        state = param = frozen = grad = early = 0
        for chunk in self.chunks:
            i = chunk.id
            for home in dict.fromkeys(homes.state[i]):
                block = chunk.blocks[homes.state[i].index(home)]  # the largest of this home
                if home is Tier.NVME:
                    undo_file = align_up(block.undo_bytes, PAGE_BYTES)
                    state = max(state, align_up(block.disk_bytes, PAGE_BYTES) + undo_file)
                    in_memory = params_may_promote or homes.param[i] is not Tier.NVME
                    if self.state.has_master and in_memory:
                        early = max(early, block.numel * FP32_BYTES)
                if homes.grad[i] is Tier.NVME:
                    grad = max(grad, align_up(block.param_bytes, PAGE_BYTES))
            if homes.param[i] is Tier.NVME and chunk.blocks:
                param = max(param, align_up(chunk.blocks[0].param_bytes, PAGE_BYTES))
            elif homes.param[i] is Tier.NVME:
                frozen = max(frozen, min(chunk.shard_bytes, FROZEN_BLOCK_BYTES))
        if self.has_host_tier:  # else they are read to where they belong
            param += align_up(frozen, PAGE_BYTES)
        # `depth` blocks are read, one is updated, one is written. Only those read before their step
        # keep parameters to undo it, so `depth` such pieces are spread over all buffers.
        count = self.depth + 2 + self.num_ahead + self.waiting.blocks(self.block_numel)
        undo = -(-early * self.depth // count)
        on_host = Staging(count, align_up(state + undo, PAGE_BYTES), param, grad)
        on_host = on_host if on_host.nbytes else Staging()
        return (self._brought(homes), on_host) if self.has_host_tier else (on_host, Staging())

    def _brought(self, homes: Homes) -> Staging:
        """Buffers on the device for state, parameters and gradients that updates bring there."""
        if self.off_device is not UpdatePath.STREAM:
            return Staging()
        state = param = grad = 0
        for chunk in self.chunks:
            i = chunk.id
            for home in dict.fromkeys(homes.state[i]):
                block = chunk.blocks[homes.state[i].index(home)]  # the largest of this home
                if home is not Tier.DEVICE:  # wherever: as much as lower homes ask for, or less
                    state = max(state, block.state_bytes, block.disk_bytes)
                if homes.param[i] is not Tier.DEVICE or self.brings_params:
                    param = max(param, block.param_bytes)
                if homes.grad[i] is not Tier.DEVICE:
                    grad = max(grad, block.param_bytes)
        staging = Staging(DEVICE_BUFFERS, state, param, grad)
        return staging if staging.nbytes else Staging()

    def nvme_bytes(self, homes: Homes) -> int:
        """Most bytes that the files of these homes take at once.

        Counted with the planned bytes: fp32 originals of what is trained, from the module's set-up
        until masters have them; after that, once several backwards add up, gradients in fp32.
        """
        total = dict(self.average).get(Tier.NVME, 0)
        total += 0 if self.saved is None else self.saved.file_bytes
        originals = sums = 0
        files, num_blocks = files_of(
            self.chunks, homes.param, homes.grad, homes.state, self.originals_on
        )
        total += files.total()
        for chunk in self.chunks:
            i = chunk.id
            wide = [align_up(b.numel * FP32_BYTES, PAGE_BYTES) for b in chunk.blocks
                    if b.param_bytes < b.numel * FP32_BYTES]  # fmt: skip
            if homes.grad[i] is Tier.NVME:
                sums += sum(wide)
                num_blocks += len(wide)
            if self.state.has_master and Tier.NVME in homes.state[i]:
                originals += sum(wide)
                num_blocks += len(wide)
        gradients = sum(
            file_bytes("gradients", chunk.shard_bytes) for chunk in self.chunks
            if chunk.trainable and homes.grad[chunk.id] is Tier.NVME
        )  # fmt: skip
        # originals are gone when gradients in fp32 begin, and gradients have no file before that
        return total + max(sums, originals - gradients) + store_overhead(num_blocks)


def static_homes(policy: StaticPlacement, problem: PlanInputs) -> Homes:
    """Homes that the fractions say, whatever the machine has; `nvme_state_frac` of the state is on
    NVMe."""
    chunks = problem.chunks
    homes = problem.lowest(Tier.DEVICE)
    stays = never_released(policy, [c.payload_bytes for c in chunks])
    homes.never_released = [c.id in stays for c in chunks]
    blocks = [block for chunk in chunks for block in chunk.blocks]
    total = sum(block.numel for block in blocks)
    on_nvme = problem.nvme_state_frac * total
    off_device = on_nvme
    if problem.has_host_tier:
        off_device = max(on_nvme, policy.offload_optim_frac * total)
        for chunk_id in leading_within([c.shard_bytes for c in chunks], policy.offload_param_frac):
            homes.param[chunk_id] = homes.grad[chunk_id] = Tier.HOST
    taken = 0.0
    first: dict[ChunkId, int] = {}
    for block in blocks:
        i = block.id - first.setdefault(block.chunk, block.id)
        # a block goes down where more than half of it lies within the share
        middle = taken + block.numel / 2
        if middle <= off_device:
            homes.state[block.chunk][i] = Tier.NVME if middle <= on_nvme else Tier.HOST
        taken += block.numel
    if policy.offload_grads:
        for i, states in enumerate(homes.state):
            if set(states) == {Tier.HOST}:
                homes.grad[i] = Tier.HOST
    homes.device_staging, homes.host_staging = problem.staging(homes)
    return homes


def nvme_blocks(
    chunk: ChunkBytes,
    param: Tier,
    grad: Tier | None,
    state: Sequence[Tier],
    original: Tier,
) -> list[tuple[str, int]]:
    """(kind, bytes) of every block that these homes put into a store, and, of kind "frozen", of
    every file of its own."""
    blocks: list[tuple[str, int]] = []
    if original is Tier.NVME and chunk.original_bytes:
        blocks.append(("originals", chunk.original_bytes))
    if param is Tier.NVME and not chunk.blocks:
        blocks.append(("frozen", chunk.shard_bytes))
    for block, home in zip(chunk.blocks, state, strict=True):
        if param is Tier.NVME:
            blocks.append(("parameters", block.param_bytes))
        if grad is Tier.NVME:
            blocks.append(("gradients", block.param_bytes))
        if home is Tier.NVME:
            blocks.append(("state", block.disk_bytes))
            if block.undo_bytes:
                blocks.append(("state", block.undo_bytes))
    return blocks


def files_of(
    chunks: Sequence[ChunkBytes],
    params: Sequence[Tier],
    grads: Sequence[Tier | None],
    states: Sequence[Sequence[Tier]],
    original: Tier,
) -> tuple[Counter[str], int]:
    """Bytes that files take in these homes, by kind, and the blocks that they have a place for."""
    totals, num_blocks = Counter[str](), 0
    has_state = any(Tier.NVME in row for row in states)
    has_params = any(params[chunk.id] is Tier.NVME for chunk in chunks if chunk.trainable)
    for chunk in chunks:
        i = chunk.id
        for kind, nbytes in nvme_blocks(chunk, params[i], grads[i], states[i], original):
            row = "parameters" if kind == "frozen" else kind
            totals[row] += file_bytes(kind, nbytes, chunk.num_versions)
            num_blocks += kind in ("originals", "gradients")
        if has_state:  # its files have a place for all of it
            num_blocks += sum(1 + bool(block.undo_bytes) for block in chunk.blocks)
        if has_params:  # and theirs
            num_blocks += len(chunk.blocks)
    return totals, num_blocks


def average_bytes(
    chunks: Iterable[ChunkSpec], homes: Mapping[ChunkId, Tier], block_numel: int
) -> tuple[tuple[Tier, int], ...]:
    """Bytes of an fp32 average of these chunks' shards, by tier; of files as they are on disk."""
    totals: Counter[Tier] = Counter()
    num_blocks = 0
    for chunk in chunks:
        home, nbytes = homes[chunk.id], chunk.shard_numel * FP32_BYTES
        on_nvme = home is Tier.NVME
        totals[home] += align_up(nbytes, PAGE_BYTES) if on_nvme else nbytes
        num_blocks += -(-chunk.shard_numel // block_numel) if on_nvme else 0
    if num_blocks:
        totals[Tier.NVME] += store_overhead(num_blocks)
    return tuple(totals.items())


def store_overhead(num_blocks: int) -> int:
    """Bytes of a store that are no blocks, at most: header and index."""
    return _STORE_BYTES + num_blocks * _INDEX_BYTES if num_blocks else 0


def step_order(
    chunks: Iterable[ChunkBytes], states: Sequence[Sequence[Tier]]
) -> Iterator[tuple[BlockBytes, Tier]]:
    """Blocks whose state is not on the device, with its home, as a step updates them: those on NVMe
    first, which can still fail."""
    for tier in (Tier.NVME, Tier.HOST):
        for chunk in chunks:
            for block, home in zip(chunk.blocks, states[chunk.id], strict=True):
                if home is tier:
                    yield block, home


def _lower(first: Sequence[Tier], second: Sequence[Tier]) -> list[Tier]:
    """The tier of each pair that is farther from the device."""
    order = list(Tier)
    return [max(pair, key=order.index) for pair in zip(first, second, strict=True)]


def _higher(first: Sequence[Tier], second: Sequence[Tier]) -> list[Tier]:
    """The tier of each pair that is nearer to the device."""
    order = list(Tier)
    return [min(pair, key=order.index) for pair in zip(first, second, strict=True)]
