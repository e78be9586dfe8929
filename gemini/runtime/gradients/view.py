"""`.grad` of a wrapped parameter: a tensor with a shape and no memory.

The gradient lies in its chunk, sharded over ranks. A norm and a factor are computed in the chunk.
Other operators get a copy of the values, and an operator in place writes them back. So code for
torch (`torch.nn.utils.clip_grad_norm_`, `p.grad *= c`, `p.grad.isfinite().all()`) works.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from gemini.chunk.parameter import works_in_place
from gemini.units import ParamId

if TYPE_CHECKING:
    from .waiting import Gradients


class GradientView(Tensor):
    """Gradient of one parameter, fp32; see the file. Reading its values is collective."""

    _source: Gradients
    _param: ParamId

    @staticmethod
    def __new__(
        cls, source: Gradients, param: ParamId, shape: torch.Size, device: torch.device
    ) -> GradientView:
        view: GradientView = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, shape, dtype=torch.float32, device=device
        )
        view._source, view._param = source, param
        return view

    def __init__(
        self, source: Gradients, param: ParamId, shape: torch.Size, device: torch.device
    ) -> None:
        pass

    def values(self) -> Tensor:
        """Copy of the gradient's values. All ranks read it, in any order."""
        return self._source.values(self._param)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"GradientView({self.values()!r})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.values()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.values().__reduce_ex__(protocol)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func in _TAKE_VALUES:
            return func(*_with_values(args), **_with_values(kwargs or {}))
        if func is Tensor.__setitem__:
            view, values = args[0], args[0].values()
            values.__setitem__(*_with_values(args[1:]))
            return view.copy_(values)
        if func in _ITSELF:
            return args[0]
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if name.startswith("_foreach_"):
            return _foreach(name, func, args, kwargs)
        done, result = _without_values(name, args, kwargs)
        if done:
            return result
        written = [view for view in _written(func, args, kwargs) if isinstance(view, GradientView)]
        taken = {id(view): view.values() for view in _views((args, kwargs))}
        args, kwargs = tree_map(lambda value: taken.get(id(value), value), (args, kwargs))
        result = func(*args, **kwargs)
        for view in written:
            view._source.assign(view._param, taken[id(view)])
        mine = {id(taken[id(view)]): view for view in written}
        result = tree_map(lambda value: mine.get(id(value), value), result)
        return _read_only(result) if _gives_views(func) else result


class GradientCopy(Tensor):
    """View of a copy of a gradient. Writing to it is refused: the gradient would not change."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if works_in_place(func, kwargs) and type(args[0]) is GradientCopy:
            raise RuntimeError(
                "a part of a gradient is a copy, and what is written to it reaches no parameter; "
                "write to p.grad itself: p.grad[i] = value, p.grad.copy_(values), p.grad *= c"
            )
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
        return _of_memory(result, args[0]) if isinstance(args[0], Tensor) else result


def _of_memory(result: Any, copy: Tensor) -> Any:
    """Make results that share memory with `copy` refuse writes, too."""
    if isinstance(result, (tuple, list)):
        return type(result)(_of_memory(item, copy) for item in result)
    if type(result) is Tensor and type(copy) is GradientCopy and _shares(result, copy):
        return result.as_subclass(GradientCopy)
    return result


def _shares(a: Tensor, b: Tensor) -> bool:
    with torch._C.DisableTorchFunctionSubclass():
        return bool(a.untyped_storage()._cdata == b.untyped_storage()._cdata)


def _gives_views(func: Any) -> bool:
    aliases = [returned.alias_info for returned in func._schema.returns]
    return any(alias is not None and not alias.is_write for alias in aliases)


def _read_only(result: Any) -> Any:
    return tree_map(
        lambda value: value.as_subclass(GradientCopy) if type(value) is Tensor else value, result
    )


def _without_values(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[bool, Any]:
    """(True, the result) of an operator that needs no copy of its view; else (False, None)."""
    view = args[0]
    if not isinstance(view, GradientView):
        return False, None
    source, param, rest = view._source, view._param, args[1:]
    if name in ("detach", "alias") or (name == "view_as" and view is args[1]):
        return True, view
    if name == "linalg_vector_norm" and len(rest) <= 1 and kwargs.get("dim") is None:
        norm = source.norm(param, float(rest[0]) if rest else 2.0)
        return True, norm if kwargs.get("dtype") is None else norm.to(kwargs["dtype"])
    if name in ("mul_", "div_") and len(rest) == 1 and not kwargs and _is_number(rest[0]):
        source.scale(param, rest[0] if name == "mul_" else 1.0 / rest[0])
        return True, view
    limits = _limits(name, rest, kwargs)
    if limits is not None:
        source.clamp(param, *limits)
        return True, view
    if name == "zero_":
        source.zero(param)
        return True, view
    return False, None


def _foreach(name: str, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Carry out an operator on lists as operators on their items."""
    views, rest = args[0], args[1:]
    if not isinstance(views, (list, tuple)):
        return NotImplemented
    single = getattr(torch.ops.aten, _SINGLE.get(name, name.removeprefix("_foreach_")))
    results = []
    for i, view in enumerate(views):
        each = [value[i] if isinstance(value, (list, tuple)) else value for value in rest]
        results.append(single(view, *each, **kwargs))
    return None if name.endswith("_") else results


def _limits(name: str, rest: Sequence[Any], kwargs: dict[str, Any]) -> tuple[float, float] | None:
    """Limits of a clamp between numbers; None for any other operator."""
    if name not in ("clamp_", "clamp_min_", "clamp_max_"):
        return None
    low, high = kwargs.get("min"), kwargs.get("max")
    if name == "clamp_max_":
        (high,) = rest
    elif rest:
        low, high = (*rest, high)[:2]
    if any(isinstance(limit, Tensor) for limit in (low, high)):
        return None
    return -math.inf if low is None else float(low), math.inf if high is None else float(high)


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.dim() == 0 and not isinstance(value, GradientView)
    return isinstance(value, (int, float)) and math.isfinite(value)


def _written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[Any]:
    """List the arguments that an operator changes in place."""
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            yield from tree_leaves(value)


def _views(values: Any) -> list[GradientView]:
    return [value for value in tree_leaves(values) if isinstance(value, GradientView)]


def _with_values(values: Any) -> Any:
    return tree_map(lambda v: v.values() if isinstance(v, GradientView) else v, values)


_SINGLE = {"_foreach_norm": "linalg_vector_norm"}
_TAKE_VALUES = frozenset(
    {Tensor.numpy, Tensor.__array__, Tensor.tolist, Tensor.__dlpack__, Tensor.cpu, Tensor.to_dense}
)
_ITSELF = frozenset({Tensor.data.__get__})  # type: ignore[attr-defined]
