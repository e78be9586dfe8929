"""Deltas: the changed elements of a parameter, in bytes that leave and are put in place again.

k changed elements · m bytes of gaps, k or a few more

A gap says how many elements lie between a changed one and the one before it, 0 to 254; 255 says
that 255 more do, and that none has changed there. So an element of 16 bits costs 3 bytes, and 4 if
only one of 500 changes. Positions, with 4 bytes each, would be twice that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gemini.units import ParamId, align_up

SKIP = 255  # a gap that goes on
ALIGNED = 8  # bytes at which values begin
RUN_NUMEL = 1 << 20  # elements of a parameter whose positions are looked at together


def gaps_of(positions: Tensor) -> Tensor:
    """Gaps uint8 [m] of positions int64 [k], which rise from 0 on."""
    if not positions.numel():
        return positions.to(torch.uint8)
    between = positions.diff(prepend=positions.new_full((1,), -1)) - 1
    ends = (between // SKIP + 1).cumsum(0)
    gaps = torch.full((int(ends[-1]),), SKIP, dtype=torch.uint8, device=positions.device)
    gaps[ends - 1] = (between % SKIP).to(torch.uint8)
    return gaps


def positions_of(gaps: Tensor) -> Tensor:
    """Positions int64 [k] of gaps uint8 [m]."""
    ends = gaps != SKIP
    return ((gaps.to(torch.int64) + ends).cumsum(0) - 1)[ends]


@dataclass(frozen=True, slots=True)
class Run:
    """Changed elements of a run of a parameter: gaps [m] from element `start` on, values [k]."""

    start: int
    gaps: Tensor
    values: Tensor


@dataclass(frozen=True, slots=True)
class Delta:
    """New values of the elements of one parameter that have changed."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    runs: tuple[Run, ...]

    @property
    def nbytes(self) -> int:
        return sum(run.gaps.nbytes + run.values.nbytes for run in self.runs)

    @property
    def numel(self) -> int:
        """Number of changed elements."""
        return sum(run.values.numel() for run in self.runs)

    @torch.no_grad()
    def apply(self, into: Tensor) -> None:
        """Put the new values into a tensor that has the others, in place.

        Raises ValueError for one of another shape or dtype, or that is not contiguous.
        """
        if tuple(into.shape) != self.shape or into.dtype != self.dtype or not into.is_contiguous():
            raise ValueError(
                f"a delta of {list(self.shape)} {self.dtype} for {list(into.shape)} {into.dtype}, "
                f"contiguous: {into.is_contiguous()}; expected the parameter that it is of"
            )
        flat = into.detach().view(-1)
        for run in self.runs:
            place = run.start + positions_of(run.gaps)
            if place.numel() != run.values.numel() or not _is_inside(run.start, place, flat):
                raise ValueError(
                    f"a run of {run.values.numel()} values from element {run.start} on, at "
                    f"{place.numel()} places; expected as many places, inside of the parameter"
                )
            flat[place.to(flat.device)] = run.values.to(flat.device)


def _is_inside(start: int, place: Tensor, flat: Tensor) -> bool:
    """Whether places, which rise, are elements."""
    return start >= 0 and (not place.numel() or int(place[-1]) < flat.numel())


@dataclass(frozen=True, slots=True)
class Size:
    """Size of a run of a delta: its first element in the parameter, k, and m."""

    start: int
    num_values: int
    num_gaps: int


@dataclass(frozen=True, slots=True)
class PackedRun:
    """Place of a run in the buffer of a bucket: values from byte `first` on, gaps behind them."""

    param: ParamId
    size: Size
    first: int
    itemsize: int

    @property
    def values(self) -> slice:
        return slice(self.first, self.first + self.size.num_values * self.itemsize)

    @property
    def gaps(self) -> slice:
        return slice(self.values.stop, self.values.stop + self.size.num_gaps)


@dataclass(frozen=True, slots=True)
class Pack:
    """Bucket of deltas: what each rank has of them lies together, rank by rank."""

    params: tuple[ParamId, ...]
    parts: tuple[tuple[PackedRun, ...], ...]  # by rank
    bytes_of: tuple[slice, ...]  # of the buffer, by rank

    @property
    def nbytes(self) -> int:
        end: int = self.bytes_of[-1].stop
        return end


Sizes = Sequence[Mapping[ParamId, Sequence[Size]]]  # of every rank


def nbytes_of(sizes: Sizes, param: ParamId, itemsize: int) -> int:
    """Bytes of a delta in a buffer."""
    found = [size for of_rank in sizes for size in of_rank.get(param, ())]
    return sum(align_up(s.num_values * itemsize + s.num_gaps, ALIGNED) for s in found)


def packs_of(itemsizes: Mapping[ParamId, int], sizes: Sizes, nbytes: int) -> Iterator[Pack]:
    """Packs of at most `nbytes` with all deltas, in the order of `itemsizes`; a larger delta is
    alone in its pack. itemsizes: of the values of each. Of a parameter without a run nothing has
    changed."""
    taken: list[ParamId] = []
    total = 0
    for param, itemsize in itemsizes.items():
        more = nbytes_of(sizes, param, itemsize)
        if taken and total + more > nbytes:
            yield _pack(taken, itemsizes, sizes)
            taken, total = [], 0
        if more:
            taken.append(param)
            total += more
    if taken:
        yield _pack(taken, itemsizes, sizes)


def _pack(params: Sequence[ParamId], itemsizes: Mapping[ParamId, int], sizes: Sizes) -> Pack:
    parts: list[tuple[PackedRun, ...]] = []
    places: list[slice] = []
    end = 0
    for of_rank in sizes:
        begin, found = end, []
        for param in params:
            for size in of_rank.get(param, ()):
                part = PackedRun(param, size, end, itemsizes[param])
                found.append(part)
                end = align_up(part.gaps.stop, ALIGNED)
        parts.append(tuple(found))
        places.append(slice(begin, end))
    return Pack(tuple(params), tuple(parts), tuple(places))
