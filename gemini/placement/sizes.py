"""Sizes in bytes of everything that is placed, and budgets. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from math import inf
from traceback import clear_frames
from typing import Self

from gemini.chunk.layout import ITEMSIZE, ChunkLayout, ChunkSpec
from gemini.optim.rules.state_layout import ALL_COLUMNS, Columns, StateLayout
from gemini.units import (
    BLOCK_NUMEL,
    FROZEN_BLOCK_BYTES,
    NUM_VERSIONS,
    PAGE_BYTES,
    BlockId,
    Bytes,
    ChunkId,
    align_up,
    format_bytes,
    parse_bytes,
)

from .tiers import Tier

FP32_BYTES = 4  # an element of an undo plane, of an original, of gradients that were added up
WEIGHT_BYTES = 2  # an element of a bf16 weight that is written with its block
SPLIT_BYTES = 2  # an element that is saved where a master is what its bf16 weight lacks
_INDEX_HEAD_BYTES, _ENTRY_BYTES = 24, 8  # of the index of a file; see nvme.layout
UNLIMITED = Bytes(1 << 62)


@dataclass(frozen=True, slots=True)
class StateBytes:
    """Sizes of an optimizer's `StateLayout` that the planner needs."""

    per_element: float  # all planes, masters whole; of quantised ones with a share of a scale
    has_master: bool  # parameters follow from the state; else an update must read them
    # chunks of which masters are what bf16 parameters in memory lack of them (ADR 0002); on disk in
    # the blocks that `moves_less_split`
    split_on_disk: frozenset[ChunkId] = frozenset()
    split_in_memory: frozenset[ChunkId] = frozenset()
    num_versions: int = NUM_VERSIONS  # of a block on disk
    # which planes of a layout parameters have, where not all have all
    columns: Columns = ALL_COLUMNS
    layout: StateLayout | None = None

    def per_element_of(self, params: Collection[int]) -> float:
        """Bytes of state for each element, of a block with elements of these parameters."""
        if self.layout is None:
            return self.per_element
        return self.columns.of(params, self.layout).bytes_per_element


@dataclass(frozen=True, slots=True)
class Waiting:
    """Elements that an update holds back until the other ranks of a matrix have come as far:
    `numel` of this rank, in runs of `num_runs` chunks."""

    numel: int = 0
    num_runs: int = 0

    def holds(self, other: Waiting) -> bool:
        """Whether the room for this is enough for `other`."""
        return other.numel <= self.numel and other.num_runs <= self.num_runs

    def blocks(self, block_numel: int) -> int:
        """Number of blocks of `block_numel` elements, at most."""
        return self.numel // block_numel + 2 * self.num_runs


NOT_WAITING = Waiting()


@dataclass(frozen=True, slots=True)
class BlockBytes:
    """One block of a trainable chunk's shard."""

    id: BlockId
    chunk: ChunkId
    numel: int
    param_bytes: Bytes
    state_bytes: Bytes  # in memory
    disk_bytes: Bytes  # of the same on disk
    undo_bytes: Bytes  # written with it on disk: weights or an undo plane
    has_master: bool  # in memory, a whole one

    def state_on(self, home: Tier) -> Bytes:
        """Bytes of state that an update reads and writes, on `tier`."""
        return self.disk_bytes if home is Tier.NVME else self.state_bytes

    def bytes_on(self, home: Tier) -> Bytes:
        """Bytes of all that is kept on `tier`, in one version."""
        return Bytes(self.state_on(home) + self.undo_bytes * (home is Tier.NVME))

    def gives_parameters(self, home: Tier) -> bool:
        """Whether parameters follow from the state; else an update must read them."""
        return not self.undo_bytes if home is Tier.NVME else self.has_master


