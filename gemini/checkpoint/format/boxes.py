"""Runs of a flattened tensor as boxes of its N-dimensional shape: files have boxes, shards runs.

A run [start, stop) is a part of a row, whole rows and a part of a row, and so on inwards: at most
2N - 1 boxes (offsets and sizes). Boxes come in the order of the run, and each is contiguous in it.
If a rank has several segments of a dimension (fused matrices that torch has split), a box is cut at
the segments, and its pieces are strided in the run.

`StreamedRuns` are those that this rank has of a parameter, or of a plane of its state, without
values: the writer and the reader stream these. A reader finds saved parts of a box by `PartsOf`.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, product
from math import prod
from operator import mul
from typing import NamedTuple

import torch
from torch import Tensor

from gemini.chunk.local import part_of
from gemini.units import Segments

from .manifest import SavedPart


@dataclass(frozen=True, slots=True)
class Box:
    """Elements [offsets, offsets + sizes) of a tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int  # of its first element in the flattened tensor

    @property
    def numel(self) -> int:
        return prod(self.sizes)


@dataclass(frozen=True, slots=True)
class Region:
    """Part of a tensor of which a rank has runs: all of it, or its segments of a split tensor."""

    shape: tuple[int, ...]  # of the whole
    segments: tuple[Segments, ...]  # by dimension
    sizes: tuple[int, ...] = field(init=False, compare=False)  # of the region
    strides: tuple[int, ...] = field(init=False, compare=False)  # of it, contiguous

    def __post_init__(self) -> None:
        sizes = tuple([sum([size for _, size in segments]) for segments in self.segments])
        strides = list(accumulate(reversed(sizes[1:]), mul, initial=1))[::-1]
        object.__setattr__(self, "sizes", sizes)
        object.__setattr__(self, "strides", tuple(strides[: len(sizes)]))

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Region:
        return cls(tuple(shape), tuple([((0, size),) for size in shape]))

    @property
    def num_boxes(self) -> int:
        return prod(map(len, self.segments))


def boxes_of_region(region: Region, start: int, stop: int) -> tuple[Box, ...]:
    """Boxes, in the whole tensor, of elements [start, stop) of the flattened region.

    The `start` of each box counts in the region, in which the box has the region's strides.
    """
    boxes = boxes_of_run(region.sizes, start, stop)
    if region.sizes == region.shape:
        return boxes  # all of the tensor
    return tuple(
        Box(
            tuple(offset for _, offset, _ in parts),
            tuple(size for *_, size in parts),
            sum(at * stride for (at, *_), stride in zip(parts, region.strides, strict=True)),
        )
        for box in boxes
        for parts in product(*map(_overlaps, region.segments, box.offsets, box.sizes))
    )


def is_contiguous(box: Box, region: Region) -> bool:
    """Whether a box is one run of the flattened region."""
    expected = 1
    for size, stride in zip(reversed(box.sizes), reversed(region.strides), strict=True):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


def _overlaps(segments: Segments, start: int, numel: int) -> Iterator[tuple[int, int, int]]:
    """(place in the region, offset in the whole, size) of the overlap of [start, start + numel)
    with each segment."""
    before = 0
    for offset, size in segments:
        first, last = max(start, before), min(start + numel, before + size)
        if first < last:
            yield first, offset + first - before, last - first
        before += size


def boxes_of_run(shape: Sequence[int], start: int, stop: int) -> tuple[Box, ...]:
    """Boxes of elements [start, stop) of a flattened tensor of `shape`, in order."""
    assert 0 <= start <= stop <= prod(shape)
    if start == stop:
        return ()
    return tuple(_cut(tuple(shape), start, stop, (), 0))


