"""State space: where the state of every parameter lies, and its blocks. Pure.

A space is the concatenation of one or more shards (runs of elements that persist on this rank). A
segment is the part of one parameter that lies in one shard; it starts at a multiple of 64. A block
is up to 2**20 elements of one shard: the unit of transfer, staging, update and version.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from gemini.units import BLOCK_NUMEL, PARAM_ALIGN_NUMEL, BlockId, align_up


@dataclass(frozen=True, slots=True)
class Segment:
    """Segment: the part of one parameter that lies in one shard."""

    param: int  # index into the optimizer's list of parameters
    param_offset: int  # first element of the parameter that lies here
    numel: int
    offset: int  # in the space; a multiple of 64


@dataclass(frozen=True, slots=True)
class BlockSegment:
    """Part of a segment that lies in one block, by its offset in the block."""

    param: int
    param_offset: int
    numel: int
    offset: int  # in the block; a multiple of 64


@dataclass(frozen=True, slots=True)
class Block:
    """Block: consecutive elements of one shard."""

    id: BlockId
    shard: int
    shard_offset: int  # first element, in its shard
    offset: int  # first element, in the space
    numel: int  # a multiple of 64
    segments: tuple[BlockSegment, ...]

    @property
    def elements(self) -> slice:
        """Its elements in its shard."""
        return slice(self.shard_offset, self.shard_offset + self.numel)


@dataclass(frozen=True, slots=True)
class StateSpace:
    """Segments and blocks of everything one optimizer keeps state for, on this rank."""

    segments: tuple[Segment, ...]
    shard_numels: tuple[int, ...]
    blocks: tuple[Block, ...]

    @classmethod
    def build(
        cls,
        segments: Sequence[Segment],
        shard_numels: Sequence[int],
        block_numel: int = BLOCK_NUMEL,
    ) -> StateSpace:
        """Cut shards into blocks. Segments are in order of `offset` and do not overlap."""
        if block_numel % PARAM_ALIGN_NUMEL:
            raise ValueError(f"block_numel={block_numel} is no multiple of {PARAM_ALIGN_NUMEL}")
        end = 0
        for segment in segments:
            if segment.offset % PARAM_ALIGN_NUMEL or segment.offset < end or segment.numel < 1:
                raise ValueError(f"{segment} overlaps the one before, is empty or not aligned")
            end = segment.offset + segment.numel
        if end > sum(shard_numels):
            raise ValueError(f"segments end at {end}, shards at {sum(shard_numels)}")

        blocks: list[Block] = []
        base, first = 0, 0
        for shard, shard_numel in enumerate(shard_numels):
            for start in range(0, shard_numel, block_numel):
                numel = min(block_numel, shard_numel - start)
                lo = base + start
                parts = []
                while first < len(segments) and segments[first].offset < lo + numel:
                    segment = segments[first]
                    a = max(lo, segment.offset)
                    b = min(lo + numel, segment.offset + segment.numel)
                    if a < b:
                        parts.append(
                            BlockSegment(
                                segment.param,
                                segment.param_offset + a - segment.offset,
                                b - a,
                                a - lo,
                            )
                        )
                    # the rest lies in the next block, which looks at this segment again
                    if segment.offset + segment.numel > lo + numel:
                        break
                    first += 1
                blocks.append(Block(BlockId(len(blocks)), shard, start, lo, numel, tuple(parts)))
            base += shard_numel
        return cls(tuple(segments), tuple(shard_numels), tuple(blocks))

    @classmethod
    def pack(cls, param_numels: Sequence[int], block_numel: int = BLOCK_NUMEL) -> StateSpace:
        """Space of a plain module: its parameters one after the other, in one shard."""
        segments, end = [], 0
        for param, numel in enumerate(param_numels):
            if numel:
                segments.append(Segment(param, 0, numel, end))
                end += align_up(numel, PARAM_ALIGN_NUMEL)
        return cls.build(segments, [end] if end else [], block_numel)

    @property
    def numel(self) -> int:
        return sum(self.shard_numels)

    def digest(self) -> str:
        """Digest of exactly this space."""
        return hashlib.sha256(repr((self.segments, self.shard_numels)).encode()).hexdigest()[:16]


def blocks_on_nvme(blocks: Sequence[Block], fraction: float) -> frozenset[BlockId]:
    """Leading blocks whose share of all elements is nearest to `fraction`.

    Every element has the same bytes, so this is a fraction of the bytes, met within one block.
    """
    assert 0 <= fraction <= 1
    wanted = fraction * sum(block.numel for block in blocks)
    chosen: list[BlockId] = []
    taken = 0.0
    for block in blocks:
        if taken + block.numel / 2 > wanted:
            break
        taken += block.numel
        chosen.append(block.id)
    return frozenset(chosen)
