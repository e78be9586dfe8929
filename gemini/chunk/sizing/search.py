"""Choosing the capacity of chunks. Pure.

[Note: what is minimised] Of one key (process group, dtype, trainable), in bytes:

    peak gathered bytes + traffic of a step

Peak: payloads of the chunks that one module's own parameters lie in, and of the next `max_prefetch`
chunks; modules run in layout order, and parameters with other names are used again at the end.
Traffic: a gather in forward, one in backward (the chunk that forward ends with stays), one
reduction of what is trainable, and 1 MiB for each of these collectives: about what a link moves
while one starts, so that one of 16 MiB is at most 6 % overhead. Small chunks lower the peak, large
ones the number of collectives; both are bytes that a step waits for or must find room for.

Bounds, in the order in which they give way where they cannot all hold:
1. `C` is at most the largest parameter or the largest repeated block: to gather more than a block
   at a time holds memory for what does not run;
2. as many chunks as the model has blocks, up to 8, so that gathers can hide behind computation;
3. 16 MiB a collective, or `min_chunk_size_m` where that is less;
4. `min_chunk_size_m`.
Parameters that are less than `min_chunk_size_m` together are one chunk, whatever they consist of.
A budget that cannot hold such chunks comes before all of these: they are cut (`cut`).

Waste is capacity left over: chunks of one length take each other's memory over in an allocator, and
what a shorter one leaves is too short for the next. If the best capacity wastes more than 1 %, the
best of those that do not is taken where its peak is at most 10 % higher, if need be below
`min_chunk_size_m`; else `GroupChoice.tight` says what 1 % would cost, and of capacities within 1 %
of the least cost (and 10 % of its peak) the one with least waste is taken.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from gemini.arguments import by_name
from gemini.chunk.layout import ITEMSIZE, ChunkLayout, GroupKey, ParamSpec, layout_order, specs_of
from gemini.units import MIB, Numel

from .packing import Ints, Packing, Sizes, exact_fits, pack

if TYPE_CHECKING:
    from torch import nn

MIN_COLLECTIVE_BYTES = 16 * MIB
MIN_CHUNKS = 8
MAX_WASTE = 0.01  # of used elements, gathered
MAX_PEAK_FOR_WASTE = 1.1  # what a capacity that wastes less may cost, over the best one's peak
TIE = 1.01  # costs are not known better than to 1 %
MAX_CANDIDATES = 384


@dataclass(frozen=True, slots=True)
class RepeatedBlocks:
    """Layers that a model is a stack of."""

    count: int
    largest_numel: int  # 0 where there are none


@dataclass(frozen=True, slots=True)
class GroupChoice:
    """Choice for the parameters of one key."""

    key: GroupKey
    used_numel: int  # of its parameters
    candidates: tuple[Packing, ...]  # ascending capacities, within the bounds
    chosen: Packing
    tight: Packing  # of what wastes at most 1 %, the least peak; bounds may have to give way

    @property
    def capacity(self) -> Numel:
        return Numel(self.chosen.capacity)

    @property
    def itemsize(self) -> int:
        return ITEMSIZE[self.key[1]]

    def waste_fraction(self, packing: Packing) -> float:
        """Capacity left over in gathered chunks, over used elements."""
        return packing.gathered_waste_numel / max(self.used_numel, 1)


@dataclass(frozen=True, slots=True)
class ChunkConfiguration:
    """Capacity of every key, and its cost. All but `seconds` is the same on all ranks."""

    groups: tuple[GroupChoice, ...]  # sorted by key
    layout: ChunkLayout
    seconds: float = field(compare=False)

    @property
    def capacities(self) -> dict[GroupKey, Numel]:
        """Capacities as `ChunkLayout.build` takes them."""
        return {group.key: group.capacity for group in self.groups}

    def check_specs(self, specs: Sequence[ParamSpec]) -> None:
        """Raise ValueError where it was not searched for these parameters."""
        if self.layout.params == tuple(specs):
            return
        known = {spec.name: spec for spec in self.layout.params}
        for spec in specs:
            own = known.get(spec.name)
            if own != spec:
                raise ValueError(
                    f"chunks was searched for another model: it has {_in_words(own)} where the "
                    f"module has {_in_words(spec)}; search it again with the dtype in which the "
                    "module computes, after what is not trained was frozen"
                )
        raise ValueError(
            f"chunks was searched for another model, of {len(known)} parameters in another order; "
            f"the module has {len(specs)}; search it again"
        )

    @property
    def num_chunks(self) -> int:
        return len(self.layout.chunks)

    @property
    def used_numel(self) -> int:
        """Elements of all parameters, tied ones once."""
        return sum(group.used_numel for group in self.groups)

    @property
    def used_bytes(self) -> int:
        return sum(group.used_numel * group.itemsize for group in self.groups)

    @property
    def gathered_waste_numel(self) -> int:
        """Capacity left over in gathered chunks."""
        return sum(group.chosen.gathered_waste_numel for group in self.groups)

    @property
    def gathered_waste_bytes(self) -> int:
        return sum(group.chosen.gathered_waste_numel * group.itemsize for group in self.groups)

    @property
    def gathered_waste_fraction(self) -> float:
        return self.gathered_waste_numel / max(self.used_numel, 1)

    @property
    def persistent_waste_numel(self) -> int:
        """Elements of all ranks' shards that belong to no parameter: alignment."""
        return sum(chunk.payload_numel for chunk in self.layout.chunks) - self.used_numel

    @property
    def persistent_waste_bytes(self) -> int:
        return sum(chunk.payload_bytes for chunk in self.layout.chunks) - self.used_bytes

    @property
    def persistent_waste_fraction(self) -> float:
        return self.persistent_waste_numel / max(self.used_numel, 1)

    @property
    def peak_gathered_bytes(self) -> int:
        """Upper bound of gathered bytes: the sum of the peaks of all keys, whenever they come."""
        return sum(group.chosen.peak_gathered_bytes for group in self.groups)

    def summary(self) -> str:
        """Three lines: seconds, elements used and wasted, percentage. Mi is 2**20 elements."""
        return (
            f"searching chunk configuration is completed in {self.seconds:.2f} s.\n"
            f"used number: {self.used_numel / MIB:.2f} Mi elements, "
            f"wasted number: {self.gathered_waste_numel / MIB:.2f} Mi elements\n"
            f"total wasted percentage is {100 * self.gathered_waste_fraction:.2f}%"
        )


