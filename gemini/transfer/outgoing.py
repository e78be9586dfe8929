"""Weights of an engine in buckets, from wherever they live, for all ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gemini.chunk.local import full_tensor_of
from gemini.runtime.memory.changed_weights import ChangedWeights
from gemini.runtime.memory.shard_storage import ShardStorage
from gemini.runtime.passes import Passes
from gemini.runtime.schedule.planning import Planning
from gemini.runtime.sharding import Sharding
from gemini.runtime.weights import Weights
from gemini.units import WORLD, ParamId

from .buckets import Range, ranges_of
from .deltas import Delta, Pack, Run, gaps_of, packs_of
from .tracking import changed_positions, sizes_of, tracked


@dataclass(frozen=True, slots=True)
class WeightVersion:
    """Weights of one moment of a process, for `GeminiDDP.weights(since=)`."""

    of_params: tuple[int, ...] = field(repr=False)  # counters of changes


@dataclass(frozen=True, slots=True)
class WeightBucket:
    """Some of the weights.

    tensors: whole parameters by the names of `state_dict()`, in the dtype in which the model
        computes, on the device of collectives. Their memory is that of the next bucket, too: copy
        what is to stay. A tied parameter comes under its first name.
    version: of all weights that leave together.
    deltas: changed elements of other parameters, by name, in the same memory.
    """

    tensors: Mapping[str, Tensor]
    version: WeightVersion
    deltas: Mapping[str, Delta] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        whole = sum(tensor.nbytes for tensor in self.tensors.values())
        return whole + sum(delta.nbytes for delta in self.deltas.values())

    def digest(self) -> str:
        """SHA-256 of names, dtypes, shapes and bytes, in order."""
        found = hashlib.sha256(digest_of(self.tensors).encode())
        for name, delta in self.deltas.items():
            found.update(f"{name} {delta.dtype} {delta.shape}\n".encode())
            for run in delta.runs:
                runs = {f"{run.start} gaps": run.gaps, f"{run.start} values": run.values}
                found.update(digest_of(runs).encode())
        return found.hexdigest()

    def apply(self, weights: MutableMapping[str, Tensor]) -> None:
        """Bring a receiver's weights, by name, to what this bucket has.

        A whole parameter that the receiver lacks becomes a copy; others are written in place. The
        dtype and the device stay the receiver's, but a delta needs its dtype. Raises ValueError for
        a parameter of another shape, and for a delta of one that is not there.
        """
        for name, tensor in self.tensors.items():
            own = weights.get(name)
            if own is None:
                weights[name] = tensor.detach().clone()
                continue
            if own.shape != tensor.shape:
                raise ValueError(
                    f"{name} is {list(own.shape)} here; expected {list(tensor.shape)}, as sent"
                )
            own.detach().copy_(tensor)
        for name, delta in self.deltas.items():
            if name not in weights:
                raise ValueError(
                    f"a delta of {name}, which is not here; expected weights of an earlier version"
                )
            delta.apply(weights[name])


def digest_of(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 of names, dtypes, shapes and bytes, in order; sort names where orders may differ."""
    found = hashlib.sha256()
    for name, tensor in tensors.items():
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        plain = tensor.detach().cpu().contiguous().reshape(-1)
        found.update(plain.view(torch.uint8).numpy().data)
    return found.hexdigest()


def version_of(weights: Weights) -> WeightVersion:
    return WeightVersion(weights.user_writes.counters())


Also = Callable[[set[ParamId]], set[ParamId]]


def leaving(
    weights: Weights,
    passes: Passes,
    planning: Planning,
    storage: ShardStorage,
    nbytes: int,
    since: WeightVersion | None,
    deltas: bool = False,
    also: Also | None = None,
) -> Iterator[WeightBucket]:
    """Yield buckets of the committed weights; see `GeminiDDP.weights`. Collective.

    also: parameters that leave, of those that have changed, the same on all ranks: others may
        follow from them.
    """
    found = outgoing(weights, planning, storage, nbytes, since, deltas, also)
    while True:
        with passes.lock:
            passes.refuse_beside_pass("weights()")
            one = next(found, None)
        if one is None:
            return
        yield one


def outgoing(
    weights: Weights,
    planning: Planning,
    storage: ShardStorage,
    nbytes: int,
    since: WeightVersion | None,
    deltas: bool = False,
    also: Also | None = None,
) -> Iterator[WeightBucket]:
    """Yield buckets, for a caller that holds the lock; see `leaving`."""
    weights.write_back_changes()
    sharding = weights.sharding
    version = version_of(weights)
    changed = _changed(since, version)
    marks = tracked(sharding, planning, storage, version.of_params) if deltas else None
    unknown = changed if since is None else _unknown(sharding, marks, changed, since, version)
    said = sharding.comm.gather_objects((changed, unknown))
    wanted = set[ParamId]().union(*(one for one, _ in said))
    whole = set[ParamId]().union(*(one for _, one in said))
    if also is not None:
        wanted = whole = also(wanted)
    sizes, itemsizes = sizes_of(sharding, marks, wanted - whole)
    whole = wanted - itemsizes.keys()  # and those of which most has changed
    buckets: list[Range | Pack] = [*ranges_of(sharding.layout, whole, nbytes)]
    buckets += packs_of(itemsizes, sizes, nbytes)
    sender = _Sender(sharding, buckets, marks)
    for one in buckets:
        weights.settle()
        if version_of(weights) != version:
            raise RuntimeError(
                "weights changed while they were sent, so the rest would be of another version; "
                "go through all buckets before the next step"
            )
        if isinstance(one, Pack):
            yield WeightBucket({}, version, sender.deltas(one))
        else:
            yield WeightBucket(sender.tensors(one, whole), version)
    weights.settle()
    if marks is not None and version_of(weights) == version:  # the receiver has all of it
        marks.restart(version.of_params)


