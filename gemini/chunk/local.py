"""What this rank has of a parameter that torch has split over a mesh (a DTensor): its local tensor.

Splitting is torch's: nothing here knows how. A tensor that is no DTensor is its own local one.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn

from gemini.mesh.roles import WORLD


def is_dtensor(tensor: object) -> bool:
    """Without importing what takes a second to import: who has one has imported it."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_of(tensor: Tensor) -> Tensor:
    """The local tensor itself, not a view of it in autograd."""
    found: Tensor = _any(tensor)._local_tensor if is_dtensor(tensor) else tensor
    return found


def mesh_dims(tensor: Tensor) -> tuple[str, ...]:
    """Names of the dimensions that a tensor is split or replicated over, if any."""
    return tuple(_any(tensor).device_mesh.mesh_dim_names) if is_dtensor(tensor) else ()


def group_of(tensor: Tensor) -> str:
    """The sharding group of a parameter: the dimensions that split it already."""
    if not is_dtensor(tensor):
        return WORLD
    placements = zip(mesh_dims(tensor), _any(tensor).placements, strict=True)
    return "+".join(name for name, placed in placements if not placed.is_replicate()) or WORLD


def region_of(tensor: Tensor) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Shape of the whole, and offsets and sizes of this rank's box in it."""
    shape = tuple(tensor.shape)
    if group_of(tensor) == WORLD:
        return shape, (0,) * len(shape), shape
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    split = _any(tensor)
    sizes, offsets = compute_local_shape_and_global_offset(
        split.shape, split.device_mesh, split.placements
    )
    return shape, tuple(offsets), tuple(sizes)


def local_gradient(param: Tensor, grad: Tensor) -> Tensor:
    """The gradient of a parameter's local tensor. Collective where it is a sum of parts."""
    if not is_dtensor(grad):
        return grad
    split = _any(grad)
    if split.placements != _any(param).placements:
        split = split.redistribute(placements=_any(param).placements)
    local = split._local_tensor
    waited: Tensor = local.wait() if hasattr(local, "wait") else local
    return waited


def rebind(param: nn.Parameter, local: Tensor) -> None:
    """Make `local` what this rank has of a DTensor, whose identity stays."""
    with torch.no_grad():
        made = nn.Parameter(split_like(param, local), requires_grad=param.requires_grad)
    torch.utils.swap_tensors(param, made)


def full_tensor_of(param: Tensor, local: Tensor) -> Tensor:
    """The whole tensor, of which all ranks that split `param` have local values. Collective."""
    if group_of(param) == WORLD:
        return local
    device = torch.device(_any(param).device_mesh.device_type)
    with torch.no_grad():
        whole: Tensor = _any(split_like(param, local.to(device))).full_tensor()
    return whole


def own_part(param: Tensor, whole: Tensor) -> Tensor:
    """This rank's box of values of the whole parameter."""
    _, offsets, sizes = region_of(param)
    box = tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))
    return whole[box] if box else whole


def split_like(param: Tensor, local: Tensor) -> Tensor:
    from torch.distributed.tensor import DTensor

    like = _any(param)
    made: Tensor = DTensor.from_local(
        local,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )
    return made


def _any(tensor: object) -> Any:
    return tensor
