"""Memory that two owners share, found before a module is wrapped.

torch keeps what shares memory equal through every update of one of its owners. A chunk has a copy
of a parameter's values, so the other owner would keep the old ones. A parameter that is registered
under two names is one owner.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from gemini.chunk.local import is_dtensor, local_of
from gemini.chunk.opaque import is_opaque
from gemini.trees import tensors_in

_OF_TORCH = vars(nn.Module()).keys()  # attributes in which every module keeps what is registered


@dataclass(frozen=True, slots=True)
class Owner:
    """Owner of a range of addresses, and the elements that it has there."""

    name: str
    in_chunk: bool  # its values move to a chunk
    device: torch.device
    start: int
    end: int
    itemsize: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def is_dense(self) -> bool:
        """Whether it has every element of its range, each once."""
        return math.prod(self.shape) * self.itemsize == self.end - self.start


def check_memory(
    module: nn.Module, params: Sequence[tuple[str, Tensor]], *, given: bool
) -> list[tuple[StorageWeakRef, Owner]]:
    """Raise ValueError, with the names of both, if a parameter shares memory with another owner.

    params: those that chunks take, by name. given: a state dict gives them values, and the memory
        that they have is only their form.

    Returns the memory of `params`, for `note_shared_memory`.
    """
    memory: list[tuple[StorageWeakRef, Owner]] = []
    for name, param in params:
        owner = _owner_of(name, param, in_chunk=True)
        if owner is None:
            continue
        overlaps = math.prod(owner.shape) * owner.itemsize > owner.end - owner.start
        if overlaps and param.requires_grad and not given:
            raise ValueError(
                f"parameter {name} is trained, and elements of it share memory (shape "
                f"{owner.shape}, strides {owner.stride}), which no update in place takes; expected "
                "memory for each element (.clone() or .contiguous())"
            )
        memory.append((StorageWeakRef(local_of(param).untyped_storage()), owner))
    known = {id(param) for _, param in params}
    others = [
        owner
        for name, tensor in _others(module, known)
        if (owner := _owner_of(name, tensor, in_chunk=False))
    ]
    open_: list[Owner] = []
    found = [*(owner for _, owner in memory), *others, *_shared_before()]
    for owner in sorted(found, key=lambda owner: (str(owner.device), owner.start)):
        open_ = [o for o in open_ if o.end > owner.start and o.device == owner.device]
        for other in open_:
            if (owner.in_chunk or other.in_chunk) and _share(owner, other):
                raise ValueError(
                    f"{_said(other)} and {_said(owner)} share memory, and a chunk would have "
                    "values of its own for one of them; expected one nn.Parameter under both "
                    "names if they are tied (head.weight = embedding.weight), else memory of its "
                    "own for each (.clone())"
                )
        open_.append(owner)
    return memory


def _said(owner: Owner) -> str:
    return f"parameter {owner.name}" if owner.in_chunk else owner.name


def _others(module: nn.Module, params: set[int]) -> Iterator[tuple[str, Tensor]]:
    """(what it is, tensor) of all that a module has beside `params`: ignored parameters, buffers,
    and tensors in attributes. What a hook computes before each forward is left out."""
    seen = set(params)
    for name, param in module.named_parameters():
        if id(param) not in seen and not is_opaque(param):
            yield f"parameter {name}", param
        seen.add(id(param))
    for name, buffer in module.named_buffers():
        seen.add(id(buffer))
        yield f"buffer {name}", buffer
    for path, inner in module.named_modules():
        hooks = inner._forward_pre_hooks.values()
        computed = {getattr(hook, key, None) for hook in hooks for key in ("name", "_tensor_name")}
        for key, value in vars(inner).items():
            if key in _OF_TORCH or key in computed:
                continue
            for tensor in tensors_in(value):
                if id(tensor) not in seen:
                    yield f"attribute {path}.{key}" if path else f"attribute {key}", tensor


def _owner_of(name: str, tensor: Tensor, *, in_chunk: bool) -> Owner | None:
    """Owner of a tensor's memory; None without memory, or if it has no addresses."""
    local: Any = local_of(tensor) if is_dtensor(tensor) else tensor
    if local.is_meta or not local.numel() or local.layout != torch.strided or is_opaque(local):
        return None
    try:
        with torch._C.DisableTorchFunctionSubclass():
            start = local.data_ptr()
    except RuntimeError:  # a fake tensor, or one that consists of others
        return None
    shape, stride = tuple(local.shape), local.stride()
    last = sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    end = start + (last + 1) * local.itemsize
    return Owner(name, in_chunk, local.device, start, end, local.itemsize, shape, stride)


def _share(one: Owner, other: Owner) -> bool:
    """Whether two owners whose ranges overlap have a byte in common: columns of a matrix do not."""
    if one.is_dense and other.is_dense:
        return True
    unit = math.gcd(one.itemsize, other.itemsize, one.start - other.start)
    first, end = min(one.start, other.start), max(one.end, other.end)
    marks = torch.zeros((end - first) // unit, dtype=torch.bool)

    def of(owner: Owner) -> Tensor:
        units = owner.itemsize // unit
        sizes = [1 if not step else n for n, step in zip(owner.shape, owner.stride, strict=True)]
        steps = [step * units for step in owner.stride]
        return marks.as_strided((*sizes, units), (*steps, 1), (owner.start - first) // unit)

    of(one).fill_(True)
    return bool(of(other).any())


# -- of modules that are wrapped already --

# memory that parameters had before they were wrapped, while another owner keeps it; by their engine
_SHARED: list[tuple[weakref.ref[Any], StorageWeakRef, Owner]] = []


def note_shared_memory(engine: Any, memory: Sequence[tuple[StorageWeakRef, Owner]]) -> None:
    """Note which memory of before somebody else still has: a parameter of a module that is wrapped
    later, say."""
    _forget()
    for ref, owner in memory:
        if not ref.expired():
            name = f"{owner.name} of a module that is wrapped already"
            _SHARED.append((weakref.ref(engine), ref, replace(owner, name=name)))


def _shared_before() -> list[Owner]:
    _forget()
    return [owner for _, _, owner in _SHARED]


def _forget() -> None:
    """Drop memory that is free, and that of engines that have ended."""
    _SHARED[:] = [
        (engine, ref, owner)
        for engine, ref, owner in _SHARED
        if (there := engine()) is not None and not there.is_unwrapped and not ref.expired()
    ]
