"""From parameter specs to chunks, shards and segments. Pure.

W world size · C capacity of a chunk · S numel of a shard, all in elements

A chunk holds whole parameters in layout order, each at a multiple of 64. Its payload is what is
gathered: W shards of S elements, S a multiple of 256, with S * W as small as holds its parameters.
So capacity that is left over is neither stored nor sent.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from gemini.units import (
    PARAM_ALIGN_NUMEL,
    SHARD_ALIGN_NUMEL,
    ChunkId,
    Numel,
    ParamId,
    align_up,
)

ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """What the layout needs to know of one parameter; tied parameters are one spec."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # of the chunk that holds it: the compute dtype
    trainable: bool = True
    aliases: tuple[str, ...] = ()  # other names of the same parameter
    group: str = "world"  # the process group it is sharded over

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def key(self) -> tuple[str, str, bool]:
        """Parameters of different keys never share a chunk."""
        return (self.group, self.dtype, self.trainable)


@dataclass(frozen=True, slots=True)
class Slot:
    """One parameter inside its chunk."""

    param: ParamId
    offset: int  # elements, a multiple of 64
    numel: int


@dataclass(frozen=True, slots=True)
class ChunkSpec:
    """One chunk: its parameters in layout order."""

    id: ChunkId
    dtype: str
    trainable: bool
    slots: tuple[Slot, ...]
    shard_numel: Numel  # S
    num_shards: int  # W

    @property
    def used_numel(self) -> int:
        """End of the last parameter."""
        last = self.slots[-1]
        return last.offset + last.numel

    @property
    def payload_numel(self) -> int:
        """What is gathered: all shards."""
        return self.shard_numel * self.num_shards

    @property
    def payload_bytes(self) -> int:
        return self.payload_numel * ITEMSIZE[self.dtype]

    def gaps(self) -> tuple[tuple[int, int], ...]:
        """Runs [start, end) of the payload that belong to no parameter."""
        gaps, end = [], 0
        for slot in self.slots:
            if slot.offset > end:
                gaps.append((end, slot.offset))
            end = slot.offset + slot.numel
        if self.payload_numel > end:
            gaps.append((end, self.payload_numel))
        return tuple(gaps)


@dataclass(frozen=True, slots=True)
class ShardPart:
    """The part of one parameter that lies in one shard: a segment, in the shard's coordinates."""

    param: ParamId
    param_offset: int
    numel: int
    offset: int  # in the shard, a multiple of 64


@dataclass(frozen=True, slots=True)
class ChunkLayout:
    """Where every parameter lies. The same on all ranks; `digest` proves it."""

    params: tuple[ParamSpec, ...]
    chunks: tuple[ChunkSpec, ...]
    capacity: Numel
    world_size: int

    @classmethod
    def build(
        cls,
        params: Sequence[ParamSpec],
        capacity: int,
        world_size: int = 1,
        order: Sequence[ParamId] | None = None,
    ) -> ChunkLayout:
        """Pack parameters in `order` (registration order when None), one open chunk for each key.

        A parameter that does not fit in what is left of the open chunk closes it; one that is
        larger than `capacity` gets a chunk of its own.
        """
        if capacity < 1 or world_size < 1:
            raise ValueError(f"capacity={capacity} and world_size={world_size} must be positive")
        if order is None:
            order = [ParamId(i) for i in range(len(params))]
        if sorted(order) != list(range(len(params))):
            raise ValueError("order must name every parameter once")
        open_slots: dict[tuple[str, str, bool], list[Slot]] = {}
        closed: list[tuple[tuple[str, str, bool], tuple[Slot, ...]]] = []
        for param in order:
            spec = params[param]
            slots = open_slots.setdefault(spec.key, [])
            end = align_up(slots[-1].offset + slots[-1].numel, PARAM_ALIGN_NUMEL) if slots else 0
            if slots and end + spec.numel > capacity:
                closed.append((spec.key, tuple(slots)))
                slots = open_slots[spec.key] = []
                end = 0
            slots.append(Slot(param, end, spec.numel))
        closed += [(key, tuple(slots)) for key, slots in open_slots.items() if slots]
        position = {param: i for i, param in enumerate(order)}
        closed.sort(key=lambda entry: position[entry[1][0].param])
        chunks = []
        for i, ((_, dtype, trainable), packed) in enumerate(closed):
            used = packed[-1].offset + packed[-1].numel
            shard = align_up(max(1, -(-used // world_size)), SHARD_ALIGN_NUMEL)
            chunks.append(ChunkSpec(ChunkId(i), dtype, trainable, packed, Numel(shard), world_size))
        return cls(tuple(params), tuple(chunks), Numel(capacity), world_size)

    def chunk_of(self) -> dict[ParamId, ChunkId]:
        """The chunk of every parameter."""
        return {slot.param: chunk.id for chunk in self.chunks for slot in chunk.slots}

    def shard_parts(self, chunk: ChunkSpec, rank: int) -> tuple[ShardPart, ...]:
        """The segments of `rank`'s shard of a chunk, in order."""
        lo = rank * chunk.shard_numel
        hi = lo + chunk.shard_numel
        parts = []
        for slot in chunk.slots:
            a, b = max(lo, slot.offset), min(hi, slot.offset + slot.numel)
            if a < b:
                parts.append(ShardPart(slot.param, a - slot.offset, b - a, a - lo))
        return tuple(parts)

    def digest(self) -> str:
        """A name for this exact layout."""
        return hashlib.sha256(repr(self).encode()).hexdigest()[:16]
