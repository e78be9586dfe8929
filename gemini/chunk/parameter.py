"""ChunkParameter: class of a parameter while its module is wrapped.

The object stays the same (its class is changed in place), so optimizers, tied modules and user code
that hold it go on working. It carries one attribute: the handle to its engine.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn

from gemini.optim.target import OWNER_ATTRIBUTE, ParameterOwner
from gemini.units import ChunkId, ParamId

from .local import local_of


@dataclass(eq=False, frozen=True, slots=True)
class EngineHandle:
    """Requests of an engine's parameters to it.

    all_gathered: no chunk is ever released, so there is nothing to fetch.
    is_elsewhere: whether this thread is another one than the one that trains.
    borrowed: runs an operator that reads parameters in such a thread; it is given their chunks.
    arrive: a parameter of an engine that is `all_gathered` is about to be read: a gather may be
        under way.
    fetch: an operator is about to read parameters: fetch those that no module has in use. Returns
        their chunks; empty where the modules that own the parameters are running.
    check_address: raises RuntimeError outside a pass: an address would not stay that of the values.
    fetched: that operator, of these arguments, made a result whose backward may read the chunks
        again.
    gradient_of: `.grad`: None without a gradient, else what stands for it.
    set_gradient: `.grad = value`.
    owns_memory_of: whether a tensor is a view of a chunk.
    written: it may be written to in a way that its version does not show: through `.data`.
    assign: `param.data = value`. Raises ValueError for another shape.
    """

    all_gathered: bool
    is_elsewhere: Callable[[], bool]
    borrowed: Callable[[list[ParamId], Callable[[tuple[ChunkId, ...]], Any]], Any]
    arrive: Callable[[ParamId], None]
    fetch: Callable[[list[ParamId]], tuple[ChunkId, ...]]
    check_address: Callable[[], None]
    fetched: Callable[[tuple[ChunkId, ...], Any, Any], None]
    gradient_of: Callable[[ParamId], Tensor | None]
    set_gradient: Callable[[ParamId, Tensor | None], None]
    owns_memory_of: Callable[[Tensor], bool]
    written: Callable[[ParamId], None]
    assign: Callable[[ParamId, Tensor], None]


@dataclass(frozen=True, slots=True)
class ParamHandle:
    """Handle from a parameter to its engine. owner: what attaches an optimizer to it."""

    owner: ParameterOwner
    engine: EngineHandle
    param: ParamId

    def native(self) -> AbstractContextManager[None]:
        """Context in which an operator of its library runs; see `gemini.chunk.opaque`."""
        return nullcontext()


def works_in_place(func: Callable[..., Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether an operator of torch writes to its first argument, or to `out`."""
    name: str = getattr(func, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or name.startswith(("__i", "__setitem__")) or "out" in kwargs


class Leaving:
    """How a wrapped tensor leaves its engine: as a plain copy of its values."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _plain_copy(cast(Tensor, self)).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return _plain_copy(cast(Tensor, self))

    def share_memory_(self) -> NoReturn:
        raise RuntimeError(
            "a wrapped parameter cannot be moved to shared memory, as its chunk frees and refills "
            "its memory; share the tensors of model.state_dict()"
        )


class ChunkParameter(Leaving, nn.Parameter):
    """Parameter whose values are a view of a chunk, which may be released."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        # compiled code runs below a module that is gathered whole, so nothing is fetched in it
        if torch.compiler.is_compiling():
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        return _call(func, args, kwargs or {})


class GatheredParameter(ChunkParameter):
    """Parameter of an engine that releases nothing: only `.data` and `.grad` are watched.

    So an operator costs what it costs on a plain parameter (12 us less for a linear layer).
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @property
    def data(self) -> Tensor:  # type: ignore[override]
        # the compiler's check of aliases asks, keeps nothing, and refuses types it does not know
        if sys._getframe(1).f_globals["__name__"].startswith("torch._functorch."):
            return cast(Tensor, _GET_DATA(self))
        return cast(Tensor, _call(_GET_DATA, (self,), {}))

    @data.setter
    def data(self, value: Tensor) -> None:
        _call(_SET_DATA, (self, value), {})

    @property
    def grad(self) -> Tensor | None:  # type: ignore[override]
        return cast("Tensor | None", _call(_GET_GRAD, (self,), {}))

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        _call(_SET_GRAD, (self, value), {})

    @grad.deleter
    def grad(self) -> None:
        _call(_SET_GRAD, (self, None), {})

    def detach(self) -> Tensor:
        """Values without a graph; in a thread that does not train they wait for a step."""
        handle = None if torch.compiler.is_compiling() else handle_of(self)
        if handle is not None and handle.engine.is_elsewhere():
            return cast(Tensor, _call(Tensor.detach, (self,), {}))
        return Tensor.detach(self)


class ChunkView(Leaving, Tensor):
    """View of a ChunkParameter: an operator that reads it fetches the chunk again."""

    __torch_function__ = ChunkParameter.__torch_function__


def wrap_in_place(param: nn.Parameter, handle: ParamHandle) -> None:
    """Make `param` a ChunkParameter of `handle`'s engine; its identity stays."""
    released, gathered = _CLASSES[type(param)]
    param.__class__ = gathered if handle.engine.all_gathered else released
    setattr(param, OWNER_ATTRIBUTE, handle)


@cache
def learn_dtensors() -> None:
    """Learn what a DTensor parameter becomes: its local tensor is a view of a chunk.

    Importing DTensor takes a second, and few need it.
    """
    from torch.distributed.tensor import DTensor

    class ChunkDTensor(Leaving, DTensor):
        """Parameter that torch has split, of a chunk that may be released."""

        __torch_function__ = ChunkParameter.__torch_function__

    class GatheredDTensor(ChunkDTensor):
        """Split parameter of an engine that releases nothing; see `GatheredParameter`."""

        __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
        data = GatheredParameter.data  # type: ignore[assignment]
        grad = GatheredParameter.grad  # type: ignore[assignment]
        detach = GatheredParameter.detach

    class ChunkDTensorView(Leaving, DTensor):
        """View of a ChunkDTensor that is a DTensor: an operator that reads it fetches the chunk
        again."""

        __torch_function__ = ChunkParameter.__torch_function__

    parameters = ChunkDTensor, GatheredDTensor
    _PARAMETERS.update(parameters)
    _WRAPPED.update((*parameters, ChunkDTensorView))
    _VIEWS[DTensor] = ChunkDTensorView
    _CLASSES[DTensor] = parameters


def watch(param: nn.Parameter) -> None:
    """Let operators on a GatheredParameter ask its engine, until `unwatch`."""
    kinds = (released for released, other in _CLASSES.values() if type(param) in (released, other))
    param.__class__ = next(kinds, type(param))  # of an opaque one nobody waits


def unwatch(param: nn.Parameter) -> None:
    """End `watch`: the values are there to stay."""
    kinds = (gathered for other, gathered in _CLASSES.values() if type(param) in (other, gathered))
    param.__class__ = next(kinds, type(param))


def unwrap_in_place(param: nn.Parameter) -> None:
    """Make it a plain parameter again, whatever its values are."""
    param.__class__ = next(c for c, known in _CLASSES.items() if type(param) in known)
    delattr(param, OWNER_ATTRIBUTE)


def _plain_copy(tensor: Tensor) -> Tensor:
    """Copy of its values as a tensor, or a parameter, of torch's own. Fetches them: all ranks
    call."""
    values = tensor.detach().clone()
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(values, requires_grad=tensor.requires_grad)
    return values


def take_gradient(param: Tensor) -> Tensor | None:
    """Take what autograd left in `.grad`, which is None from now on."""
    with torch._C.DisableTorchFunctionSubclass():
        grad: Tensor | None = _GET_GRAD(param)
        _SET_GRAD(param, None)
    return grad


def clear_gradients(params: Iterable[Tensor]) -> None:
    """Clear `.grad` where an error came before the hook that takes it."""
    with torch._C.DisableTorchFunctionSubclass():
        for param in params:
            _SET_GRAD(param, None)


def handle_of(param: Tensor) -> ParamHandle | None:
    """Handle of a wrapped parameter or of a view of one, None for any other tensor."""
    return getattr(param, OWNER_ATTRIBUTE, None)


def _call(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator on parameters: their chunks are gathered before it reads them."""
    with torch._C.DisableTorchFunctionSubclass():
        if func in _GRADIENT and type(args[0]) in _PARAMETERS:
            return _use_gradient(func, args)
        if func in _READS_NO_VALUES:
            return func(*args, **kwargs)
        handles: list[ParamHandle] = []
        has_views = _find_handles((*args, *kwargs.values()) if kwargs else args, handles)
        if not handles:
            return func(*args, **kwargs)
        if func == _SET_DATA and handles[0] is handle_of(args[0]):
            return handles[0].engine.assign(handles[0].param, args[1])
        takes_data = func == _GET_DATA
        if takes_data or (has_views and works_in_place(func, kwargs)):
            for handle in handles:  # a view that is written to may come from `.data`
                handle.engine.written(handle.param)
        return _compute(func, args, kwargs, handles, gives_views=takes_data or has_views)


def call_native(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator on opaque parameters as their library has it, after their gathers."""
    handles: list[ParamHandle] = []
    _find_handles((*args, *kwargs.values()), handles)
    if func in _READS_NO_VALUES or not handles:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    if func == _SET_DATA:
        return handles[0].engine.assign(handles[0].param, args[1])
    may_write = func == _GET_DATA or works_in_place(func, kwargs)
    for handle in handles:
        if func in _GIVES_ADDRESS:
            handle.engine.check_address()
        if may_write:
            handle.engine.written(handle.param)

    def compute(there: Mapping[EngineHandle, tuple[ChunkId, ...]]) -> Any:
        with ExitStack() as stack:
            for handle in handles:
                stack.enter_context(handle.native())
            result = func(*args, **kwargs)
            if hasattr(result, "__tensor_flatten__") and all(result is not arg for arg in args):
                result = result.clone()  # nobody watches what a wrapper of the library consists of
        with torch._C.DisableTorchFunctionSubclass():
            for handle in handles:
                result = _mark_views(result, handle)
        for engine, chunks in there.items():
            if chunks:
                engine.fetched(chunks, (args, kwargs), result)
        return result

    used = _by_engine(handles)
    if handles[0].engine.is_elsewhere():
        return _borrowing(used, compute)
    return compute({engine: engine.fetch(params) for engine, params in used.items()})


def register_hidden_class(hidden: type) -> None:
    """Register the class of an opaque parameter that no call uses: operators on it call
    `call_native`."""
    _WRAPPED.add(hidden)


def _use_gradient(func: Callable[..., Any], args: tuple[Any, ...]) -> Tensor | None:
    """Get, set or delete `.grad`."""
    handle = handle_of(args[0])
    assert handle is not None
    if func == _GET_GRAD:
        grad = handle.engine.gradient_of(handle.param)
        # until a forward unfreezes it, what autograd has left to a parameter that was frozen
        return _GET_GRAD(args[0]) if grad is None else grad
    handle.engine.set_gradient(handle.param, args[1] if func == _SET_GRAD else None)
    return None


def _compute(
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    handles: list[ParamHandle],
    *,
    gives_views: bool,
) -> Any:
    """Fetch what an operator reads, run it, and let the engines know of what came out."""
    if handles[0].engine.is_elsewhere() and func not in _RUNS_BACKWARD:
        return _compute_elsewhere(func, args, kwargs, handles)
    used: dict[EngineHandle, list[ParamId]] = {}
    for handle in handles:
        if handle.engine.all_gathered:
            handle.engine.arrive(handle.param)
        else:
            used.setdefault(handle.engine, []).append(handle.param)
    if func in _GIVES_ADDRESS:
        for engine in used:
            engine.check_address()
    fetched: list[tuple[EngineHandle, tuple[ChunkId, ...]]] = []
    for engine, params in used.items():
        chunks = engine.fetch(params)
        if chunks:
            fetched.append((engine, chunks))
    if func in _GIVES_MEMORY_AWAY and used:
        result = _given_away(func, args, kwargs)
    else:
        result = func(*args, **kwargs)
    # a view outlives the operator, and fetches again: its chunk may be released before it is read
    if used or gives_views:
        for handle in handles:
            result = _mark_views(result, handle)
    for engine, chunks in fetched:
        engine.fetched(chunks, (args, kwargs), result)
    return result


def _compute_elsewhere(
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    handles: list[ParamHandle],
) -> Any:
    """Run an operator in a thread that does not train: nothing changes what it reads."""
    used = _by_engine(handles)
    if func in _GIVES_ADDRESS:
        for engine in used:
            if not engine.all_gathered:
                engine.check_address()

    def compute(there: Mapping[EngineHandle, tuple[ChunkId, ...]]) -> Any:
        gives_away = func in _GIVES_MEMORY_AWAY
        result = _given_away(func, args, kwargs) if gives_away else func(*args, **kwargs)
        for handle in handles:
            result = _mark_views(result, handle)
        for engine, chunks in there.items():
            if not engine.all_gathered:
                engine.fetched(chunks, (args, kwargs), result)
        return result

    return _borrowing(used, compute)


def _by_engine(handles: Iterable[ParamHandle]) -> dict[EngineHandle, list[ParamId]]:
    """Parameters by engine, in an order of engines that is the same in all threads."""
    used: dict[EngineHandle, list[ParamId]] = {}
    for handle in sorted(handles, key=lambda handle: id(handle.engine)):
        used.setdefault(handle.engine, []).append(handle.param)
    return used


def _borrowing(
    used: Mapping[EngineHandle, list[ParamId]],
    compute: Callable[[Mapping[EngineHandle, tuple[ChunkId, ...]]], Any],
) -> Any:
    """Run `compute` while the parameters of all engines are borrowed."""

    def borrow(there: Mapping[EngineHandle, tuple[ChunkId, ...]]) -> Any:
        left = next((engine for engine in used if engine not in there), None)
        if left is None:
            return compute(there)
        return left.borrowed(used[left], lambda chunks: borrow({**there, left: chunks}))

    return borrow({})


def _given_away(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Copy of values that are released: whoever gets memory cannot be asked to wait.

    A write to it would reach no weight, so it cannot be written to.
    """
    if func == Tensor.__dlpack__ and not kwargs.get("copy"):
        raise BufferError(
            "a parameter that is released and gathered again cannot share its memory, and what is "
            "written to a copy would be lost; give p.detach().clone() away, and write with torch"
        )
    result = func(args[0].clone(), *args[1:], **kwargs)
    if func != Tensor.__dlpack__ and not result.flags.owndata:  # else torch gives a copy, too
        result.flags.writeable = False
    return result


def _find_handles(values: Any, found: list[ParamHandle]) -> bool:
    """Add the handles of wrapped parameters among operator arguments, inside lists too; whether
    there are views of such."""
    has_views = False
    for value in values:
        kind = type(value)
        if kind in _WRAPPED:
            handle = getattr(value, OWNER_ATTRIBUTE, None)
            if handle is not None:
                found.append(handle)
            has_views = has_views or kind not in _PARAMETERS
        elif kind is tuple or kind is list or isinstance(value, (list, tuple)):
            has_views = _find_handles(value, found) or has_views
    return has_views


def _mark_views(result: Any, handle: ParamHandle) -> Any:
    """Plain tensors that are views of the handle's chunk, as ChunkViews."""
    view = _VIEWS.get(type(result))
    if view is not None:
        local = result if type(result) is Tensor else local_of(result)
        if not handle.engine.owns_memory_of(local):
            return result
        # in place: `as_subclass` puts a node of its own between the view and the parameter's, which
        # torch's pipelining and hooks in the manner of DDP look for
        result.__class__ = view
        setattr(result, OWNER_ATTRIBUTE, handle)
        return result
    if type(result) in (tuple, list):
        return type(result)(_mark_views(item, handle) for item in result)
    return result


def _no_value_functions() -> frozenset[Any]:
    """Functions that look only at metadata of a tensor, or at its place in autograd."""
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
    functions: set[Any] = set()
    for name in getters:
        prop = getattr(t, name, None)
        for accessor in ("__get__", "__set__", "__delete__"):
            if hasattr(prop, accessor):
                functions.add(getattr(prop, accessor))
    functions.update(getattr(t, name) for name in methods if hasattr(t, name))
    return frozenset(functions)


# compared by identity: `isinstance` of an nn.Parameter asks its metaclass, in Python
_PARAMETERS: set[type] = {ChunkParameter, GatheredParameter}
_WRAPPED: set[type] = {*_PARAMETERS, ChunkView}
_VIEWS: dict[type, type] = {Tensor: ChunkView}  # of a plain class, what its views become
# of a plain class, what its parameters become: with chunks that are released, and without
_CLASSES: dict[type, tuple[type, type]] = {nn.Parameter: (ChunkParameter, GatheredParameter)}
_READS_NO_VALUES = _no_value_functions()
_GET_GRAD: Any = Tensor.grad.__get__  # type: ignore[union-attr]
_SET_GRAD: Any = Tensor.grad.__set__  # type: ignore[union-attr]
_GRADIENT = frozenset({_GET_GRAD, _SET_GRAD, Tensor.grad.__delete__})  # type: ignore[union-attr]
_GET_DATA = Tensor.data.__get__  # type: ignore[attr-defined]
_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
_GIVES_ADDRESS = frozenset(
    {Tensor.data_ptr, Tensor.untyped_storage, Tensor.storage, Tensor._typed_storage}
)
# which other threads may carry out, with hooks that wait for the lock
_RUNS_BACKWARD = frozenset({Tensor.backward, torch.autograd.grad, torch.autograd.backward})
_GIVES_MEMORY_AWAY = frozenset({Tensor.numpy, Tensor.__array__, Tensor.__dlpack__})
