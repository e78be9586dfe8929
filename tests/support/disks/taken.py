"""Memory that is taken, counted: the same on every machine."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Made(TorchDispatchMode):
    """Counts the bytes of storages that operators make."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {_storage_of(t) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        made = {_storage_of(t) for t in tree_leaves(out) if isinstance(t, Tensor)} - given
        self.nbytes += sum(nbytes for _, nbytes in made)
        return out


def _storage_of(tensor: Tensor) -> tuple[int, int]:
    if tensor.layout is not torch.strided or tensor.is_meta:
        return 0, 0
    return tensor.untyped_storage()._cdata, tensor.untyped_storage().nbytes()


def taken_bytes(work: Callable[[], object]) -> int:
    """Bytes of Python's objects that `work` has at once, and of all storages that operators make in
    it. What C++ takes beside them is seen in `tests/deep`."""
    tracemalloc.start()
    try:
        with Made() as made:
            work()
        return tracemalloc.get_traced_memory()[1] + made.nbytes
    finally:
        tracemalloc.stop()