@dataclass(frozen=True, slots=True)
class ChunkBytes:
    """Sizes of one chunk on one rank."""

    id: ChunkId
    payload_bytes: Bytes  # gathered; a gradient buffer is as large
    shard_bytes: Bytes  # of the parameters; a reduced gradient is as large
    trainable: bool
    state_bytes: Bytes
    blocks: tuple[BlockBytes, ...]  # none where the chunk is frozen; the first is the largest
    num_shards: int = 1  # of its payload: with one it is never gathered over ranks
    num_replicas: int = 1  # of every shard
    original_bytes: int = 0  # of a frozen one: fp32 values that its dtype rounds
    num_versions: int = NUM_VERSIONS  # of a block of state on disk

    @property
    def reduces(self) -> bool:
        """Whether its gradients are reduced over ranks."""
        return self.num_shards * self.num_replicas > 1


def wider_chunks(
    layout: ChunkLayout, itemsizes: Sequence[int], *, trained: bool = True, frozen: bool = True
) -> frozenset[ChunkId]:
    """Trained and frozen chunks whose dtype may round their parameters, which came with more bytes
    an element. itemsizes: in registration order."""
    return frozenset(
        chunk.id
        for chunk in layout.chunks
        if (trained if chunk.trainable else frozen)
        and any(itemsizes[slot.param] > ITEMSIZE[chunk.dtype] for slot in chunk.slots)
    )


def moves_less_split(numel: int, per_element: float) -> bool:
    """Whether a step moves fewer pages of a block on disk whose masters are split, though its
    weights are pages of their own. per_element: bytes of the state with whole masters."""
    planes = align_up(int(numel * (per_element - SPLIT_BYTES)), PAGE_BYTES)
    weights = align_up(numel * WEIGHT_BYTES, PAGE_BYTES)
    return 2 * planes + weights < 2 * align_up(int(numel * per_element), PAGE_BYTES)


def chunk_bytes(
    layout: ChunkLayout,
    state: StateBytes,
    block_numel: int = BLOCK_NUMEL,
    with_originals: Collection[ChunkId] = (),
) -> tuple[ChunkBytes, ...]:
    """Sizes of every chunk. Block ids are those of the optimizer's `StateSpace`.

    with_originals: chunks that keep fp32 values with their shards where they are frozen.
    """
    chunks = []
    next_block = 0
    for spec in layout.chunks:
        itemsize = ITEMSIZE[spec.dtype]
        blocks = []
        has_master = state.has_master and spec.id not in state.split_in_memory
        saved = SPLIT_BYTES * (spec.id in state.split_in_memory)
        for start in range(0, spec.shard_numel if spec.trainable else 0, block_numel):
            numel = min(block_numel, spec.shard_numel - start)
            per_element = _per_element(layout, spec, state, start, start + numel)
            in_memory = per_element - saved
            is_split = spec.id in state.split_on_disk and moves_less_split(numel, state.per_element)
            undo = WEIGHT_BYTES * is_split if state.has_master else FP32_BYTES
            stored = per_element - SPLIT_BYTES * is_split
            blocks.append(
                BlockBytes(
                    BlockId(next_block), spec.id, numel,
                    Bytes(numel * itemsize), Bytes(int(numel * in_memory)),
                    Bytes(int(numel * stored)), Bytes(numel * undo), has_master,
                )
            )  # fmt: skip
            next_block += 1
        stays = spec.id in with_originals and not spec.trainable
        chunks.append(
            ChunkBytes(
                spec.id, Bytes(spec.payload_bytes), Bytes(spec.shard_numel * itemsize),
                spec.trainable, Bytes(sum(b.state_bytes for b in blocks)), tuple(blocks),
                spec.num_shards, layout.num_replicas,
                spec.shard_numel * FP32_BYTES if stays else 0, state.num_versions,
            )
        )  # fmt: skip
    return tuple(chunks)


