"""A run of a flattened tensor as boxes of its N-dimensional shape. Pure.

torch.distributed.checkpoint knows boxes (offsets and sizes), shards are runs. A run [start, stop)
is a part of a row, whole rows and a part of a row, and so on inwards: at most 2N - 1 boxes. They
come in the order of the run, and each is contiguous in it. Where a rank has several segments of a
dimension (fused matrices that torch has split), a box is cut into those, which are strided in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, product
from math import prod
from operator import mul

from gemini.units import Segments


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
    """The part of a tensor of which a rank has runs: all of it, or what torch has split off."""

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
    """Boxes of the whole tensor of elements [start, stop) of the flattened region; the `start` of
    each counts in the region, in which it has the region's strides."""
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
    """Whether the elements of a box follow each other in the flattened region."""
    expected = 1
    for size, stride in zip(reversed(box.sizes), reversed(region.strides), strict=True):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


def _overlaps(segments: Segments, start: int, numel: int) -> Iterator[tuple[int, int, int]]:
    """(place in the region, offset in the whole, size) of what [start, start + numel) has of each
    segment."""
    before = 0
    for offset, size in segments:
        first, last = max(start, before), min(start + numel, before + size)
        if first < last:
            yield first, offset + first - before, last - first
        before += size


def boxes_of_run(shape: Sequence[int], start: int, stop: int) -> tuple[Box, ...]:
    """The boxes of elements [start, stop) of a flattened tensor of `shape`, in order."""
    assert 0 <= start <= stop <= prod(shape)
    if start == stop:
        return ()
    return tuple(_cut(tuple(shape), start, stop, (), 0))


def _cut(
    shape: tuple[int, ...], start: int, stop: int, outer: tuple[int, ...], base: int
) -> Iterator[Box]:
    """Boxes of [start, stop) of one inner tensor, which begins at `base` of the whole one."""
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
