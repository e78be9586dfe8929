"""Module hooks: they tell the engine which chunks a module call is about to use, and when it ended.

A module that has parameters of its own is an owner. Its call uses its chunks twice: in forward,
and in backward from the first gradient of an output until the gradients of its inputs and of its
own parameters have arrived. A module that is gathered whole owns everything below it: one whose
children run or not by its data (experts), and one that is compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._compile import _disable_dynamo  # torch.compiler.disable imports the compiler at once

from gemini.chunk.parameter import handle_of
from gemini.chunk.state import TensorState
from gemini.trees import tensors_in
from gemini.units import ChunkId, ParamId

from .backward import BackwardCall
from .engine import Engine, in_backward
from .specs import is_compiled

GatherWhole = Callable[[nn.Module], bool]


def has_experts(module: nn.Module) -> bool:
    """Whether a module's children run or not by its data: a child of its is named `experts`."""
    return isinstance(getattr(module, "experts", None), nn.Module)


def hook_modules(engine: Engine, root: nn.Module, gather_whole: GatherWhole) -> list[Any]:
    """Hook the root module, and every owner below it if the engine releases chunks.

    Returns the hooks, which `remove()` undoes.
    """
    handles: list[Any] = []

    def add(module: nn.Module, hooks: _Owner | _Root) -> None:
        handles.extend(
            [
                module.register_forward_pre_hook(hooks.before_forward, prepend=True),
                module.register_forward_hook(
                    hooks.after_forward, with_kwargs=True, always_call=True
                ),
            ]
        )

    owners = {} if engine.all_gathered else dict(_owners(root, gather_whole))
    num_owners: dict[ParamId, int] = {}
    for params, _ in owners.values():
        for param in params:
            num_owners[param] = num_owners.get(param, 0) + 1
    if engine.all_gathered and engine.regather.overlaps:
        for module, (params, _) in _owners(root, gather_whole):
            chunks = tuple(sorted({engine.chunk_of[param] for param in params}))
            waits = partial(_wait, engine, chunks)
            handles.append(module.register_forward_pre_hook(waits, prepend=True))
    for module, (params, whole) in owners.items():
        # a tied parameter's gradient comes after the last of its owners: nobody waits for it
        add(module, _Owner(engine, params, [p for p in params if num_owners[p] == 1], whole))
    add(root, _Root(engine))  # around the root's own, if it is an owner
    return handles


def _owners(
    module: nn.Module, gather_whole: GatherWhole
) -> Iterator[tuple[nn.Module, tuple[list[ParamId], bool]]]:
    """Owners below a module with their parameters, and whether they are gathered whole."""
    whole = is_compiled(module) or gather_whole(module)
    handles = [handle_of(param) for param in module.parameters(recurse=whole)]
    params = [handle.param for handle in handles if handle is not None]
    if params:
        # a compiler around the whole module goes through another's wrapper without its hooks
        yield getattr(module, "_orig_mod", module), (params, whole)
    if not whole:
        for child in module.children():
            yield from _owners(child, gather_whole)


@_disable_dynamo
def _wait(engine: Engine, chunks: tuple[ChunkId, ...], module: nn.Module, args: Any) -> None:
    """Before a call of an owner, where nothing is released: its gathers have ended."""
    engine.regather.arrive(chunks)


class _Root:
    """The root module, by whichever entry point it is called."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @_disable_dynamo
    def before_forward(self, module: nn.Module, args: Any) -> None:
        self._engine.begin_forward()

    @_disable_dynamo
    def after_forward(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        self._engine.end_forward()


class _Owner:
    """One module with parameters of its own."""

    def __init__(
        self, engine: Engine, params: Sequence[ParamId], awaited: Sequence[ParamId], whole: bool
    ) -> None:
        self._engine = engine
        self._whole = whole
        self._params = tuple(params)
        self._may_await = tuple(awaited)
        self._layout = engine.layout
        self._awaited = self._now_awaited()
        self._chunks = tuple(sorted({engine.chunk_of[param] for param in params}))

    def _now_awaited(self) -> tuple[ParamId, ...]:
        params = self._engine.layout.params
        return tuple(param for param in self._may_await if params[param].trainable)

    @_disable_dynamo
    def before_forward(self, module: nn.Module, args: Any) -> None:
        if self._layout is not self._engine.layout:  # parameters were thawed
            self._layout = self._engine.layout
            self._awaited = self._now_awaited()
        self._engine.sampler.at_moment("enter", self._params)
        self._engine.at_moment(self._chunks)
        self._engine.manager.begin_use(self._chunks, self._params)

    @_disable_dynamo
    def after_forward(
        self, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any
    ) -> None:
        engine = self._engine
        outputs = list(tensors_in(output))
        engine.keep_escaped_views(outputs)
        outputs = [tensor for tensor in outputs if tensor.requires_grad]
        if not torch.is_grad_enabled() or not outputs:
            engine.manager.end_use(self._chunks, self._params, TensorState.HOLD)
            engine.call_ended()
            engine.sampler.at_moment("leave", self._params)
            return
        engine.manager.end_use(self._chunks, self._params, TensorState.HOLD_AFTER_FORWARD)
        engine.call_ended()
        engine.sampler.at_moment("leave", self._params)
        in_pass = engine.in_pass()
        call = BackwardCall(
            engine, self._chunks, self._params, self._awaited, self._whole, in_pass=in_pass
        )
        call.watch(outputs, [t for t in tensors_in((args, kwargs)) if t.requires_grad])
        if in_pass and not in_backward():
            engine.reducer.announce(self._chunks)