def _per_element(
    layout: ChunkLayout, spec: ChunkSpec, state: StateBytes, start: int, end: int
) -> float:
    """Bytes of state for each of elements [start, end) of a shard, on the rank with most: plans are
    of all."""
    if state.layout is None:
        return state.per_element
    of_ranks = (
        {
            part.param
            for part in layout.shard_segments(spec, rank)
            if part.offset < end and part.offset + part.numel > start
        }
        for rank in range(spec.num_shards)
    )
    return max(map(state.per_element_of, of_ranks))


def file_bytes(kind: str, nbytes: int, num_versions: int = NUM_VERSIONS) -> int:
    """Bytes of a block in a store: whole pages, and all versions of what a step changes. Of a
    frozen shard the bytes of its file, which several runs may share. num_versions: of state."""
    if kind == "frozen":
        num_blocks = -(-nbytes // FROZEN_BLOCK_BYTES)
        index = align_up(_INDEX_HEAD_BYTES + num_blocks * _ENTRY_BYTES, PAGE_BYTES)
        return align_up(nbytes, PAGE_BYTES) + PAGE_BYTES + NUM_VERSIONS * index
    if kind != "state":
        num_versions = 1 if kind in ("gradients", "originals") else NUM_VERSIONS
    return num_versions * align_up(nbytes, PAGE_BYTES)


@dataclass(frozen=True, slots=True)
class Budgets:
    """Bytes that each tier may hold, of one rank unless said otherwise."""

    device: Bytes = UNLIMITED
    host: Bytes = UNLIMITED
    nvme: Bytes = UNLIMITED

    @classmethod
    def parse(
        cls,
        device: int | str | None = None,
        host: int | str | None = None,
        nvme: int | str | None = None,
    ) -> Budgets:
        """Budgets from bytes or `"8GiB"`; None is no limit."""
        return cls(*(UNLIMITED if b is None else parse_bytes(b) for b in (device, host, nvme)))

    def of(self, tier: Tier) -> Bytes:
        return {Tier.DEVICE: self.device, Tier.HOST: self.host, Tier.NVME: self.nvme}[tier]

    def with_more(self, tier: Tier, nbytes: int) -> Budgets:
        """Budgets with `nbytes` more of one tier."""
        return replace(self, **{tier.value: Bytes(self.of(tier) + nbytes)})

    def divided(self, ranks_per_node: int, ranks_per_device: int = 1) -> Budgets:
        """Budgets of one rank from those of a node: every pool is divided among the ranks that
        share it.

        Ranks that compute on the CPU share one device, the RAM; GPUs are not shared.
        """
        if ranks_per_node < 1 or ranks_per_device < 1:
            raise ValueError(
                f"ranks_per_node={ranks_per_node} and ranks_per_device={ranks_per_device} must be "
                "positive"
            )
        return Budgets(
            _share(self.device, ranks_per_device),
            _share(self.host, ranks_per_node),
            _share(self.nvme, ranks_per_node),
        )


def _share(nbytes: int, ranks: int) -> Bytes:
    """Share of one rank. No limit stays no limit."""
    return Bytes(nbytes if nbytes >= UNLIMITED else nbytes // ranks)


def least_budgets(budgets: Sequence[Budgets]) -> Budgets:
    """Least budget of all ranks, tier by tier: what every rank can hold."""
    return Budgets(
        Bytes(min(b.device for b in budgets)),
        Bytes(min(b.host for b in budgets)),
        Bytes(min(b.nvme for b in budgets)),
    )


SMALLER_CHUNKS = "lower min_chunk_size_m, so that chunks are smaller"


class BudgetError(ValueError):
    """Model data does not fit the budgets, whatever its homes.

    `missing_bytes` more on `tier` than `budget_bytes` would do, for `what`; `knob` says what gives
    them. recomputed: layers of which the first so many are computed again, to lack no more.
    """

    recomputed = 0

    def __init__(
        self,
        message: str,
        tier: Tier | None = None,
        missing_bytes: int = 0,
        knob: str = "",
        what: str = "",
        budget_bytes: int = UNLIMITED,
    ) -> None:
        super().__init__(message)
        self.tier = tier
        self.missing_bytes = Bytes(missing_bytes)
        self.knob = knob
        self.what = what
        self.budget_bytes = Bytes(budget_bytes)

    def without_frames(self) -> Self:
        """The same error, without the frames that it was raised in.

        A caller who goes on must not keep them until Python collects its garbage: behind them are
        frames of the training loop, with the outputs of its last iteration.
        """
        clear_frames(self.__traceback__)
        return self.with_traceback(None)

    def also(self, text: str) -> BudgetError:
        """Copy of the error with more text."""
        return BudgetError(
            f"{self}{text}", self.tier, self.missing_bytes, self.knob, self.what, self.budget_bytes
        )

    def with_least_chunks(self) -> BudgetError:
        """Copy of the error for chunks that were cut as far as that helps."""
        knob, text = (said.replace(f", or {SMALLER_CHUNKS}", "") for said in (self.knob, str(self)))
        return BudgetError(text, self.tier, self.missing_bytes, knob, self.what, self.budget_bytes)

    @classmethod
    def missing(
        cls, tier: Tier, missing_bytes: int, budget: int, what: str, knob: str, name: str = ""
    ) -> BudgetError:
        """Error of a tier. name: of the budget, by default after its tier."""
        allowed = "" if budget >= UNLIMITED else f" of {format_bytes(budget)}"
        return cls(
            f"{name or f'{tier.value}_budget'}{allowed} is {format_bytes(missing_bytes)} "
            f"({missing_bytes} bytes) too small for {what}; {knob}",
            tier,
            missing_bytes,
            knob,
            what,
            budget,
        )


@dataclass(frozen=True, slots=True)
class Bandwidths:
    """Speeds of one rank's links and memories, in bytes a second; one is slower than `inf`."""

    host_to_device: float = inf
    device_to_host: float = inf  # at the same time as the other direction
    nvme_read: float = inf
    nvme_write: float = inf  # after reads, not at the same time: disks are not duplex
    collective: float = inf  # of a payload's (W - 1) / W
    device_memory: float = inf  # read and written by an update kernel
    host_memory: float = inf  # read and written by an update on the CPU
    flops: float = inf  # operations a second of forward and backward

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)} must be positive")

    @classmethod
    def from_json(cls, fields: object) -> Bandwidths:
        """Bandwidths from a mapping. Raises ValueError for an unknown name."""
        if not isinstance(fields, dict):
            raise ValueError(f"bandwidths are {type(fields).__name__}; expected an object")
        unknown = sorted(set(fields) - set(cls.__slots__))
        if unknown:
            raise ValueError(f"bandwidths {unknown} are unknown; expected {list(cls.__slots__)}")
        return cls(**{name: float(value) for name, value in fields.items()})


def least_bandwidths(bandwidths: Sequence[Bandwidths]) -> Bandwidths:
    """The least of all ranks, link by link: the slowest rank sets the pace."""
    names = Bandwidths.__slots__
    return Bandwidths(**{n: min(getattr(b, n) for b in bandwidths) for n in names})


def with_sums(budgets: Budgets, layout: ChunkLayout, under_way: int) -> Budgets:
    """Budgets of what a plan has, which knows gradients of their parameters' dtype: without the
    bytes by which fp32 sums are larger, and without what `under_way` reductions receive."""
    trained = [chunk for chunk in layout.chunks if chunk.trainable]
    wider = sum(chunk.shard_numel * (FP32_BYTES - ITEMSIZE[chunk.dtype]) for chunk in trained)
    largest = max((chunk.payload_bytes for chunk in trained), default=0)
    # at one rank a micro-batch's gradient waits beside the sum
    device, host = wider + largest * (under_way + 1), wider
    if budgets.device < UNLIMITED:
        budgets = replace(budgets, device=Bytes(max(0, budgets.device - device)))
    if budgets.host < UNLIMITED:
        budgets = replace(budgets, host=Bytes(max(0, budgets.host - host)))
    return budgets
