"""Chain: a model as a prologue, layers that follow each other, and an epilogue.

The layers are the children of one `nn.ModuleList` or `nn.Sequential`; what the model's forward does
before the first is the prologue, what it does behind the last the epilogue. Both are the model's
own code: stand-ins take the places of the layers while it runs. Hidden states are the first
argument of a layer, and of what it returns.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from gemini.trees import tensors_in

REMEDY = 'order="batches" takes one micro-batch after the other, of any model'
PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, type(None))
HIDDEN = "hidden_states"


class NoChainError(ValueError):
    """Model, or call of it, that is not a chain of layers."""


def refuse(reason: str) -> NoReturn:
    raise NoChainError(f"{reason}; {REMEDY}")


@dataclass(frozen=True, slots=True)
class LayerCall:
    """Arguments of one layer's call, but for hidden states."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    by_name: bool  # hidden states are the keyword `hidden_states`

    def __call__(self, layer: nn.Module, hidden: Tensor) -> Any:
        if self.by_name:
            return layer(*self.args, **self.kwargs, **{HIDDEN: hidden})
        return layer(hidden, *self.args, **self.kwargs)


@dataclass(frozen=True, slots=True)
class Recorded:
    """What a prologue gives: hidden states of the first layer, and all layers' calls."""

    hidden: Tensor
    calls: tuple[LayerCall, ...]


@dataclass(frozen=True, slots=True)
class Surveyed:
    """What a whole forward has shown: the loss, and how each layer gives back hidden states.

    in_sequence: by layer, the class of the sequence whose first item they are; None: they are the
    output itself. lengths: of these sequences.
    """

    loss: Tensor
    in_sequence: tuple[type | None, ...]
    lengths: tuple[int, ...]


class _PrologueEnds(BaseException):
    """End of a prologue: the last layer's stand-in was called. No `except Exception` catches it."""