def _changed(since: WeightVersion | None, now: WeightVersion) -> set[ParamId]:
    params = map(ParamId, range(len(now.of_params)))
    if since is None:
        return set(params)
    if len(since.of_params) != len(now.of_params):
        raise ValueError("since= is a version of another model; expected one of this")
    return {p for p in params if since.of_params[p] != now.of_params[p]}


def _unknown(
    sharding: Sharding,
    marks: ChangedWeights | None,
    changed: set[ParamId],
    since: WeightVersion,
    now: WeightVersion,
) -> set[ParamId]:
    """Changed parameters of which it is not known what has changed."""
    if marks is None:
        return changed
    return {
        p
        for p in changed
        if sharding.chunk_of[p] not in marks.bits
        or not marks.knows(p, since.of_params[p], now.of_params[p])
    }


class _Sender:
    """Fills one buffer with bucket after bucket, from blocks of shards if these are in files."""

    def __init__(
        self, sharding: Sharding, buckets: list[Range | Pack], marks: ChangedWeights | None
    ) -> None:
        self._sharding, self._marks = sharding, marks
        sizes = (
            one.nbytes if isinstance(one, Pack)
            else len(one) * sharding.chunks[one.chunk].dtype.itemsize
            for one in buckets
        )  # fmt: skip
        self._buffer = torch.empty(
            max(sizes, default=0), dtype=torch.uint8, device=sharding.comm.device
        )

    @torch.no_grad()
    def tensors(self, one: Range, wanted: set[ParamId]) -> dict[str, Tensor]:
        chunk = self._sharding.chunks[one.chunk]
        values = self._filled(one)
        found: dict[str, Tensor] = {}
        for index in one.slots:
            slot = chunk.spec.slots[index]
            if slot.param not in wanted:
                continue
            spec = self._sharding.layout.params[slot.param]
            flat = values[slot.offset - one.start : slot.offset - one.start + slot.numel]
            if slot.param in self._sharding.opaque:
                found |= self._sharding.opaque[slot.param].saved(flat.cpu())
            else:
                own = flat.view(spec.shape)
                found[spec.name] = full_tensor_of(self._sharding.params[slot.param], own)
        return found

    def _filled(self, one: Range) -> Tensor:
        """Elements of a range, in the buffer."""
        chunk = self._sharding.chunks[one.chunk]
        links = self._sharding.links[chunk.spec.group]
        values = self._buffer[: len(one) * chunk.dtype.itemsize].view(chunk.dtype)
        if one.chunk in self._sharding.never_released and chunk.gathered:
            chunk.wait_gathered()
            return values.copy_(chunk.payload[one.start : one.stop])
        for rank, there, own in one.parts_of(chunk.spec.shard_numel):
            if rank == links.rank:
                values[there].copy_(chunk.load_part(own.start, own.stop))
            links.shards.broadcast(values[there], source=rank)
        return values

    @torch.no_grad()
    def deltas(self, pack: Pack) -> dict[str, Delta]:
        shards = self._sharding.links[WORLD].shards
        self._fill(pack, shards.rank)
        for rank, place in enumerate(pack.bytes_of):
            if place.start < place.stop:
                shards.broadcast(self._buffer[place], source=rank)
        runs: dict[ParamId, list[Run]] = {param: [] for param in pack.params}
        for part in (part for of_rank in pack.parts for part in of_rank):
            dtype = self._sharding.chunks[self._sharding.chunk_of[part.param]].dtype
            values = self._buffer[part.values].view(dtype)
            runs[part.param].append(Run(part.size.start, self._buffer[part.gaps], values))
        found: dict[str, Delta] = {}
        for param, of_param in runs.items():
            spec = self._sharding.layout.params[param]
            dtype = self._sharding.chunks[self._sharding.chunk_of[param]].dtype
            found[spec.name] = Delta(tuple(spec.shape), dtype, tuple(of_param))
        return found

    def _fill(self, pack: Pack, rank: int) -> None:
        """Put this rank's runs into the buffer."""
        assert self._marks is not None
        for part in pack.parts[rank]:
            chunk = self._sharding.chunks[self._sharding.chunk_of[part.param]]
            start, at = changed_positions(self._sharding, self._marks, part.param, part.size.start)
            last = start + int(at[-1]) + 1
            run = chunk.load_part(start, last)
            values = run[at.to(run.device)]
            self._buffer[part.values].view(values.dtype).copy_(values)
            self._buffer[part.gaps].copy_(gaps_of(at))
