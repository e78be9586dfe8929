"""Optimizer state of an engine as whole tensors on rank 0, or as DTensors, and back to all shards.

For `optimizer.state_dict()`: rank 0 holds all of it in host memory, other ranks their own shards
for as long as it takes. What is larger is streamed (`ShardTarget.visit_state`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gemini.chunk.layout import ChunkLayout
from gemini.chunk.local import full_tensor_of
from gemini.chunk.storage import Chunk, params_in
from gemini.dtypes import DTYPES
from gemini.optim.rules.state_layout import MASTER
from gemini.optim.state.pieces import Planes
from gemini.optim.state.space import Block
from gemini.optim.state.tiered_state import TieredState
from gemini.runtime.comm.communicator import Communicator
from gemini.runtime.comm.links import Links
from gemini.units import ChunkId

from .dtensors import dtensor_of, dtensors_in, full_value
from .given_values import given_part

FullState = dict[str, dict[str, Tensor]]  # parameter name -> plane -> the parameter's shape, host
Key = tuple[ChunkId, str]  # of a shard's plane


def gather_state(
    tiered_state: TieredState,
    chunks: list[Chunk],
    layout: ChunkLayout,
    links: Mapping[str, Links],
    params: Sequence[Tensor],
    cut: bool,
) -> FullState:
    """All state on rank 0; of no use on other ranks. Collective.

    cut: as DTensors on every rank; without masters, which are the weights.
    """
    shards: dict[Key, Tensor] = {}

    def keep(block: Block, planes: Planes) -> None:
        chunk = chunks[block.shard]
        for name, plane in planes.items():
            if name not in tiered_state.layout.names:
                continue
            key = (chunk.spec.id, name)
            if key not in shards:
                shards[key] = torch.zeros(chunk.spec.shard_numel, dtype=plane.dtype)
            shards[key][block.shard_offset : block.shard_offset + block.numel] = plane

    tiered_state.visit(keep)
    whole: FullState = {}
    for chunk in chunks:
        for plane in tiered_state.layout.planes:
            having = _having(tiered_state, chunk, plane.name)
            if not having:
                continue
            shard = shards.pop((chunk.spec.id, plane.name), None)
            if shard is None:  # other ranks have elements of these parameters
                shard = torch.zeros(chunk.spec.shard_numel, dtype=DTYPES[plane.dtype])
            group = links[chunk.spec.group]
            payload = None
            if not cut:
                payload = group.gather(shard)
            elif plane.name != MASTER:
                payload = group.gather_for_all(shard.to(group.shards.device), chunk.spec.id)
            if payload is not None:
                for param, mine in params_in(layout, chunk.spec, payload):
                    if param not in having:
                        continue
                    if cut:
                        values = dtensor_of(group, params[param], mine)
                    else:
                        values = full_tensor_of(params[param], mine.cpu().clone()).cpu()
                    whole.setdefault(layout.params[param].name, {})[plane.name] = values
    return whole


def _having(tiered_state: TieredState, chunk: Chunk, plane: str) -> set[int]:
    """Parameters of a chunk that have a plane."""
    params = {slot.param for slot in chunk.spec.slots}
    return {param for param in params if tiered_state.columns.has(param, plane)}


def scatter_state(
    state: Mapping[str, Mapping[str, Any]],
    tiered_state: TieredState,
    chunks: list[Chunk],
    layout: ChunkLayout,
    links: Mapping[str, Links],
    params: Sequence[Tensor],
    comm: Communicator,
) -> dict[Key, Tensor]:
    """This rank's [S] of every plane that rank 0's `state` has, host; of a DTensor every rank
    gives its part. Collective.

    Elements of parameters that the state does not name keep what `tiered_state` holds.
    """
    given = {name: [p.name for p in tiered_state.layout.planes if p.name in state.get(name, {})]
             for name in (spec.name for spec in layout.params)}  # fmt: skip
    given = comm.gather_objects(given)[0]
    flat = {f"{n}.{k}": v for n, planes in state.items() for k, v in planes.items()}
    split = dtensors_in(comm, flat)
    shards: dict[Key, Tensor] = {}
    for chunk in chunks:
        names = [layout.params[slot.param].name for slot in chunk.spec.slots]
        for plane in tiered_state.layout.planes:
            if not any(plane.name in given[name] for name in names):
                continue
            if not _having(tiered_state, chunk, plane.name):
                continue
            keys = [f"{name}.{plane.name}" for name in names]
            wholes = {key: full_value(flat[key]) for key in keys if key in split}
            payload, dtype, group = None, DTYPES[plane.dtype], links[chunk.spec.group]
            if group.is_first:
                payload = torch.zeros(chunk.spec.payload_numel, dtype=dtype)
                for param, mine in params_in(layout, chunk.spec, payload):
                    name = layout.params[param].name
                    if plane.name in given[name]:
                        key = f"{name}.{plane.name}"
                        value = wholes.get(key, flat.get(key)) if comm.rank == 0 else None
                        values = given_part(group, params[param], value, dtype)
                        mine.copy_(values.reshape(mine.shape))
            shard = torch.empty(chunk.spec.shard_numel, dtype=dtype)
            group.scatter(payload, shard)
            shards[chunk.spec.id, plane.name] = shard
    return shards
