"""Specs of parameters, and the chunks, shards and segments that follow from them. Pure.

W shards of a chunk (of its sharding group) · C capacity · S numel of a shard, all in elements

A chunk is a run of whole parameters of one key in layout order, each at a multiple of 64. Its
payload is what is gathered: W shards of S elements, S a multiple of 256, with S * W as small as
holds its parameters. So capacity that is left over is neither stored nor sent.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, TypeVar

from gemini.digests import digest_of
from gemini.saved_names import SavedNames, params_by_path
from gemini.units import (
    PARAM_ALIGN_NUMEL,
    SHARD_ALIGN_NUMEL,
    WORLD,
    ChunkId,
    Numel,
    ParamId,
    align_up,
)

if TYPE_CHECKING:
    from torch import Tensor, nn

T = TypeVar("T")
ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2, "uint8": 1}

# 1 MiB of fp32; what is smaller is packed: each chunk costs some microseconds a step
ALONE_NUMEL = 1 << 18

GroupKey = tuple[str, str, bool]  # (sharding group, dtype, trainable)


@dataclass(frozen=True, slots=True)
class Leaf:
    """One plain tensor of an opaque parameter."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int  # bytes in the parameter, a multiple of 64
    nbytes: int


@dataclass(frozen=True, slots=True)
class Form:
    """Form of an opaque parameter: tensors and context of a class whose bytes no formula knows."""

    kind: str  # the name of its class
    leaves: tuple[Leaf, ...]
    context: str  # what is no tensor in it
    nbytes: int


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """Spec of one parameter, as the layout needs it.

    Tied parameters are one spec: it has the first name, `aliases` the others.
    """

    name: str
    shape: tuple[int, ...]  # of what this rank has of it, before it is sharded
    dtype: str  # of the chunk that holds it: the compute dtype
    trainable: bool = True
    aliases: tuple[str, ...] = ()  # its tied names, in registration order
    group: str = WORLD  # its sharding group: the mesh dimensions that split it already
    form: Form | None = None  # of an opaque one, whose shape and dtype are those of its bytes

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def names(self) -> tuple[str, ...]:
        """All names of the parameter in the module."""
        return (self.name, *self.aliases)

    @property
    def key(self) -> GroupKey:
        """Key of the parameter. Those of different keys never share a chunk: frozen ones have no
        gradient."""
        return (self.group, self.dtype, self.trainable)


def distinct(named: Iterable[tuple[str, T]]) -> list[tuple[T, tuple[str, ...]]]:
    """Each parameter once, in registration order, with all its names."""
    params: dict[int, T] = {}
    names: dict[int, list[str]] = {}
    for name, param in named:
        params[id(param)] = param
        names.setdefault(id(param), []).append(name)
    return [(param, tuple(names[key])) for key, param in params.items()]


def saved_params(module: nn.Module) -> list[tuple[nn.Parameter, tuple[str, ...]]]:
    """Each parameter of a module once, in registration order, with all names that it is saved
    under."""
    if not hasattr(module, "named_modules"):  # no module, but something with its parameters
        return distinct(module.named_parameters(remove_duplicate=False))
    saved = SavedNames(module).saved
    return distinct((saved(path), param) for path, param in params_by_path(module))


def spec_of(param: Tensor, names: tuple[str, ...], dtype: str) -> ParamSpec:
    """Spec of one parameter that is kept in `dtype`."""
    return ParamSpec(names[0], tuple(param.shape), dtype, param.requires_grad, names[1:])


def specs_of(model_or_specs: nn.Module | Sequence[ParamSpec], dtype: str) -> tuple[ParamSpec, ...]:
    """Specs of a model whose parameters are all kept in `dtype`, or the specs given."""
    if isinstance(model_or_specs, Sequence):
        return tuple(model_or_specs)
    return tuple(spec_of(param, names, dtype) for param, names in saved_params(model_or_specs))


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
    group: str = WORLD  # the sharding group of its parameters

    @property
    def key(self) -> GroupKey:
        return (self.group, self.dtype, self.trainable)

    @property
    def used_numel(self) -> int:
        """End of the last parameter."""
        last = self.slots[-1]
        return last.offset + last.numel

    @property
    def payload_numel(self) -> int:
        """Elements that a gather makes: all shards."""
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
class ShardSegment:
    """Segment of one parameter that lies in one shard, by its offset in the shard."""

    param: ParamId
    param_offset: int
    numel: int
    offset: int  # in the shard, a multiple of 64


