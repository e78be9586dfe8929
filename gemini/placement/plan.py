"""The plan: where every shard and state lives, and which moves happen at which moment. Pure.

A plan is a frozen value that every rank makes for itself from the same inputs; ranks compare its
digest. How it is carried out is in docs/adr/0003-a-plan-and-its-executor.md.

What a `Plan` says is carried out. What follows from it, and no executor reads, is its `Forecast`.

Moments 0 .. num_trace_moments - 1 are those of the trace. Behind them comes one moment, the step;
`num_moments` stands for the end of the iteration. What goes on when within a step no plan says: its
flow does (`optim.state.flow`), and a run of it on a clock (`timetable.clock`).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

from gemini.digests import digest_of
from gemini.units import BlockId, Bytes, ChunkId, Moment, format_bytes

from .sizes import Budgets, ChunkBytes
from .tiers import Tier

_STORAGE_PAGES = 64  # of the smallest storage that may leave the device


class UpdatePath(Enum):
    """Path of a block's update. One step has one executor: the device's for the first two."""

    RESIDENT = "resident"  # its state stays on the device, and is updated there
    STREAM = "stream"  # its state travels to the device and back
    CPU = "cpu"  # its state is in RAM, or is brought there; the CPU updates it


class MoveKind(Enum):
    """Kind of bytes that a move carries between tiers."""

    PARAM = "parameters"
    GRAD = "gradients"
    STATE = "state"
    SAVED = "saved tensors"  # for backward: of no chunk
    UNDO = "weights beside the state"  # of before or after an update: see `BlockBytes`


@dataclass(frozen=True, slots=True)
class Move:
    """Bring one shard, or one block of it, from `src` to `dst`; or bytes saved for backward.

    It may begin at moment `begin` and not before, and has ended when moment `end` comes: then what
    needs it there computes, or what takes its place is allocated. A block's begins and ends in the
    step.
    """

    kind: MoveKind
    chunk: ChunkId | None  # None: what is saved for backward
    block: BlockId | None  # None: the whole shard
    src: Tier
    dst: Tier
    begin: Moment
    end: Moment
    nbytes: Bytes  # exact: what is transferred, without the padding of pages


@dataclass(frozen=True, slots=True)
class Gather:
    """Life of a payload: made from `begin` on, complete at `use`, freed when `release` comes.

    `release` above the trace's moments is a moment of the next iteration.
    """

    chunk: ChunkId
    begin: Moment
    use: Moment
    release: Moment


@dataclass(frozen=True, slots=True)
class Reduction:
    """Life of a gradient buffer: gradients arrive from `first` to `last`.

    The buffer is free when `end` comes. With one shard it is the gradient itself.
    """

    chunk: ChunkId
    first: Moment
    last: Moment
    end: Moment


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """Homes of one chunk's shard on this rank, and of its state."""

    chunk: ChunkId
    param_home: Tier
    never_released: bool  # its payload stays gathered (ZeRO-2, or a frozen one that fits)
    in_payload: bool  # the shard is a part of its payload, which is never released
    grad_home: Tier | None  # where a reduced gradient waits for the step; None: frozen
    state_homes: tuple[Tier, ...]  # of its blocks
    why: str  # in words
    # of gradients that may be on their way to host memory when this one begins to leave, with it
    leaving_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Staging:
    """Buffers on one tier, reserved before the first step: `count` for each kind of bytes."""

    count: int = 0
    state_bytes: int = 0
    param_bytes: int = 0
    grad_bytes: int = 0

    @property
    def buffer_bytes(self) -> int:
        """Bytes of one buffer of each kind."""
        return self.state_bytes + self.param_bytes + self.grad_bytes

    @property
    def nbytes(self) -> int:
        return self.count * self.buffer_bytes