class Chain:
    """Layers of one module, and stand-ins for them.

    Raises NoChainError for a module without a list of layers, with several of them, or with
    parameters that a layer shares with others.
    """

    def __init__(self, root: nn.Module, named: str | None) -> None:
        """named: path of the list of layers in `root`; None: its only one."""
        self.root = root
        self.name, self.list = _list_of(root, named)
        self.layers = list(self.list.children())
        self._check_own()

    def _check_own(self) -> None:
        """Refuse parameters that a layer has together with another one, or with the rest."""
        inside = {id(module) for layer in self.layers for module in layer.modules()}
        outside = {
            id(param)
            for module in self.root.modules()
            if id(module) not in inside
            for param in module.parameters(recurse=False)
        }
        owner: dict[int, int] = {}
        for i, layer in enumerate(self.layers):
            for name, param in layer.named_parameters():
                if id(param) in outside or owner.setdefault(id(param), i) != i:
                    refuse(f"{self.name}.{i}.{name} is a parameter of another part of the model, "
                           "too, whose gradient of one micro-batch is a sum")  # fmt: skip

    # -- what a forward shows --

    def survey(self, forward: Callable[[], Tensor]) -> Surveyed:
        """Run one forward, which returns its loss, and see whether it is a chain.

        Raises NoChainError if layers are not called once each in their order with each other's
        hidden states, have state, or take or return what cannot be kept.
        """
        seen = _Survey(self)
        handles = []
        for i, layer in enumerate(self.layers):
            handles.append(layer.register_forward_pre_hook(seen.before(i), with_kwargs=True))
            handles.append(layer.register_forward_hook(seen.after(i)))
        buffers = [(name, buffer, buffer._version) for name, buffer in self.list.named_buffers()
                   if not buffer.is_inference()]  # fmt: skip
        try:
            loss = forward()
        finally:
            for handle in handles:
                handle.remove()
        for name, buffer, version in buffers:
            if buffer._version != version:
                refuse(f"{self.name}.{name} is a buffer that a forward changes, and layers run "
                       "twice")  # fmt: skip
        if seen.num_called != len(self.layers):
            refuse(f"a forward called {seen.num_called} of the {len(self.layers)} layers of "
                   f"{self.name}")  # fmt: skip
        return Surveyed(loss.detach(), tuple(seen.kinds), tuple(seen.lengths))

    # -- stand-ins --

    def prologue(self, surveyed: Surveyed, forward: Callable[[], Any]) -> Recorded:
        """Run `forward` up to its last layer, without any layer."""
        calls: list[LayerCall] = []
        first: list[Tensor] = []

        def called(i: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
            if i != len(calls):
                refuse(f"{self.name}.{i} was called where {self.name}.{len(calls)} was next")
            hidden, call = _taken_apart(f"{self.name}.{i}", args, kwargs)
            first.append(hidden)
            calls.append(call)
            if hidden is not first[0]:
                refuse(f"{self.name}.{i} was called with other hidden states than "
                       f"{self.name}.{i - 1} gave")  # fmt: skip
            if i == len(self.layers) - 1:
                raise _PrologueEnds
            return _like(surveyed, i, hidden)

        with self._replaced(called):
            try:
                forward()
            except _PrologueEnds:
                return Recorded(first[0], tuple(calls))
        refuse(f"a forward called {len(calls)} of the {len(self.layers)} layers of {self.name}")

    def around(
        self,
        surveyed: Surveyed,
        hidden: Tensor,
        forward: Callable[[], Any],
        ends: Callable[[], None],
    ) -> tuple[Any, Tensor]:
        """Run prologue and epilogue of `forward`, with `hidden` [..] in place of what the last
        layer returns, and `ends()` between them.

        Returns its output, and the hidden states of the prologue.
        """
        first: list[Tensor] = []

        def called(i: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
            given, _ = _taken_apart(f"{self.name}.{i}", args, kwargs)
            first.append(given)
            if i < len(self.layers) - 1:
                return _like(surveyed, i, given)
            ends()
            return _like(surveyed, i, hidden)

        with self._replaced(called):
            output = forward()
        return output, first[0]

    @contextmanager
    def _replaced(self, called: Callable[..., Any]) -> Iterator[None]:
        """Context in which stand-ins are where the layers were; `called` gets (i, args, kwargs)."""
        slots = self.list._modules
        before = dict(slots)
        for i, key in enumerate(before):
            slots[key] = _StandIn(self.layers[i], i, called)
        try:
            yield
        finally:
            slots.update(before)

    def hidden_of(self, i: int, output: Any) -> Tensor:
        """Hidden states in what layer `i` returned."""
        return output if isinstance(output, Tensor) else output[0]


class _StandIn(nn.Module):
    """Stand-in of one layer: its attributes are the layer's."""

    def __init__(self, layer: nn.Module, index: int, called: Callable[..., Any]) -> None:
        super().__init__()
        self.__dict__["_stands_for"] = layer  # no child of it
        self.__dict__["_called"] = index, called
        self.train(layer.training)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        index, called = self.__dict__["_called"]
        return called(index, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        layer = self.__dict__["_stands_for"]
        value = getattr(layer, name)
        if isinstance(value, Tensor) and not (name in layer._parameters or name in layer._buffers):
            refuse(f"the model reads {name} of layer {self.__dict__['_called'][0]}, which the "
                   "layer leaves behind")  # fmt: skip
        return value


class _Survey:
    """Calls of layers in one whole forward."""

    def __init__(self, chain: Chain) -> None:
        self._name = chain.name
        self._given: Tensor | None = None  # what the last layer returned
        self._version = 0
        self.num_called = 0
        self.kinds: list[type | None] = []
        self.lengths: list[int] = []

    def before(self, i: int) -> Callable[..., None]:
        def look(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if i != self.num_called:
                refuse(f"{self._name}.{i} was called where {self._name}.{self.num_called} was next")
            hidden, _ = _taken_apart(f"{self._name}.{i}", args, kwargs)
            if self._given is not None and hidden is not self._given:
                refuse(f"{self._name}.{i} was called with other hidden states than "
                       f"{self._name}.{i - 1} gave")  # fmt: skip
            self._given, self._version = hidden, hidden._version

        return look

    def after(self, i: int) -> Callable[..., None]:
        def look(module: nn.Module, args: Any, output: Any) -> None:
            where = f"{self._name}.{i}"
            given = self._given
            assert given is not None
            if given._version != self._version:
                refuse(f"{where} changes its hidden states in place, and gets them twice")
            kind: type | None = None
            rest: Any = ()
            if isinstance(output, (tuple, list)) and output:
                kind, hidden, rest = type(output), output[0], output[1:]
            else:
                hidden = output
            if not isinstance(hidden, Tensor):
                refuse(f"{where} returns a {type(output).__name__}, whose hidden states nobody "
                       "finds")  # fmt: skip
            if any(item is not None for item in rest):
                refuse(f"{where} returns more than hidden states (attentions, router logits, a "
                       "cache)")  # fmt: skip
            self._given = hidden
            self.kinds.append(kind)
            self.lengths.append(1 + len(rest))
            self.num_called += 1

        return look


def _list_of(root: nn.Module, named: str | None) -> tuple[str, nn.Module]:
    if named is not None:
        found = dict(root.named_modules()).get(named)
        if isinstance(found, (nn.ModuleList, nn.Sequential)) and len(found):
            return named, found
        refuse(f"layers={named!r} is a {type(found).__name__} of {type(root).__name__}; expected "
               "the name of a ModuleList or a Sequential with layers")  # fmt: skip
    lists = list(_outermost(root, ""))
    if len(lists) == 1:
        return lists[0]
    names = ", ".join(name for name, _ in lists) or "none"
    refuse(f"{type(root).__name__} has {len(lists)} lists of layers ({names}), and a chain has "
           "one: layers= names it")  # fmt: skip


def _outermost(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    """Every `ModuleList` with members that is not inside another one."""
    if isinstance(module, nn.ModuleList):
        if len(module):
            yield name, module
        return
    for child_name, child in module.named_children():
        yield from _outermost(child, f"{name}.{child_name}" if name else child_name)


def _taken_apart(
    where: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Tensor, LayerCall]:
    """Hidden states of a call, and the rest of its arguments."""
    by_name = not args
    rest = {key: value for key, value in kwargs.items() if not (by_name and key == HIDDEN)}
    hidden = kwargs.get(HIDDEN) if by_name else args[0]
    if not isinstance(hidden, Tensor):
        refuse(f"{where} was called without hidden states: its first argument is a "
               f"{type(hidden).__name__}")  # fmt: skip
    for name, value in [*enumerate(args[1:], 1), *rest.items()]:
        _check_kept(f"argument {name} of {where}", value)
    return hidden, LayerCall(args[1:], rest, by_name)


def _check_kept(what: str, value: Any) -> None:
    """Refuse an argument that layers may change, or that has gradients of its own."""
    if any(tensor.requires_grad for tensor in tensors_in(value)):
        refuse(f"{what} needs a gradient of its own")
    items: Any = value.values() if isinstance(value, dict) else value
    if isinstance(value, (tuple, list, dict)):
        for item in items:
            _check_kept(what, item)
    elif not (isinstance(value, (Tensor, *PLAIN)) or callable(value)):
        refuse(f"{what} is a {type(value).__name__}, which calls of layers may change (a cache: "
               "use_cache=False)")  # fmt: skip


def _like(surveyed: Surveyed, i: int, hidden: Tensor) -> Any:
    """What layer `i` returns, with these hidden states."""
    kind = surveyed.in_sequence[i]
    if kind is None:
        return hidden
    return kind([hidden, *[None] * (surveyed.lengths[i] - 1)])


def without_cache(root: nn.Module, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Keywords of a forward, with `use_cache=False` where the model has that and nobody gave it."""
    known = inspect.signature(root.forward).parameters
    config = getattr(root, "config", None)
    takes = "use_cache" in known or getattr(config, "use_cache", None) is not None
    return {"use_cache": False, **kwargs} if takes else dict(kwargs)


def leaves_of(tensors: Sequence[Tensor]) -> dict[int, Tensor]:
    """Leaves whose gradients a backward of these tensors accumulates, by identity."""
    leaves = (getattr(node, "variable", None) for node in _nodes_of(tensors))
    return {id(leaf): leaf for leaf in leaves if leaf is not None}


def goes_around(output: Tensor, hidden: Tensor) -> bool:
    """Whether the graph of `output` reaches what a prologue computed on its way to `hidden`.

    Weights that both use are leaves, and no such thing.
    """
    if not hidden.requires_grad:
        return False
    own = get_gradient_edge(hidden).node  # of a leaf, too: its gradient has three parts
    reached = _nodes_of([output])
    return own in reached or any(
        node in reached and not hasattr(node, "variable") for node in _nodes_of([hidden])
    )


def _nodes_of(tensors: Sequence[Tensor]) -> dict[Any, None]:
    """All nodes of the graph behind these tensors."""
    seen: dict[Any, None] = {}
    waiting = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen[node] = None
            waiting += [below for below, _ in node.next_functions if below is not None]
    return seen
