"""Opaque parameters: quantised weights whose class computes, and that are bytes to a chunk.

Their class, their identity and the objects on them stay; the plain tensors that they consist of are
views of a payload of bytes, bound once, as a payload has one storage. While a call uses the chunk
these are as plain as the library made them, which compilers ask for; else an operator on one of
them, or on the parameter, fetches the chunk first: what is released is no memory.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList

from gemini.dtypes import BYTES
from gemini.optim.target import OWNER_ATTRIBUTE
from gemini.units import PARAM_ALIGN_NUMEL, align_up

from .layout import Form, Leaf, ParamSpec
from .local import is_dtensor
from .parameter import ChunkView, ParamHandle, call_native, handle_of, register_hidden_class
from .storage import Chunk


class _LeafPlace(NamedTuple):
    """Place where a plain tensor of a parameter is referred to; put: None for the parameter's
    data."""

    leaf: str
    tensor: Tensor
    put: Callable[[Tensor], None] | None


@dataclass(frozen=True, slots=True)
class OpaqueHandle(ParamHandle):
    """Handle of an opaque parameter, and of every tensor that it consists of."""

    opaque: Opaque

    def native(self) -> AbstractContextManager[None]:
        return self.opaque.native()


class Opaque:
    """Opaque parameter on this rank.

    form: tensors and context that it consists of, the same on all ranks. tensors: each with its
    view of the payload.
    """

    def __init__(self, param: nn.Parameter, places: Sequence[tuple[str, nn.Module]]) -> None:
        """places: names of the parameter, each with the module that has it. Raises ValueError for a
        parameter that no chunk can hold."""
        self.param = param
        self.names = tuple(name for name, _ in places)
        self._modules = places
        layer = places[0][1]
        if isinstance(layer, ParametrizationList) and hasattr(layer[0], "quant_state"):
            # of bitsandbytes' replace_parameter_4bit: with it the parameter is a weight
            param.__dict__["quant_state"] = layer[0].quant_state
        self._places = [*_places_of(param, places[0][1])]
        self.form = _form_of(self.names[0], param, self._places)
        self.tensors: list[tuple[Tensor, Tensor, Leaf]] = []
        self._stays = self._is_native = True  # until it is released
        self._calls = 0  # that use it now
        self.digest: str | None = None  # of form and bytes, once asked for
        self._packs: list[Any] = []  # modules that would pack it for a CPU in evaluation

    @property
    def spec(self) -> ParamSpec:
        """Spec of the parameter as a chunk has it: bytes."""
        return ParamSpec(self.names[0], (self.form.nbytes,), BYTES, False, self.names[1:],
                         form=self.form)  # fmt: skip

    @torch.no_grad()
    def pack(self, into: Tensor, values: Tensor | None = None) -> None:
        """Write the bytes of the parameter to uint8 [nbytes], or those of another one of its form,
        where `values` is one: its own tensors are without memory then."""
        into.zero_()
        places = self._places
        if isinstance(values, nn.Parameter):
            places = [*_places_of(values, None)]
            assert _form_of(self.names[0], values, places) == self.form
        tensors = {place.leaf: place.tensor for place in places}
        for leaf in self.form.leaves:
            view_of(leaf, into).copy_(tensors[leaf.name].detach())

    @torch.no_grad()
    def bind(self, flat: Tensor) -> None:
        """Make its tensors views of a payload's uint8 [nbytes], for good."""
        leaves = {leaf.name: leaf for leaf in self.form.leaves}
        for place in self._places:
            # `.data` has a version of its own: to autograd a gather does not change it
            leaf = leaves[place.leaf]
            view = view_of(leaf, flat).data
            tensor = self.param if place.put is None else view.data
            if place.put is None:
                self.param.data = view
            else:
                place.put(tensor)
            self.tensors.append((tensor, view, leaf))
        self._places = []
        modules: list[Any] = [module for _, module in self._modules]
        # packed for a CPU, a weight would be other bytes than the chunk's: off while it is wrapped
        self._packs = [m for m in modules if getattr(m, "support_avx512bf16_for_cpu", False)]
        for module in self._packs:
            module.support_avx512bf16_for_cpu = False

    @torch.no_grad()
    def take_back(self) -> Tensor | None:
        """uint8 [nbytes] of what its modules have in its place, where that has the same form: a
        merge of adapters makes a parameter anew. The modules have this parameter again."""
        values: Tensor | None = None
        for name, module in self._modules:
            key, form = name.rpartition(".")[2], self.form
            new = module._parameters.get(key)
            known = _native_class(type(self.param))
            if new is None or new is self.param or not isinstance(new, known):
                continue
            other = Opaque(new, [(name, module)])
            # another form (a merge into a plain weight) has no place in the chunk: it is left there
            if other.form != form:
                continue
            values = torch.zeros(form.nbytes, dtype=torch.uint8, device=new.device)
            other.pack(values)
            module._parameters[key] = self.param
            mine: Any = self.param
            if form.kind == "Params4bit":  # peft made the new one of what this one had
                mine.bnb_quantized, mine.module.quant_state = True, mine.quant_state
            elif form.kind == "Int8Params":  # the module's state has lost them
                mine.CB, mine.SCB = (tensor for tensor, _, _ in self.tensors[1:])
        return values

    def wrap(self, handle: ParamHandle) -> None:
        """Let operators on it ask an engine from now on."""
        for tensor in (self.param, *(tensor for tensor, _, _ in self.tensors)):
            found = OpaqueHandle(handle.owner, handle.engine, handle.param, self)
            setattr(tensor, OWNER_ATTRIBUTE, found)

    def unwrap(self, flat: Tensor) -> None:
        """Make it a plain one again, with copies of its part of uint8 [nbytes]."""
        self.stay(True)
        own = {leaf.name: view_of(leaf, flat).clone() for leaf in self.form.leaves}
        for tensor, _, leaf in self.tensors:
            tensor.data = own[leaf.name]
        for tensor in {id(t): t for t in (self.param, *(t for t, _, _ in self.tensors))}.values():
            delattr(tensor, OWNER_ATTRIBUTE)
        for module in self._packs:
            module.support_avx512bf16_for_cpu = True

    @torch.no_grad()
    def saved(self, flat: Tensor) -> dict[str, Tensor]:
        """State dict entries: copies from uint8 [nbytes], under its library's names."""
        with self.bound_to(flat):
            return {name: value.detach().clone() for name, value in self._entries()}

    @property
    def saved_names(self) -> list[str]:
        with self.bound_to(torch.zeros(self.form.nbytes, dtype=torch.uint8)):
            return [name for name, _ in self._entries()]

    @torch.no_grad()
    def load(self, flat: Tensor, values: Mapping[str, Any]) -> None:
        """Write the values of a state dict to uint8 [nbytes]; see `given`."""
        given = self.given(values)
        for leaf in self.form.leaves:
            if leaf.name in given:
                view_of(leaf, flat).copy_(given[leaf.name])

    def given(self, values: Mapping[str, Any]) -> dict[str, Tensor]:
        """Values of a state dict by leaf. Raises ValueError for those of another form."""
        state = getattr(self.param, "quant_state", None)
        names = self.names if state is None else map(_weight_name, self.names)
        name = next((name for name in names if name in values), None)
        if name is not None and state is not None:  # some of it is in a packed value
            dot = f"{name}."
            about = {k.removeprefix(dot): values[k] for k in values if k.startswith(dot)}
            known: Any = _native_class(type(self.param))
            made: Any
            if self.form.kind == "Params4bit":
                made = known.from_prequantized(values[name], about, device="cpu")
            else:
                made = nn.Parameter(values[name], requires_grad=False)
                made.quant_state = type(state).from_dict(about, torch.device("cpu"))
            leaves = {place.leaf: place.tensor for place in _places_of(made, None)}
        elif name is not None and hasattr(self.param, "__tensor_flatten__"):
            if type(values[name]) is not _native_class(type(self.param)):
                self._refuse(name, f"a {type(values[name]).__name__}")
            leaves = {place.leaf: place.tensor for place in _places_of(values[name], None)}
        else:
            live = {id(tensor): leaf.name for tensor, _, leaf in self.tensors}
            with self.bound_to(torch.zeros(self.form.nbytes, dtype=torch.uint8)):
                own = {key: live[id(value)] for key, value in self._entries() if id(value) in live}
            leaves = {leaf: values[key] for key, leaf in own.items() if key in values}
        for leaf in self.form.leaves:
            came = leaves.get(leaf.name)
            wanted = leaf.shape, getattr(torch, leaf.dtype)
            if came is not None and (tuple(came.shape), came.dtype) != wanted:
                self._refuse(name or self.names[0], f"{came.dtype} {tuple(came.shape)}")
        return leaves

    def _refuse(self, name: str, came: str) -> NoReturn:
        raise ValueError(
            f"the state dict has another form of {name}: {came} came for a {self.form.kind}; "
            "expected what the same quantisation has saved"
        )

    def _entries(self) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) as its modules save the parameter, without their other state."""
        for name, module in self._modules:
            state = getattr(self.param, "quant_state", None)
            if state is not None and self.form.kind != "Params4bit":
                name = _weight_name(name)  # by a hook of the module that has the layer
                yield name, self.param
                yield from ((f"{name}.{k}", v) for k, v in state.as_dict(packed=True).items())
                continue
            prefix = name.removesuffix(name.rpartition(".")[2])
            saved: dict[str, Any] = {}
            module._save_to_state_dict(saved, prefix, keep_vars=True)
            others = {prefix + key for key in (*module._parameters, *module._buffers)} - {name}
            for key, value in saved.items():
                if key not in others and isinstance(value, Tensor):
                    yield key, value

    @contextmanager
    def bound_to(self, flat: Tensor) -> Iterator[None]:
        """Context in which its tensors are views of uint8 [nbytes], and not of the payload."""
        with self.native():
            for tensor, _, leaf in self.tensors:
                tensor.data = view_of(leaf, flat).data
            try:
                yield
            finally:
                for tensor, view, _ in self.tensors:
                    tensor.data = view

    def stay(self, gathered: bool) -> None:
        """Note whether its memory is there for good; else no call uses it now."""
        self._stays = gathered
        self.forget_calls()

    def call_begins(self) -> None:
        """A call begins to use it: it is as its library made it."""
        self._calls += 1
        self._update_class()

    def call_ends(self) -> None:
        self._calls = max(0, self._calls - 1)
        self._update_class()

    def forget_calls(self) -> None:
        """Forget all open calls."""
        self._calls = 0
        self._update_class()

    @contextmanager
    def native(self) -> Iterator[None]:
        self.call_begins()
        try:
            yield
        finally:
            self.call_ends()

    def _update_class(self) -> None:
        native = self._stays or self._calls > 0
        if native == self._is_native:
            return
        # The class is what decides who answers an operator: the library itself while a call runs,
        # else `call_native`, which fetches the chunk first.
        self._is_native = native
        for tensor in (self.param, *(tensor for tensor, _, _ in self.tensors)):
            known = _native_class(type(tensor))
            tensor.__class__ = known if native else _hidden_class(known)


class OpaqueChunk(Chunk):
    """Chunk of opaque parameters: bytes that nobody updates."""

    opaque: Sequence[Opaque] = ()

    def gather_again(self) -> None:
        """Gather anew, and wait: no operator on its parameters waits for a gather that is under
        way."""
        super().gather_again()
        self.wait_gathered()

    @property
    def is_named(self) -> bool:
        """Whether the digests of all of it are known."""
        return all(one.digest is not None for one in self.opaque)

    def keep_shard(self) -> None:
        super().keep_shard()
        self._bytes_changed()

    def store_shard(self, values: Tensor) -> None:
        super().store_shard(values)
        self._bytes_changed()

    def _bytes_changed(self) -> None:
        for one in self.opaque:
            one.digest = None

    def release(self) -> None:
        super().release()
        for one in self.opaque:
            one.stay(False)

    def bring_home(self, on_host: bool) -> None:
        super().bring_home(on_host)
        for one in self.opaque:
            one.stay(self.is_unsharded)


def view_of(leaf: Leaf, flat: Tensor) -> Tensor:
    """View of a leaf in uint8 [nbytes], in its dtype, shape and strides."""
    run = flat[leaf.offset : leaf.offset + leaf.nbytes].view(getattr(torch, leaf.dtype))
    return run.as_strided(leaf.shape, leaf.stride)


def drop_storage(param: Tensor) -> None:
    """Take all memory from a parameter; its form stays."""
    for place in _places_of(param, None):
        # one element that is expanded: shape, dtype and device are asked for, and values never
        one = [1] * place.tensor.ndim
        empty = torch.zeros(one, dtype=place.tensor.dtype).expand(place.tensor.shape)
        if place.put is None:
            param.data = empty
        else:
            place.put(empty)


def leaf_bytes(param: Tensor) -> int:
    """Bytes of all plain tensors that a parameter consists of."""
    if not is_opaque(param):
        return param.nbytes
    return sum({place.leaf: place.tensor.nbytes for place in _places_of(param, None)}.values())


def is_opaque(param: Tensor) -> bool:
    """Whether it is bytes to a chunk: a wrapper subclass, one of bitsandbytes', or integers."""
    if is_dtensor(param):
        return False
    return (
        hasattr(param, "__tensor_flatten__")
        or type(param).__name__ in _BITSANDBYTES
        or (type(param) is nn.Parameter and not param.is_floating_point())
    )