@dataclass(frozen=True, slots=True)
class SavedHomes:
    """Homes of bytes saved for backward, where not all of them stay on the device.

    kept_bytes: on the device, while nothing is under way: the oldest of more than these leave.
    room_bytes: on the device with those under way. host_bytes, nvme_bytes: below, at most.
    staging_bytes: of RAM, through which they pass. returns_within: bytes on the device in backward,
    with those read ahead.
    """

    kept_bytes: Bytes
    room_bytes: Bytes
    host_bytes: Bytes
    nvme_bytes: Bytes
    staging_bytes: int = 0
    returns_within: int = 0

    @property
    def file_bytes(self) -> int:
        """Bytes of the file: each storage is of whole pages."""
        return self.nvme_bytes + -(-self.nvme_bytes // _STORAGE_PAGES)

    def __str__(self) -> str:
        stays, host, disk = map(format_bytes, (self.kept_bytes, self.host_bytes, self.nvme_bytes))
        return f"activations: kept {stays}, host {host}, disk {disk}"


@dataclass(frozen=True, slots=True)
class Recomputed:
    """Layers that are computed again in backward: `names` of `num_layers`, which takes `seconds`
    more, as far as somebody has timed them."""

    names: tuple[str, ...]
    num_layers: int
    seconds: float

    def __str__(self) -> str:
        more = f", {self.seconds:.3g} s" if self.seconds else ""
        return f"computed again in backward: {len(self.names)} of {self.num_layers} layers{more}"


@dataclass(frozen=True, slots=True)
class Forecast:
    """Consequences of a plan, for predictions, costs and pictures. No executor reads it."""

    reductions: tuple[Reduction, ...] = ()  # in the order in which they are issued
    moves: tuple[Move, ...] = ()  # by `begin`
    gather_gap: float = 0.0  # bytes gathered above a lower bound, as a fraction


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Plan of one iteration of one rank."""

    kind: Literal["train", "eval"]
    layout_digest: str
    trace_digest: str
    num_trace_moments: int
    has_host_tier: bool  # else the device is RAM
    unsharded_grads: bool  # gradients stay whole on every rank until the step reduces them (ZeRO-1)
    budgets: Budgets
    chunks: tuple[ChunkBytes, ...]
    shards: tuple[ShardPlan, ...]  # by chunk
    original_home: Tier  # of the fp32 originals of frozen chunks
    average: tuple[tuple[Tier, int], ...]  # bytes of averages of weights
    off_device: UpdatePath  # of blocks whose state is not on the device: `STREAM` or `CPU`
    gathers: tuple[Gather, ...]  # in the order in which they are issued
    device_staging: Staging
    host_staging: Staging
    forecast: Forecast
    saved: SavedHomes | None = field(default=None, repr=False)  # None: all that is saved stays
    recomputed: Recomputed | None = field(default=None, repr=False)  # None: no layer is

    @property
    def num_moments(self) -> int:
        return self.num_trace_moments + 1

    def path_of(self, home: Tier) -> UpdatePath:
        """Update path of a block whose state lives on `tier`."""
        return UpdatePath.RESIDENT if home is Tier.DEVICE else self.off_device

    def blocks_on(self, tier: Tier) -> frozenset[BlockId]:
        """Blocks whose state lives on `tier`."""
        return frozenset(
            {
                block.id
                for sizes, shard in zip(self.chunks, self.shards, strict=True)
                for block, home in zip(sizes.blocks, shard.state_homes, strict=True)
                if home is tier
            }
        )

    def digest(self) -> str:
        """Digest of exactly this plan; equal on all ranks."""
        more = [one for one in (self.saved, self.recomputed) if one is not None]
        return digest_of((self, *more)) if more else digest_of(self)

    def bytes_moved(self) -> dict[tuple[Tier, Tier], int]:
        """Bytes of one iteration over every link that is used."""
        moved: Counter[tuple[Tier, Tier]] = Counter()
        for move in self.forecast.moves:
            moved[move.src, move.dst] += move.nbytes
        return dict(moved)

    @property
    def frozen_bytes(self) -> dict[Tier, int]:
        """Bytes of shards that nobody updates, by home."""
        found: Counter[Tier] = Counter()
        for sizes, shard in zip(self.chunks, self.shards, strict=True):
            found[shard.param_home] += 0 if sizes.trainable else sizes.shard_bytes
        return {tier: nbytes for tier, nbytes in found.items() if nbytes}

    @property
    def frozen_read_bytes(self) -> int:
        """Bytes of frozen shards that an iteration reads from files: in the order of use, at most
        for each forward and backward."""
        return sum(
            move.nbytes
            for move in self.forecast.moves
            if move.kind is MoveKind.PARAM
            and move.src is Tier.NVME
            and move.chunk is not None
            and not self.chunks[move.chunk].trainable
        )

    def explain(self, chunk: ChunkId) -> str:
        """Explain where one chunk's shard lives, why, and what it costs an iteration."""
        shard, sizes = self.shards[chunk], self.chunks[chunk]
        payload = format_bytes(sizes.payload_bytes)
        lines = [
            f"chunk {chunk}: {shard.why}",
            f"{'' if sizes.trainable else 'frozen '}parameters: "
            f"{format_bytes(sizes.shard_bytes)} on {shard.param_home.value}"
            + (", kept gathered" if shard.never_released else "")
            + (f" with it in {payload}" if shard.in_payload and sizes.num_shards > 1 else ""),
        ]
        if shard.grad_home is not None:
            before = f"{payload} on every rank until the step reduces it, then "
            lines.append(
                f"gradient: {before if self.unsharded_grads else ''}"
                f"{format_bytes(sizes.shard_bytes)} on {shard.grad_home.value}, from its "
                "reduction to the step"
            )
        if sizes.original_bytes:
            lines.append(
                f"originals: {format_bytes(sizes.original_bytes)} on {self.original_home.value}, "
                "the fp32 values as they came, until it is trained"
            )
        homes: Counter[tuple[str, str]] = Counter()
        for block, home in zip(sizes.blocks, shard.state_homes, strict=True):
            homes[home.value, self.path_of(home).value] += block.bytes_on(home)
        for (home_name, path_name), nbytes in homes.items():
            lines.append(f"state: {format_bytes(nbytes)} on {home_name}, update {path_name}")
        moved: Counter[tuple[str, str, str]] = Counter()
        for move in self.forecast.moves:
            if move.chunk == chunk:
                moved[move.kind.value, move.src.value, move.dst.value] += move.nbytes
        for (kind, src, dst), nbytes in moved.items():
            lines.append(f"moved a step: {format_bytes(nbytes)} of {kind}, {src} to {dst}")
        made = sum(gather.chunk == chunk for gather in self.gathers)
        if made:
            lines.append(f"gathered {made} times, {payload} each")
        if sizes.num_replicas > 1:
            is_unsharded = sizes.num_shards == 1 and shard.param_home is Tier.DEVICE
            lines.append(
                f"replicas: {sizes.num_replicas}, which sum {format_bytes(sizes.shard_bytes)} of "
                "gradients" + ("; nothing is gathered" if is_unsharded else "")
            )
        if shard.in_payload and sizes.trainable and sizes.num_shards > 1:
            lines.append(f"gathered once, behind the step, {payload}")
        return "\n".join(lines)

    def validate(self) -> None:
        """Check the plan. Raises AssertionError where it contradicts itself: a bug of the planner.

        What is used is gathered, and nothing is gathered twice at once;
        every shard arrives before it is used; moves begin before they end, and carry exactly their
        shard's or block's bytes.
        """
        blocks = {block.id: block for chunk in self.chunks for block in chunk.blocks}
        forecast = self.forecast
        assert self.off_device is not UpdatePath.RESIDENT
        assert self.original_home is not (Tier.DEVICE if self.has_host_tier else Tier.HOST)
        for sizes, shard in zip(self.chunks, self.shards, strict=True):
            assert sizes.id == shard.chunk
            assert sizes.trainable == (shard.grad_home is not None)
            assert len(sizes.blocks) == len(shard.state_homes)
            tiers = {shard.param_home, shard.grad_home, *shard.state_homes}
            assert self.has_host_tier or Tier.HOST not in tiers, "there is no host tier"
            if sizes.trainable and Tier.NVME in (shard.param_home, shard.grad_home):
                assert set(shard.state_homes) <= {Tier.NVME}, "a file of what is updated in memory"
        assert list(forecast.moves) == sorted(forecast.moves, key=lambda move: move.begin)
        # by chunk and moment of begin: a gather that reads its own shard begins with that move
        arrivals: dict[tuple[ChunkId, int], int] = {}
        for move in forecast.moves:
            assert 0 <= move.begin <= move.end <= self.num_moments and move.src != move.dst, move
            assert (move.chunk is None) == (move.kind is MoveKind.SAVED), move
            if move.chunk is None:
                continue
            sizes = self.chunks[move.chunk]
            exact: int = sizes.shard_bytes
            if move.block is not None:
                block = blocks[move.block]
                assert block.chunk == move.chunk
                exact = {
                    MoveKind.STATE: block.state_on(
                        Tier.NVME if Tier.NVME in (move.src, move.dst) else Tier.DEVICE
                    ),
                    MoveKind.UNDO: block.undo_bytes,
                }.get(move.kind, block.param_bytes)
            assert move.nbytes == exact, move
            if move.kind is MoveKind.PARAM and move.block is None and move.dst is Tier.DEVICE:
                arrivals[move.chunk, move.begin] = move.end
        freed_at: dict[ChunkId, int] = {}
        for gather in self.gathers:
            assert 0 <= gather.begin <= gather.use < self.num_trace_moments, gather
            assert gather.use < gather.release, gather
            assert gather.begin >= freed_at.get(gather.chunk, 0), f"{gather} is gathered twice"
            freed_at[gather.chunk] = gather.release
            if self.shards[gather.chunk].param_home is not Tier.DEVICE:
                assert arrivals[gather.chunk, gather.begin] <= gather.use, gather
        for reduction in forecast.reductions:
            assert reduction.first <= reduction.last < reduction.end, reduction