@dataclass(frozen=True, slots=True)
class ChunkLayout:
    """Layout: where every parameter lies. The same on all ranks; `digest` proves it."""

    params: tuple[ParamSpec, ...]  # registration order
    chunks: tuple[ChunkSpec, ...]  # by their first parameter in layout order
    capacities: tuple[tuple[GroupKey, Numel], ...]  # of all keys, sorted
    world_size: int  # shards of a chunk whose parameters nothing splits
    num_replicas: int = 1  # ranks that have the same shard, over which gradients are summed too

    @classmethod
    def build(
        cls,
        params: Sequence[ParamSpec],
        capacity: int | Mapping[GroupKey, int],
        world_size: int | Mapping[str, int] = 1,
        order: Sequence[str] | None = None,
        alone_numel: int | None = None,
    ) -> ChunkLayout:
        """Pack parameters in layout order, one open chunk for each key.

        A parameter that does not fit in what is left of the open chunk closes it; one that is
        larger than the capacity gets a chunk of its own. `capacity` is in elements, one for all
        keys or one for each. `world_size`: shards of a chunk, of all sharding groups or of each.
        `order` is a trace, see `layout_order`. Of groups with one shard, trainable parameters of
        `alone_numel` elements or more that fill it have chunks of their own.

        Raises ValueError for a capacity or world size below 1, a key without a capacity, a name
        that two parameters have, and a trace that names what is not there.
        """
        sequence = layout_order(params, order)
        keys = sorted({spec.key for spec in params})
        capacities = {key: _capacity_of(key, capacity) for key in keys}
        groups = sorted({WORLD, *(group for group, _, _ in keys)})
        shards = {g: world_size if isinstance(world_size, int) else world_size[g] for g in groups}
        if min(capacities.values(), default=1) < 1 or min(shards.values()) < 1:
            raise ValueError(f"capacity={capacity} and world_size={world_size} must be positive")
        open_slots: dict[GroupKey, list[Slot]] = {}
        closed: list[tuple[GroupKey, tuple[Slot, ...]]] = []
        for param in sequence:
            spec = params[param]
            fills_it = spec.trainable and not spec.numel % SHARD_ALIGN_NUMEL
            # With one shard nothing is sent, and a chunk of one parameter saves a copy of its
            # gradient, which becomes the buffer: so it must fill the chunk.
            large = alone_numel is not None and spec.numel >= alone_numel
            if large and fills_it and shards[spec.group] == 1:
                closed.append((spec.key, (Slot(param, 0, spec.numel),)))
                continue
            slots = open_slots.setdefault(spec.key, [])
            end = align_up(slots[-1].offset + slots[-1].numel, PARAM_ALIGN_NUMEL) if slots else 0
            if slots and end + spec.numel > capacities[spec.key]:
                closed.append((spec.key, tuple(slots)))
                slots = open_slots[spec.key] = []
                end = 0
            slots.append(Slot(param, end, spec.numel))
        closed += [(key, tuple(slots)) for key, slots in open_slots.items() if slots]
        # chunks close out of order (a large parameter before the open chunk that it interrupts);
        # ids are in layout order
        position = {param: i for i, param in enumerate(sequence)}
        closed.sort(key=lambda entry: position[entry[1][0].param])
        chunks = []
        for i, ((group, dtype, trainable), packed) in enumerate(closed):
            shard = shard_numel(packed[-1].offset + packed[-1].numel, shards[group])
            chunks.append(
                ChunkSpec(ChunkId(i), dtype, trainable, packed, shard, shards[group], group)
            )
        return cls(tuple(params), tuple(chunks), tuple(capacities.items()), shards[WORLD])

    def with_trainable(self, chunks: Collection[ChunkId]) -> ChunkLayout:
        """Layout in which these chunks are trained too; ids and sizes stay."""
        params = {slot.param for chunk in chunks for slot in self.chunks[chunk].slots}
        capacities = dict(self.capacities)
        for chunk in sorted(chunks):
            group, dtype, trainable = self.chunks[chunk].key
            capacities.setdefault((group, dtype, True), capacities[group, dtype, trainable])
        return replace(
            self,
            params=tuple(
                replace(spec, trainable=spec.trainable or ParamId(i) in params)
                for i, spec in enumerate(self.params)
            ),
            chunks=tuple(
                replace(spec, trainable=spec.trainable or spec.id in chunks) for spec in self.chunks
            ),
            capacities=tuple(sorted(capacities.items())),
        )

    def with_params(self, params: Sequence[ParamSpec]) -> ChunkLayout:
        """Layout of the same chunks with these parameters in their slots, none of them larger."""
        assert all(new.numel <= old.numel for new, old in zip(params, self.params, strict=True))
        return replace(
            self,
            params=tuple(params),
            chunks=tuple(
                replace(
                    chunk,
                    slots=tuple(replace(s, numel=params[s.param].numel) for s in chunk.slots),
                )
                for chunk in self.chunks
            ),
        )

    def chunk_of(self) -> dict[ParamId, ChunkId]:
        """Chunk of every parameter."""
        return {slot.param: chunk.id for chunk in self.chunks for slot in chunk.slots}

    def shard_segments(self, chunk: ChunkSpec, rank: int) -> tuple[ShardSegment, ...]:
        """Segments of `rank`'s shard of a chunk, in order."""
        lo = rank * chunk.shard_numel
        hi = lo + chunk.shard_numel
        parts = []
        for slot in chunk.slots:
            a, b = max(lo, slot.offset), min(hi, slot.offset + slot.numel)
            if a < b:
                parts.append(ShardSegment(slot.param, a - slot.offset, b - a, a - lo))
        return tuple(parts)

    def digest(self) -> str:
        """Digest of exactly this layout."""
        return digest_of(self)


