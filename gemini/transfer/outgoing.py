"""Weights of an engine in buckets, from wherever they live, for all ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gemini.chunk.local import full_tensor_of
from gemini.runtime.parts import Parts, settle
from gemini.runtime.step.weights import write_back_changes
from gemini.units import ChunkId, ParamId

from .buckets import Range, ranges_of


@dataclass(frozen=True, slots=True)
class WeightVersion:
    """Weights of one moment of a process, for `GeminiDDP.weights(since=)`."""

    of_params: tuple[int, ...] = field(repr=False)  # torch's counters of changes


@dataclass(frozen=True, slots=True)
class WeightBucket:
    """Some of the weights.

    tensors: whole parameters by the names of `state_dict()`, in the dtype in which the model
        computes, on the device of collectives. Their memory is that of the next bucket, too: copy
        what is to stay. A tied parameter comes under its first name.
    version: of all weights that leave together.
    """

    tensors: Mapping[str, Tensor]
    version: WeightVersion

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def digest(self) -> str:
        """SHA-256 of names, dtypes, shapes and bytes, in order."""
        found = hashlib.sha256()
        for name, tensor in self.tensors.items():
            found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
            plain = tensor.detach().cpu().contiguous().reshape(-1)
            found.update(plain.view(torch.uint8).numpy().data)
        return found.hexdigest()


def version_of(parts: Parts) -> WeightVersion:
    with torch._C.DisableTorchFunctionSubclass():
        return WeightVersion(tuple(param._version for param in parts.params))


def outgoing(parts: Parts, nbytes: int, since: WeightVersion | None) -> Iterator[WeightBucket]:
    """Yield buckets of the committed weights; see `GeminiDDP.weights`. Collective."""
    write_back_changes(parts)
    version = version_of(parts)
    wanted = set[ParamId]().union(*parts.comm.gather_objects(_changed(since, version)))
    ranges = ranges_of(parts.layout, wanted, nbytes)
    sender = _Sender(parts, ranges)
    for one in ranges:
        settle(parts)
        if version_of(parts) != version:
            raise RuntimeError(
                "weights changed while they were sent, so the rest would be of another version; "
                "go through all buckets before the next step"
            )
        yield WeightBucket(sender.tensors(one, wanted), version)


def _changed(since: WeightVersion | None, now: WeightVersion) -> set[ParamId]:
    params = map(ParamId, range(len(now.of_params)))
    if since is None:
        return set(params)
    if len(since.of_params) != len(now.of_params):
        raise ValueError("since= is a version of another model; expected one of this")
    return {p for p in params if since.of_params[p] != now.of_params[p]}


class _Sender:
    """Fills one buffer with range after range. Of a chunk in a file the shard is read once."""

    def __init__(self, parts: Parts, ranges: list[Range]) -> None:
        self._parts = parts
        sizes = (len(one) * parts.chunks[one.chunk].dtype.itemsize for one in ranges)
        self._buffer = torch.empty(
            max(sizes, default=0), dtype=torch.uint8, device=parts.comm.device
        )
        self._shard: tuple[ChunkId, Tensor] | None = None

    @torch.no_grad()
    def tensors(self, one: Range, wanted: set[ParamId]) -> dict[str, Tensor]:
        parts, chunk = self._parts, self._parts.chunks[one.chunk]
        values = self._filled(one)
        found: dict[str, Tensor] = {}
        for index in one.slots:
            slot = chunk.spec.slots[index]
            if slot.param not in wanted:
                continue
            spec = parts.layout.params[slot.param]
            flat = values[slot.offset - one.start : slot.offset - one.start + slot.numel]
            if slot.param in parts.opaque:
                found |= parts.opaque[slot.param].saved(flat.cpu())
            else:
                own = flat.view(spec.shape)
                found[spec.name] = full_tensor_of(parts.params[slot.param], own)
        return found

    def _filled(self, one: Range) -> Tensor:
        """Elements of a range, in the buffer."""
        parts, chunk = self._parts, self._parts.chunks[one.chunk]
        links = parts.links[chunk.spec.group]
        values = self._buffer[: len(one) * chunk.dtype.itemsize].view(chunk.dtype)
        if one.chunk in parts.never_released and chunk.gathered:
            chunk.wait_gathered()
            return values.copy_(chunk.payload[one.start : one.stop])
        if self._shard is None or self._shard[0] != one.chunk:
            self._shard = None
            self._shard = one.chunk, chunk.load_shard()
        shard = self._shard[1]
        for rank, there, own in one.parts_of(chunk.spec.shard_numel):
            if rank == links.rank:
                values[there].copy_(shard[own])
            links.shards.broadcast(values[there], source=rank)
        return values
