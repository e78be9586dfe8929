"""Local tensor of a parameter that torch has split over a mesh (a DTensor).

Splitting is torch's: nothing here knows how. A tensor that is no DTensor is its own local one.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gemini.units import WORLD, Segments


def is_dtensor(tensor: object) -> bool:
    """Whether it is a DTensor. DTensor is not imported, which takes a second: who has one did
    that."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_of(tensor: Tensor) -> Tensor:
    """Local tensor itself, not a view of it in autograd."""
    local: Tensor = _any(tensor)._local_tensor if is_dtensor(tensor) else tensor
    return local


def mesh_dims(tensor: Tensor) -> tuple[str, ...]:
    """Names of the dimensions that a tensor is split or replicated over, if any."""
    return tuple(_any(tensor).device_mesh.mesh_dim_names) if is_dtensor(tensor) else ()


def group_of(tensor: Tensor) -> str:
    """Sharding group of a parameter: the dimensions that split it already."""
    if not is_dtensor(tensor):
        return WORLD
    placements = zip(mesh_dims(tensor), _any(tensor).placements, strict=True)
    return "+".join(name for name, placed in placements if not placed.is_replicate()) or WORLD


def region_of(tensor: Tensor) -> tuple[tuple[int, ...], tuple[Segments, ...]]:
    """Shape of the whole, and this rank's segments of each dimension in the order of its local
    tensor: one, or several of fused matrices (torch's `_StridedShard`)."""
    shape = tuple(tensor.shape)
    segments: list[Segments] = [((0, size),) for size in shape]
    if group_of(tensor) != WORLD:
        mesh = _any(tensor).device_mesh
        for axis, placed in enumerate(_any(tensor).placements):
            if not placed.is_replicate():
                fused = getattr(placed, "split_factor", 1)
                segments[placed.dim] = _split(
                    segments[placed.dim], fused, mesh.size(axis), mesh.get_local_rank(axis)
                )
    return shape, tuple(segments)


def _split(segments: Segments, fused: int, ranks: int, rank: int) -> Segments:
    """Segments of one of `ranks`, of segments that are `fused` matrices, each cut as torch cuts."""
    total = sum(size for _, size in segments)
    each = -(-total // fused)
    ranges: list[tuple[int, int]] = []
    for first in range(0, total, each or 1):
        size = min(each, total - first)
        part = -(-size // ranks)
        start, stop = (first + min(size, place * part) for place in (rank, rank + 1))
        before = 0
        for offset, length in segments:
            low, high = max(start, before), min(stop, before + length)
            if low < high:
                ranges.append((offset + low - before, high - low))
            before += length
    return tuple(ranges) or ((0, 0),)


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
    """Part that this rank has of the values of a whole parameter."""
    return part_of(whole, region_of(param)[1])


def part_of(whole: Tensor, segments: Sequence[Segments]) -> Tensor:
    """Segments of each dimension, next to each other; a view where there is one of each."""
    for dim, mine in enumerate(segments):
        parts = [whole.narrow(dim, offset, size) for offset, size in mine]
        whole = parts[0] if len(parts) == 1 else torch.cat(parts, dim)
    return whole


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
