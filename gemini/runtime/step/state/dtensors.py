"""Values of parameters as the DTensors that torch.distributed.checkpoint takes, and back.

Shards are runs of a chunk, which no DTensor says: every rank is shown the whole value, and keeps
the part that FSDP2 would give it.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from gemini.chunk.local import group_of, is_dtensor, split_like
from gemini.comm.communicator import Communicator
from gemini.comm.links import Links
from gemini.units import WORLD

_meshes: weakref.WeakKeyDictionary[Any, DeviceMesh] = weakref.WeakKeyDictionary()  # by group


def dtensor_of(links: Links, param: Tensor, local: Tensor) -> Tensor:
    """`local`, what these ranks have of a parameter's value, cut over them along dimension 0; a
    copy in host memory.

    A parameter that torch has split is what it was split into, on all of them; a process without
    a group has the value itself.
    """
    if group_of(param) != WORLD:
        return split_like(param, local.clone()).cpu()
    group = links.shards.process_group
    if group is None:
        return local.to("cpu", copy=True)
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if group not in _meshes:
        _meshes[group] = DeviceMesh.from_group(group, links.shards.device.type)
    mesh, placements = _meshes[group], [Shard(0) if local.dim() else Replicate()]
    sizes, offsets = compute_local_shape_and_global_offset(local.shape, mesh, placements)
    box = tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))
    made: Tensor = DTensor.from_local(
        local[box].clone(),
        mesh,
        placements,
        run_check=False,
        shape=local.shape,
        stride=local.stride(),
    )
    return made.cpu()


def dtensors_in(comm: Communicator, values: Mapping[str, Any]) -> frozenset[str]:
    """Names of what is a DTensor, the same on all ranks. Collective.

    Raises ValueError on every rank where they differ.
    """
    said = comm.gather_objects(frozenset(name for name, v in values.items() if is_dtensor(v)))
    for rank, other in enumerate(said):
        if other != said[0]:
            raise ValueError(
                f"{min(other ^ said[0])} was given as a DTensor on one of ranks 0 and {rank}; "
                "expected every rank's part of it, or whole values on rank 0"
            )
    return frozenset(said[0])


@torch.no_grad()
def full_value(value: Tensor) -> Tensor:
    """A DTensor's value, in host memory. Collective over its mesh."""
    split: Any = value
    whole: Tensor = split.to(split.device_mesh.device_type).full_tensor()
    return whole.cpu()
