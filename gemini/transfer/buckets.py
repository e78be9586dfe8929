"""Plan of the buckets in which weights leave. Pure: chunks in, ranges of chunks out.

S elements of a shard · W shards of a chunk

A bucket is a range of one chunk, so it has one dtype, and its parts are in few shards.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass

from gemini.chunk.layout import ITEMSIZE, ChunkLayout, ChunkSpec
from gemini.units import ChunkId, ParamId


@dataclass(frozen=True, slots=True)
class Range:
    """Neighbouring parameters of a chunk, `slots` of it: elements `start` to `stop` of [S * W]."""

    chunk: ChunkId
    slots: range
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def parts_of(self, shard_numel: int) -> Iterator[tuple[int, slice, slice]]:
        """(rank, its elements of this range, its elements of [S]) of each rank that has any."""
        for rank in range(self.start // shard_numel, -(-self.stop // shard_numel)):
            first, last = rank * shard_numel, (rank + 1) * shard_numel
            low, high = max(self.start, first), min(self.stop, last)
            yield rank, slice(low - self.start, high - self.start), slice(low - first, high - first)


def ranges_of(layout: ChunkLayout, wanted: Container[ParamId], nbytes: int) -> list[Range]:
    """Ranges of at most `nbytes` with all `wanted` parameters, in the order of chunks.

    A parameter that is larger is alone in its range. Others lie in a range only where leaving them
    out would make a range more.
    """
    found: list[Range] = []
    for chunk in layout.chunks:
        found += _of_chunk(chunk, wanted, nbytes // ITEMSIZE[chunk.dtype])
    return found


def _of_chunk(chunk: ChunkSpec, wanted: Container[ParamId], most: int) -> Iterator[Range]:
    begun: Range | None = None
    for index, slot in enumerate(chunk.slots):
        if slot.param not in wanted:
            continue
        stop = slot.offset + slot.numel
        if begun is not None and stop - begun.start > most:
            yield begun
            begun = None
        start, first = (slot.offset, index) if begun is None else (begun.start, begun.slots.start)
        begun = Range(chunk.id, range(first, index + 1), start, stop)
    if begun is not None:
        yield begun