_NATIVE: dict[type, type] = {ChunkView: Tensor}  # by what hides it
_BITSANDBYTES = ("Params4bit", "Int8Params")


def _places_of(param: Any, module: Any) -> Iterator[_LeafPlace]:
    """Places of all plain tensors of a parameter, in a fixed order; a leaf may have several."""
    if hasattr(param, "__tensor_flatten__"):
        yield from _flattened(param, "")
        return
    yield _LeafPlace("data", param, None)
    if type(param).__name__ == "Int8Params":
        # the first forward moves these to the module's state
        holder = param if param.SCB is not None else getattr(module, "state", param)
        for leaf, name in (("data", "CB"), ("SCB", "SCB")):
            if getattr(holder, name) is not None:
                yield _LeafPlace(leaf, getattr(holder, name), _setter(holder, name))
    state, prefix = getattr(param, "quant_state", None), ""
    while state is not None:
        for name in ("absmax", "code", "offset"):
            if isinstance(getattr(state, name), Tensor):
                yield _LeafPlace(prefix + name, getattr(state, name), _setter(state, name))
        state, prefix = state.state2, f"{prefix}state2."


def _weight_name(name: str) -> str:
    """Name of the weight of which a parametrisation made a parameter of this name."""
    return re.sub(r"\bparametrizations\.(\w+)\.original$", r"\1", name)


