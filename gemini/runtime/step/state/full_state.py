"""Whole values of parameters from shards, and shards from whole values: weights, and planes of the
optimizer's state.

Rank 0 holds whole values in host memory, other ranks their own shards for as long as it takes; or
every rank has DTensors. What is larger is streamed (`optim.state.state_stream`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any

import torch
from torch import Tensor

from gemini.chunk.local import full_tensor_of, own_part
from gemini.chunk.storage import Chunk, params_in
from gemini.comm.links import Links
from gemini.dtypes import DTYPES
from gemini.optim.rules.state_layout import MASTER
from gemini.optim.state.pieces import Planes
from gemini.optim.state.space import Block
from gemini.optim.state.tiered_state import TieredState
from gemini.runtime.sharding import Sharding
from gemini.units import ChunkId, ParamId

from .dtensors import dtensor_of, dtensors_in, full_value

Key = tuple[ChunkId, str]  # of a shard's plane


def gathered(
    sharding: Sharding, chunk: Chunk, shard: Tensor, *, cut: bool
) -> Iterator[tuple[ParamId, Tensor]]:
    """Parameters of a chunk with their values in `shard` [S] of every rank: on rank 0 whole, in
    host memory and maybe a view, elsewhere nothing. Of an opaque one its bytes. Collective.

    cut: DTensors on every rank, and bytes.
    """
    links = sharding.links[chunk.spec.group]
    if cut:
        payload = links.gather_for_all(shard.to(links.shards.device), chunk.spec.id)
    else:
        found = links.gather(shard)
        if found is None:
            return
        payload = found.cpu()
    for param, mine in params_in(sharding.layout, chunk.spec, payload):
        if param in sharding.opaque:
            yield param, mine.cpu()
        elif cut:
            yield param, dtensor_of(links, sharding.params[param], mine)
        else:
            value = full_tensor_of(sharding.params[param], mine).cpu()
            if sharding.comm.rank == 0:  # others only gave their parts of a split parameter
                yield param, value


def scatter(
    sharding: Sharding,
    chunk: Chunk,
    payload: Tensor | None,
    shard: Tensor,
    values: Mapping[ParamId, Tensor | None],
    split: Set[ParamId],
) -> None:
    """Put `values` of rank 0 into the chunk's `payload`, [S * W] on the first rank, and this rank's
    part of that into `shard` [S]. Collective.

    values: by parameter, the same ones on all ranks. split: those of which every rank gives its
        part, a DTensor.
    """
    links = sharding.links[chunk.spec.group]
    full_values = {
        param: full_value(v) for param, v in values.items() if v is not None and param in split
    }
    if payload is not None:
        for param, place in params_in(sharding.layout, chunk.spec, payload):
            if param in values:
                whole = full_values.get(param, values[param]) if sharding.comm.rank == 0 else None
                value = _given_part(links, sharding.params[param], whole, place.dtype)
                place.copy_(value.reshape(place.shape))
    links.scatter(payload, shard)


def _given_part(links: Links, param: Tensor, whole: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Part that this rank has of rank 0's value of a parameter, or of a plane of its state.

    whole: on rank 0. Collective over the first ranks of all places of what is split.
    """
    for comm in (links.copies, links.split):
        if comm is None:
            continue
        there = torch.empty(param.shape, dtype=dtype, device=comm.device)
        if whole is not None:
            there.copy_(whole)
        comm.broadcast(there)
        whole = there
    assert whole is not None
    return own_part(param, whole)


def gather_state(
    sharding: Sharding, state: TieredState, chunks: Sequence[Chunk], *, cut: bool
) -> dict[str, dict[str, Tensor]]:
    """All state by parameter and plane, as `gathered`. Collective.

    cut: without masters, which are the weights.
    """
    shards: dict[Key, Tensor] = {}

    def keep(block: Block, planes: Planes) -> None:
        chunk = chunks[block.shard]
        for name, plane in planes.items():
            if name not in state.layout.names:
                continue
            key = (chunk.spec.id, name)
            if key not in shards:
                shards[key] = torch.zeros(chunk.spec.shard_numel, dtype=plane.dtype)
            shards[key][block.elements] = plane

    state.visit(keep)
    whole: dict[str, dict[str, Tensor]] = {}
    for chunk, plane, having in _planes_of(state, chunks):
        shard = shards.pop((chunk.spec.id, plane), None)
        if cut and plane == MASTER:
            continue
        if shard is None:  # other ranks have elements of these parameters
            shard = _zeros(state, plane, chunk.spec.shard_numel)
        for param, value in gathered(sharding, chunk, shard, cut=cut):
            if param in having:
                whole.setdefault(sharding.layout.params[param].name, {})[plane] = value.clone()
    return whole


def scatter_state(
    sharding: Sharding,
    state: TieredState,
    chunks: Sequence[Chunk],
    given: Mapping[str, Mapping[str, Any]],
) -> tuple[dict[Key, Tensor], Mapping[str, Set[str]]]:
    """This rank's [S] of every plane that rank 0 has `given` values of, host; of a DTensor every
    rank gives its part. Elements of other parameters are zeros. Collective.

    Returns the names of the planes that were given, too, by parameter.
    """
    names = sharding.comm.gather_objects(
        {name: {k for k in state.layout.names if k in planes} for name, planes in given.items()}
    )[0]
    flat = {f"{name}.{k}": v for name, planes in given.items() for k, v in planes.items()}
    split = dtensors_in(sharding.comm, flat)
    shards: dict[Key, Tensor] = {}
    for chunk, plane, _ in _planes_of(state, chunks):
        key_of = {
            slot.param: f"{name}.{plane}"
            for slot in chunk.spec.slots
            if plane in names.get(name := sharding.layout.params[slot.param].name, ())
        }
        if not key_of:
            continue
        payload = None
        if sharding.links[chunk.spec.group].is_first:
            payload = _zeros(state, plane, chunk.spec.payload_numel)
        shard = shards[chunk.spec.id, plane] = _zeros(state, plane, chunk.spec.shard_numel)
        values = {param: flat.get(key) for param, key in key_of.items()}
        parted = {param for param, key in key_of.items() if key in split}
        scatter(sharding, chunk, payload, shard, values, parted)
    return shards, names


def _planes_of(
    state: TieredState, chunks: Sequence[Chunk]
) -> Iterator[tuple[Chunk, str, Set[ParamId]]]:
    """(chunk, plane, parameters of the chunk that have the plane), in the order of collectives."""
    for chunk in chunks:
        for plane in state.layout.names:
            params = {slot.param for slot in chunk.spec.slots}
            having = {param for param in params if state.columns.has(param, plane)}
            if having:
                yield chunk, plane, having


def _zeros(state: TieredState, plane: str, numel: int) -> Tensor:
    dtype = next(p.dtype for p in state.layout.planes if p.name == plane)
    return torch.zeros(numel, dtype=DTYPES[dtype])
