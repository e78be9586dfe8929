"""Whole parameters from shards and back, one chunk at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from gemini.chunk.storage import Chunk
from gemini.runtime.memory.user_writes import follow_shard
from gemini.runtime.parts import Parts
from gemini.runtime.step.weights import adopt_changes, after_step
from gemini.units import ParamId


def full_parameters(parts: Parts) -> Iterator[tuple[str, Tensor]]:
    """(name, value) of every parameter on rank 0, nothing on the others; all ranks iterate.

    Values are the fp32 masters where there are any, in the dtype that the parameter had before
    wrapping, on the CPU. Tied parameters come under each of their names, as one tensor.
    """
    adopt_changes(parts)
    for chunk in parts.chunks:
        payload = parts.comm.gather(master_of(parts, chunk))
        if payload is None:
            continue
        payload = payload.cpu()
        for slot, place in enumerate(chunk.spec.slots):
            spec = parts.layout.params[place.param]
            value = chunk.view(payload, slot).view(spec.shape)
            value = value.to(parts.original_dtypes[place.param], copy=True)
            for name in spec.names:
                yield name, value


def salvageable(parts: Parts) -> dict[str, Tensor]:
    """Copies, in the compute dtype, of this rank's whole parameters that need no disk.

    What is left where files are lost: 16-bit values, and not the fp32 masters. At several ranks
    only gathered chunks are whole.
    """
    parts.regather.end()
    found = {}
    for chunk in parts.chunks:
        values = chunk.payload
        if not chunk.gathered:
            if chunk.files is not None or parts.comm.world_size > 1:
                continue
            values = chunk.shard
        for slot, place in enumerate(chunk.spec.slots):
            spec = parts.layout.params[place.param]
            value = chunk.view(values, slot).view(spec.shape).cpu().clone()
            found.update(dict.fromkeys(spec.names, value))
    return found


@torch.no_grad()
def load_full_parameters(parts: Parts, values: Mapping[str, Tensor]) -> None:
    """Rank 0's `values` for the parameters they name; all ranks call, the others' are ignored.

    Shards and fp32 masters take them, moments and step counts stay. What is not named stays.
    Raises ValueError on every rank, before anything is changed, where a shape differs.
    """
    adopt_changes(parts)
    known = [(name, spec.shape) for spec in parts.layout.params for name in spec.names]
    wrong = [
        f"{name}: {tuple(values[name].shape)} was given, {shape} is expected"
        for name, shape in known
        if name in values and tuple(values[name].shape) != shape
    ]
    wrong, named = parts.comm.gather_objects((wrong, [n for n, _ in known if n in values]))[0]
    if wrong:
        raise ValueError("the state dict does not fit: " + "; ".join(wrong))
    given = set(named)
    for chunk in parts.chunks:
        slots = [
            (slot, next((n for n in parts.layout.params[place.param].names if n in given), None))
            for slot, place in enumerate(chunk.spec.slots)
        ]
        if all(name is None for _, name in slots):
            continue
        mine = master_of(parts, chunk)
        payload = parts.comm.gather(mine)
        if payload is not None:
            for slot, name in slots:
                if name is not None:
                    chunk.view(payload, slot).copy_(values[name].reshape(-1))
        parts.comm.scatter(payload, mine)
        _set_master(parts, chunk, mine)
    parts.manager.release_all()
    after_step(parts, trained=False)
    params = range(len(parts.params))
    parts.adoption.stepped(
        [p for p in map(ParamId, params) if given & set(parts.layout.params[p].names)]
    )


def master_of(parts: Parts, chunk: Chunk) -> Tensor:
    """[S] fp32 on the CPU: a copy of a chunk's shard, as exact as it is known."""
    if parts.target is not None and chunk.spec.trainable:
        return parts.target.read_master(chunk)
    original = parts.storage.originals.get(chunk.spec.id)
    shard = chunk.load_shard()
    if original is None:
        return shard.to("cpu", torch.float32, copy=True)
    follow_shard(original, shard.to(original.device))
    return original.to("cpu", copy=True)


def _set_master(parts: Parts, chunk: Chunk, values: Tensor) -> None:
    if parts.target is not None and chunk.spec.trainable:
        parts.target.write_master(chunk, values)
        return
    chunk.store_shard(values)
    if chunk.spec.id in parts.storage.originals:
        parts.storage.originals.put(chunk.spec.id, values.to(parts.backend.device))
