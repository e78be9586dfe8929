"""Optimizer state of an engine as whole tensors on rank 0, and from there back to all shards.

For `optimizer.state_dict()`: rank 0 holds all of it in host memory, other ranks their own shards
for as long as it takes. What is larger is streamed (`ShardTarget.visit_state`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from gemini.chunk.layout import ChunkLayout
from gemini.chunk.storage import Chunk
from gemini.dtypes import DTYPES
from gemini.runtime.comm.communicator import Communicator
from gemini.units import ChunkId
from optim.state.pieces import Planes
from optim.state.space import Block
from optim.state.tiered_state import TieredState

Whole = dict[str, dict[str, Tensor]]  # parameter name -> plane -> the parameter's shape, host
Key = tuple[ChunkId, str]  # of a shard's plane


def gather_state(
    tiers: TieredState, chunks: list[Chunk], layout: ChunkLayout, comm: Communicator
) -> Whole:
    """All state on rank 0; empty on other ranks. Collective."""
    shards: dict[Key, Tensor] = {}

    def keep(block: Block, planes: Planes) -> None:
        chunk = chunks[block.shard]
        for name, plane in planes.items():
            key = (chunk.spec.id, name)
            if key not in shards:
                shards[key] = torch.zeros(chunk.spec.shard_numel, dtype=plane.dtype)
            shards[key][block.shard_offset : block.shard_offset + block.numel] = plane

    tiers.visit(keep)
    whole: Whole = {}
    for chunk in chunks:
        for plane in tiers.layout.planes:
            payload = comm.gather(shards.pop((chunk.spec.id, plane.name)))
            if payload is not None:
                for slot in chunk.spec.slots:
                    spec = layout.params[slot.param]
                    values = payload[slot.offset : slot.offset + slot.numel]
                    whole.setdefault(spec.name, {})[plane.name] = (
                        values.cpu().clone().view(spec.shape)
                    )
    return whole


def scatter_state(
    state: Mapping[str, Mapping[str, Any]],
    tiers: TieredState,
    chunks: list[Chunk],
    layout: ChunkLayout,
    comm: Communicator,
) -> dict[Key, Tensor]:
    """This rank's [S] of every plane that rank 0's `state` has, host. Collective.

    Elements of parameters that the state does not name keep what `tiers` holds.
    """
    given = {name: [p.name for p in tiers.layout.planes if p.name in state.get(name, {})]
             for name in (spec.name for spec in layout.params)}  # fmt: skip
    given = comm.gather_objects(given)[0]
    shards: dict[Key, Tensor] = {}
    for chunk in chunks:
        names = [layout.params[slot.param].name for slot in chunk.spec.slots]
        for plane in tiers.layout.planes:
            if not any(plane.name in given[name] for name in names):
                continue
            payload = None
            if comm.rank == 0:
                payload = torch.zeros(chunk.spec.payload_numel, dtype=DTYPES[plane.dtype])
                for slot, name in zip(chunk.spec.slots, names, strict=True):
                    if plane.name in given[name]:
                        values = state[name][plane.name].reshape(-1)
                        payload[slot.offset : slot.offset + slot.numel] = values
            shard = torch.empty(chunk.spec.shard_numel, dtype=DTYPES[plane.dtype])
            comm.scatter(payload, shard)
            shards[chunk.spec.id, plane.name] = shard
    return shards
