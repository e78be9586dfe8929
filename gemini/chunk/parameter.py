"""ChunkParameter: what a parameter becomes when its module is wrapped.

The object stays the same (its class is changed in place), so optimizers, tied modules and user code
that hold it go on working. It carries one attribute: the handle to its engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from gemini.units import ChunkId, ParamId
from optim.target import OWNER_ATTRIBUTE


class ParamOwner(Protocol):
    """The engine, as a parameter sees it."""

    @property
    def all_gathered(self) -> bool:
        """No chunk is ever released: there is nothing to fetch."""
        ...

    def borrow(self, params: list[ParamId]) -> tuple[ChunkId, ...]:
        """An operator is about to read parameters: fetch those that no module has in use.

        Returns their chunks; empty where the modules that own the parameters are running.
        """
        ...

    def borrowed(self, chunks: tuple[ChunkId, ...], result: Any) -> None:
        """That operator made `result`, whose backward may read the chunks again."""
        ...


@dataclass(frozen=True, slots=True)
class ParamHandle:
    """The way from a parameter to its engine."""

    owner: ParamOwner
    param: ParamId


class ChunkParameter(nn.Parameter):
    """A parameter whose values are a view of a chunk, which may be released."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func in _READS_NO_VALUES:
                return func(*args, **(kwargs or {}))
            used: dict[ParamOwner, list[ParamId]] = {}
            for handle in _handles(args, kwargs):
                if not handle.owner.all_gathered:
                    used.setdefault(handle.owner, []).append(handle.param)
            fetched = [(owner, owner.borrow(params)) for owner, params in used.items()]
            result = func(*args, **(kwargs or {}))
            for owner, chunks in fetched:
                if chunks:
                    owner.borrowed(chunks, result)
            return result


def wrap_in_place(param: nn.Parameter, handle: ParamHandle) -> None:
    """Make `param` a ChunkParameter of `handle`'s engine; its identity stays."""
    if type(param) is not nn.Parameter:
        raise ValueError(
            f"a parameter is a {type(param).__name__}; expected a plain torch.nn.Parameter "
            "(a module is wrapped once, and before other libraries replace its parameters)"
        )
    param.__class__ = ChunkParameter
    setattr(param, OWNER_ATTRIBUTE, handle)


def handle_of(param: Tensor) -> ParamHandle | None:
    """The handle of a wrapped parameter, None for any other tensor."""
    return getattr(param, OWNER_ATTRIBUTE, None)


def _handles(args: Any, kwargs: dict[str, Any] | None) -> Iterator[ParamHandle]:
    """Handles of the wrapped parameters among operator arguments, inside lists too."""
    values = (*args, *kwargs.values()) if kwargs else args
    for value in values:
        if isinstance(value, ChunkParameter):
            handle = handle_of(value)
            if handle is not None:
                yield handle
        elif isinstance(value, (list, tuple)):
            yield from _handles(value, None)


def _no_value_functions() -> frozenset[Any]:
    """Functions of a tensor that look at its metadata, or at its place in autograd, only."""
    t = Tensor
    getters = (
        "shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_leaf", "grad_fn",
        "grad", "names", "is_cuda", "is_cpu", "is_meta", "is_sparse", "is_quantized", "is_mps",
        "is_xpu", "is_nested", "is_mkldnn", "is_sparse_csr", "itemsize", "nbytes", "_version",
        "_backward_hooks", "_post_accumulate_grad_hooks", "retains_grad", "output_nr", "name",
        "volatile", "_base", "is_vulkan", "is_ipu", "is_maia", "is_mtia",
    )  # fmt: skip
    methods = (
        "size", "dim", "numel", "nelement", "ndimension", "stride", "storage_offset",
        "element_size", "is_floating_point", "is_complex", "is_contiguous", "is_signed",
        "is_same_size", "get_device", "register_hook", "register_post_accumulate_grad_hook",
        "requires_grad_", "type", "__hash__", "__len__", "has_names", "_is_view",
        "is_inference", "is_shared", "is_conj", "is_neg",
    )  # fmt: skip
    found: set[Any] = set()
    for name in getters:
        prop = getattr(t, name, None)
        for accessor in ("__get__", "__set__", "__delete__"):
            if hasattr(prop, accessor):
                found.add(getattr(prop, accessor))
    found.update(getattr(t, name) for name in methods if hasattr(t, name))
    return frozenset(found)


_READS_NO_VALUES = _no_value_functions()