def _cut(
    shape: tuple[int, ...], start: int, stop: int, outer: tuple[int, ...], base: int
) -> Iterator[Box]:
    """Boxes of [start, stop) of an inner tensor that begins at element `base` of the whole one."""
    ones = (1,) * len(outer)
    if len(shape) <= 1:
        sizes = (stop - start,) if shape else ()
        yield Box((*outer, start) if shape else outer, ones + sizes, base + start)
        return
    inner = prod(shape[1:])
    first, last = start // inner, (stop - 1) // inner
    if first == last and stop - start < inner:
        row = first * inner
        yield from _cut(shape[1:], start - row, stop - row, (*outer, first), base + row)
        return
    head, tail = -(-start // inner), stop // inner  # whole rows [head, tail)
    if start < head * inner:
        row = first * inner
        yield from _cut(shape[1:], start - row, inner, (*outer, first), base + row)
    if head < tail:
        zeros = (0,) * (len(shape) - 1)
        yield Box((*outer, head, *zeros), (*ones, tail - head, *shape[1:]), base + head * inner)
    if tail * inner < stop:
        row = tail * inner
        yield from _cut(shape[1:], 0, stop - row, (*outer, tail), base + row)


class Overlap(NamedTuple):
    """Elements that a box shares with a saved part, by their offsets in each of the two."""

    part: SavedPart
    in_part: tuple[int, ...]
    in_box: tuple[int, ...]
    sizes: tuple[int, ...]


class PartsOf:
    """Saved parts of one tensor, searched by box."""

    def __init__(self, parts: Sequence[SavedPart]) -> None:
        self._alike = {(part.offsets, part.sizes): part for part in parts}
        self._parts: list[SavedPart] = []
        self._all = parts

    def overlaps(self, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> list[Overlap]:
        """Overlaps of a box with the saved parts, in the order of the parts' offsets."""
        same = self._alike.get((offsets, sizes))
        if same is not None:  # saved as it is asked for: the usual case
            zeros = (0,) * len(sizes)
            return [Overlap(same, zeros, zeros, sizes)]
        if not sizes:
            return []
        if not self._parts:
            self._parts = sorted(self._all, key=lambda part: part.offsets)
            self._starts = [part.offsets[0] for part in self._parts]
            # of all parts up to each, the last row: grows, so that it can be searched
            self._ends = list(accumulate((p.offsets[0] + p.sizes[0] for p in self._parts), max))
        first = bisect_right(self._ends, offsets[0])
        last = bisect_left(self._starts, offsets[0] + sizes[0])
        found = []
        for part in self._parts[first:last]:
            low = tuple(map(max, part.offsets, offsets))
            ends = [
                min(a + n, b + m)
                for a, n, b, m in zip(part.offsets, part.sizes, offsets, sizes, strict=True)
            ]
            counts = tuple(end - start for start, end in zip(low, ends, strict=True))
            if min(counts) > 0:
                found.append(
                    Overlap(
                        part,
                        tuple(a - b for a, b in zip(low, part.offsets, strict=True)),
                        tuple(a - b for a, b in zip(low, offsets, strict=True)),
                        counts,
                    )
                )
        return found


# -- what this rank has --

FlatRun = tuple[int, int]  # first element, and how many


@dataclass(frozen=True, slots=True)
class StreamedRuns:
    """Runs of a tensor that this rank has, without values: `StreamedRuns`.

    region: in whose elements runs count. order: of each run among all runs of this rank, as they
    are stored.
    """

    region: Region
    dtype: torch.dtype
    runs: tuple[FlatRun, ...]
    order: tuple[int, ...]

    @property
    def shape(self) -> torch.Size:
        """Of the whole tensor."""
        return torch.Size(self.region.shape)

    @property
    def nbytes(self) -> int:
        return sum(numel for _, numel in self.runs) * self.dtype.itemsize

    @property
    def most_boxes(self) -> int:
        """Upper bound of the number of boxes."""
        return len(self.runs) * max(1, 2 * len(self.region.shape) - 1) * self.region.num_boxes

    def flat_part(self, whole: Tensor) -> Tensor:
        """Elements of the region, flat, of a whole tensor of `shape`."""
        return part_of(whole, self.region.segments).reshape(-1)

    def boxes_by_run(self) -> list[tuple[int, tuple[Box, ...]]]:
        """(first element, boxes) of each run, in order."""
        return [(s, boxes_of_region(self.region, s, s + n)) for s, n in self.runs]

    def boxes(self) -> list[Box]:
        """Boxes of all runs, in order."""
        return [box for _, boxes in self.boxes_by_run() for box in boxes]


def in_run(values: Tensor, start: int, box: Box, region: Region) -> Tensor:
    """View of a box in `values` [n], the elements [start, start + n) of a flattened region."""
    return values[box.start - start :].as_strided(box.sizes, region.strides)


def in_box(tensor: Tensor, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
    """View of elements [offsets, offsets + sizes) of a tensor."""
    for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        tensor = tensor.narrow(dim, offset, size)
    return tensor