def _flattened(tensor: Any, prefix: str) -> Iterator[_LeafPlace]:
    names, _ = tensor.__tensor_flatten__()
    for name in names:
        inner = getattr(tensor, name)
        if hasattr(inner, "__tensor_flatten__"):
            yield from _flattened(inner, f"{prefix}{name}.")
        else:
            yield _LeafPlace(prefix + name, inner, _setter(tensor, name))


def _setter(owner: Any, name: str) -> Callable[[Tensor], None]:
    return lambda tensor: setattr(owner, name, tensor)


def _form_of(name: str, param: Any, places: Sequence[_LeafPlace]) -> Form:
    kind = type(param).__name__
    if param.requires_grad and param.is_complex():
        raise ValueError(
            f"parameter {name} is complex ({param.dtype}), and no optimizer here updates such; "
            "expected torch.view_as_real of it as the parameter, and view_as_complex in the forward"
        )
    if param.requires_grad:
        raise ValueError(
            f"parameter {name} is a {kind}, whose bytes no step updates, and requires a gradient; "
            "expected requires_grad_(False), with adapters that are trained"
        )
    if all(place.tensor.is_meta for place in places):
        raise ValueError(
            f"parameter {name} is a {kind} on the meta device, where nobody quantises it; expected "
            "values before the module is wrapped"
        )
    state: Any = getattr(param, "quant_state", None)
    is_bare = kind in _BITSANDBYTES and len(places) == 1  # its data may float, which packs it
    if is_bare or getattr(state, "packing_format_for_cpu", False):
        raise ValueError(
            f"parameter {name} is a {kind} that is not quantised, or packed for evaluation on a "
            "CPU; expected the module as .to(device) quantises it, before its first evaluation"
        )
    devices = sorted({str(x.device) for x in (param, *(place.tensor for place in places))})
    if len(devices) > 1:
        raise ValueError(
            f"parameter {name} is a {kind} with tensors on {' and '.join(devices)}; "
            "expected all of them on one device"
        )
    leaves: dict[str, Leaf] = {}
    end = 0
    for place in places:
        if place.leaf in leaves:
            continue
        tensor = place.tensor.detach()
        stride = torch.empty_like(tensor, device="meta").stride()
        dtype = str(tensor.dtype).removeprefix("torch.")
        leaves[place.leaf] = Leaf(place.leaf, dtype, tuple(tensor.shape), stride, end,
                                    tensor.nbytes)  # fmt: skip
        end = align_up(end + tensor.nbytes, PARAM_ALIGN_NUMEL)
    return Form(kind, tuple(leaves.values()), _context_of(param), end)


def _context_of(param: Any) -> str:
    """Context of a parameter: what is no tensor in it, and must be the same on all ranks."""
    if hasattr(param, "__tensor_flatten__"):
        return re.sub(r" at 0x[0-9a-f]+", "", repr(param.__tensor_flatten__()[1]))
    state = getattr(param, "quant_state", None)
    return repr(state and (state.quant_type, state.blocksize, state.shape, state.dtype))


@cache
def _hidden_class(known: type) -> type:
    """Class of `known` while no call uses it: operators fetch the chunk first."""
    if known is Tensor:
        return ChunkView

    def torch_function(cls: type, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return call_native(func, args, kwargs or {})

    def refuse(self: Any, *args: Any) -> Any:
        return handle_of(self).owner.__reduce_ex__(*args)  # type: ignore[union-attr]

    members = {
        "__torch_function__": classmethod(torch_function),
        "__deepcopy__": refuse,
        "__reduce_ex__": refuse,
        "__module__": known.__module__,
        "__qualname__": known.__qualname__,
    }
    hidden = type(known.__name__, (known,), members)
    _NATIVE[hidden] = known
    register_hidden_class(hidden)
    return hidden


def _native_class(kind: type) -> type:
    return _NATIVE.get(kind, kind)