@by_name
def search_chunk_configuration(
    model_or_specs: nn.Module | Sequence[ParamSpec],
    search_range_m: float | None = None,
    hidden_dim: int | None = None,
    min_chunk_size_m: float = 32,
    *,
    dtype: str = "bfloat16",
    world_size: int = 1,
    max_prefetch: int = 1,
    order: Sequence[str] | None = None,
) -> ChunkConfiguration:
    """Search the capacity that costs least; see [Note: what is minimised].

    model_or_specs: anything with `named_parameters`, on the meta device too, or specs.
    search_range_m: capacities from `min_chunk_size_m` to this much more are tried, and no others,
        in 2**20 elements. None: up to the largest parameter or repeated block, and below
        `min_chunk_size_m` where the bounds demand it.
    hidden_dim: of the candidates within this many elements only the longest is tried. None: of
        those within some per mille.
    min_chunk_size_m: in 2**20 elements.
    dtype: in which a model's parameters are kept; specs name theirs.
    world_size: of the layout. It does not change the choice.
    order: a trace, see `layout_order`.

    Candidates are lengths of runs of consecutive parameters. Raises ValueError for no parameters
    and for sizes that are not positive.
    """
    started = time.perf_counter()
    if not min_chunk_size_m > 0:
        raise ValueError(f"min_chunk_size_m={min_chunk_size_m} must be positive")
    if search_range_m is not None and not search_range_m >= 0:
        raise ValueError(f"search_range_m={search_range_m} is negative; 0 tries one capacity")
    if hidden_dim is not None and hidden_dim < 1:
        raise ValueError(f"hidden_dim={hidden_dim} must be positive")
    specs = specs_of(model_or_specs, dtype)
    if not specs:
        raise ValueError("there are no parameters; there is nothing to search chunks for")
    least = max(1, round(min_chunk_size_m * MIB))
    most = None if search_range_m is None else least + round(search_range_m * MIB)
    by_key: dict[GroupKey, list[ParamSpec]] = {}
    for param in layout_order(specs, order):
        by_key.setdefault(specs[param].key, []).append(specs[param])
    groups = tuple(
        _search_group(key, _Packer(by_key[key], hidden_dim, max_prefetch), least, most)
        for key in sorted(by_key)
    )
    capacities = {group.key: group.capacity for group in groups}
    layout = ChunkLayout.build(specs, capacities, world_size, order)
    return ChunkConfiguration(groups, layout, time.perf_counter() - started)