def training_layout(
    params: Sequence[ParamSpec],
    capacity: int | Mapping[GroupKey, int],
    world_size: int | Mapping[str, int],
    order: Sequence[str] | None = None,
    num_replicas: int = 1,
) -> ChunkLayout:
    """Layout with which a module is trained: `build` with capacities that a search has found.

    With one shard nothing is gathered, so chunks need not be large. There a large parameter is
    alone in its chunk, whose gradient buffer, on one rank, is the gradient that autograd made.
    """
    layout = ChunkLayout.build(params, capacity, world_size, order, ALONE_NUMEL)
    return replace(layout, num_replicas=num_replicas)


def shard_numel(used_numel: int, world_size: int) -> Numel:
    """S: the least multiple of 256 of which `world_size` hold `used_numel` elements."""
    return Numel(align_up(max(1, -(-used_numel // world_size)), SHARD_ALIGN_NUMEL))


def layout_order(params: Sequence[ParamSpec], trace: Sequence[str] | None) -> tuple[ParamId, ...]:
    """Layout order: registration order, or the order of first uses in a trace.

    trace: names of parameters as they were used; a name may come again, a tied parameter by any of
        its names. Parameters that it does not name follow in registration order.
    Raises ValueError for a name that no parameter has or that two have.
    """
    by_name: dict[str, ParamId] = {}
    for i, spec in enumerate(params):
        for name in spec.names:
            if name in by_name:
                raise ValueError(f"two parameters are named {name}; a tied one is one spec")
            by_name[name] = ParamId(i)
    used = []
    for name in trace or ():
        if name not in by_name:
            raise ValueError(f"the trace names {name}, which is no parameter of this model")
        used.append(by_name[name])
    return tuple(dict.fromkeys([*used, *(ParamId(i) for i in range(len(params)))]))


def _capacity_of(key: GroupKey, capacity: int | Mapping[GroupKey, int]) -> Numel:
    if not isinstance(capacity, Mapping):
        return Numel(capacity)
    if key not in capacity:
        group, dtype, trainable = key
        kind = "trainable" if trainable else "frozen"
        raise ValueError(f"no capacity was given for {kind} {dtype} parameters of group {group}")
    return Numel(capacity[key])