def cut(found: ChunkConfiguration, hidden_dim: int | None = None) -> Iterator[ChunkConfiguration]:
    """Chunks as they were found; then, for a budget that cannot hold these, of at most half the
    capacity each time, until each has one parameter."""
    by_key: dict[GroupKey, list[ParamSpec]] = {}
    for spec in found.layout.params:
        by_key.setdefault(spec.key, []).append(spec)
    packers = {key: _Packer(specs, hidden_dim, max_prefetch=1) for key, specs in by_key.items()}
    while True:
        yield found
        groups = tuple(_halved(group, packers[group.key]) for group in found.groups)
        if groups == found.groups:
            return
        capacities = {group.key: group.capacity for group in groups}
        layout = ChunkLayout.build(found.layout.params, capacities, 1)
        found = ChunkConfiguration(groups, layout, found.seconds)


def _halved(group: GroupChoice, packer: _Packer) -> GroupChoice:
    """Choice of at most half the capacity; the same one if no chunk has several parameters."""
    if group.capacity == 1 or group.chosen.num_chunks == len(packer.sizes.ends):
        return group
    tried = packer.within(max(1, group.capacity // 4), group.capacity // 2, 1)
    return _choose(group.key, packer, tried, tried)


def _in_words(spec: ParamSpec | None) -> str:
    if spec is None:
        return "nothing"
    kind = "trained" if spec.trainable else "frozen"
    return f"{spec.name} of shape {spec.shape} in {spec.dtype}, {kind}"


class _Packer:
    """Parameters of one key, to be packed at any capacities."""

    def __init__(
        self, specs: Sequence[ParamSpec], hidden_dim: int | None, max_prefetch: int
    ) -> None:
        self.sizes = Sizes.of(specs)
        blocks = repeated_blocks(specs)
        self.wanted = min(blocks.count, MIN_CHUNKS)
        self.limit = max(blocks.largest_numel, max(spec.numel for spec in specs))
        self._hidden_dim = hidden_dim
        self._max_prefetch = max_prefetch

    def within(self, low: int, high: int, shortest: int) -> list[Packing]:
        """Packings for capacities in [low, high], lowered to no less than `shortest`."""
        if low > high:
            return []
        fits = np.union1d(exact_fits(self.sizes, low, high), np.array([low, high]))
        packings = pack(self.sizes, _thin(fits, self._hidden_dim), shortest, self._max_prefetch)
        return _least_waste_of_equals(packings)

    def enough(self, packings: Sequence[Packing]) -> list[Packing]:
        """Packings with as many chunks as are wanted."""
        return [packing for packing in packings if packing.num_chunks >= self.wanted]


def _search_group(key: GroupKey, packer: _Packer, least: int, most: int | None) -> GroupChoice:
    """Candidates within as many bounds as can hold, and the choice among them."""
    sizes = packer.sizes
    if sizes.used_numel < least:
        whole = max(1, int(sizes.ends[-1]))
        one_chunk = packer.within(whole, whole, 1)
        return _choose(key, packer, one_chunk, one_chunk)
    if most is not None:
        tried = packer.within(least, most, least)
        tried = packer.enough(tried) or tried
        return _choose(key, packer, tried, tried)
    floor = min(MIN_COLLECTIVE_BYTES // sizes.itemsize, least, packer.limit)
    preferred = packer.enough(packer.within(least, packer.limit, floor))
    allowed = packer.enough(packer.within(floor, packer.limit, floor))
    while not preferred and not allowed:  # a chunk for each parameter is enough: this ends
        floor //= 2
        allowed = packer.enough(packer.within(floor, packer.limit, floor))
    return _choose(key, packer, preferred or allowed, allowed)


def _choose(
    key: GroupKey, packer: _Packer, preferred: Sequence[Packing], allowed: Sequence[Packing]
) -> GroupChoice:
    """Cheapest of `preferred`; if all of those waste too much, the cheapest of `allowed`."""
    used_numel = packer.sizes.used_numel
    candidates = preferred
    best = min(preferred, key=_order)
    most_bytes = MAX_PEAK_FOR_WASTE * best.peak_gathered_bytes
    for packings in (preferred, allowed):
        affordable = [p for p in _lean(packings, used_numel) if p.peak_gathered_bytes <= most_bytes]
        if affordable:
            candidates = packings
            chosen = min(affordable, key=_order)
            break
    else:
        ties = [p for p in preferred if p.cost_bytes <= TIE * best.cost_bytes]
        ties = [p for p in ties if p.peak_gathered_bytes <= most_bytes]
        chosen = min(ties, key=lambda p: (p.gathered_waste_numel, *_order(p)))
    lean = _lean(candidates, used_numel)
    if not lean:
        whole = int(packer.sizes.ends[-1])
        lean = _lean(packer.within(chosen.capacity, max(whole, chosen.capacity), 1), used_numel)
    tight = min(lean, key=lambda p: (p.peak_gathered_bytes, *_order(p)))
    return GroupChoice(key, used_numel, tuple(candidates), chosen, tight)


def _least_waste_of_equals(packings: Sequence[Packing]) -> list[Packing]:
    """The best of the packings that differ only in what is left over."""
    best: dict[tuple[int, int, int], Packing] = {}
    for packing in packings:
        kind = (packing.num_chunks, packing.peak_gathered_bytes, packing.traffic_bytes)
        if kind not in best or _order(packing) < _order(best[kind]):
            best[kind] = packing
    return sorted(best.values(), key=lambda packing: packing.capacity)


def _order(packing: Packing) -> tuple[int, int, int]:
    """Order of packings: least cost first, then waste, then capacity."""
    return (packing.cost_bytes, packing.gathered_waste_numel, packing.capacity)


def _lean(packings: Sequence[Packing], used_numel: int) -> list[Packing]:
    """Packings that waste little."""
    return [p for p in packings if p.gathered_waste_numel <= MAX_WASTE * used_numel]


def _thin(fits: Ints, hidden_dim: int | None) -> Ints:
    """The longest of each interval: of `hidden_dim` elements, and at most MAX_CANDIDATES in all."""
    if hidden_dim is not None:
        fits = _longest_of_each(fits, fits // hidden_dim)
    if len(fits) > MAX_CANDIDATES:
        place = np.log(fits / fits[0]) / np.log(fits[-1] / fits[0])  # 0 to 1, even in ratio
        fits = _longest_of_each(fits, np.floor(place * (MAX_CANDIDATES - 1)).astype(np.int64))
    return fits


def _longest_of_each(fits: Ints, interval: Ints) -> Ints:
    """The last of each run of ascending `fits` that lie in one interval."""
    last = np.append(interval[1:] != interval[:-1], True)
    longest: Ints = fits[last]
    return longest


def repeated_blocks(specs: Sequence[ParamSpec]) -> RepeatedBlocks:
    """Repeated blocks: items of a list whose children have the same names, the outermost of nested
    lists.

    `h.0.attn.weight` and `h.1.attn.weight` are of two blocks, `h.0` and `h.1`. Items that are like
    no other item of their list are looked into: `Sequential(backbone, head)` has the blocks of its
    backbone.
    """
    numels = _count([(spec.name.split("."), spec.numel) for spec in specs])
    return RepeatedBlocks(len(numels), max(numels, default=0))


def _count(named: Sequence[tuple[list[str], int]]) -> list[int]:
    """Numel of each block below; a name is the path from here to its parameter."""
    items: dict[str, list[tuple[list[str], int]]] = {}
    for path, numel in named:
        if len(path) > 1:
            items.setdefault(path[0], []).append((path[1:], numel))
    alike: dict[tuple[str, ...], list[str]] = {}  # by the names of their children
    for item, inside in items.items():
        if item.isdecimal():
            children = tuple(sorted({path[0] for path, _ in inside}))
            alike.setdefault(children, []).append(item)
    blocks = {item for same in alike.values() if len(same) > 1 for item in same}
    numels = []
    for item, inside in items.items():
        numels += [sum(numel for _, numel in inside)] if item in blocks else _count(inside)
    return numels
