"""Module hooks: they tell the engine which chunks a module call is about to use, and when it ended.

A module that has parameters of its own is an owner. Its call uses its chunks twice: in forward,
and in backward from the first gradient of an output until the gradients of its inputs and of its
own parameters have arrived.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook

from gemini.chunk.parameter import handle_of
from gemini.chunk.state import TensorState
from gemini.units import ChunkId, ParamId

from .engine import Engine
from .trees import tensors_in


class ModuleHooks:
    """Hooks on every owner below one root module."""

    def __init__(self, engine: Engine, root: nn.Module) -> None:
        self._engine = engine
        owners: dict[nn.Module, list[ParamId]] = {}
        for module in root.modules():
            handles = [handle_of(p) for p in module.parameters(recurse=False)]
            params = [handle.param for handle in handles if handle is not None]
            if params:
                owners[module] = params
        num_owners: dict[ParamId, int] = {}
        for params in owners.values():
            for param in params:
                num_owners[param] = num_owners.get(param, 0) + 1
        self._handles = []
        for module, params in owners.items():
            # a tied parameter's gradient comes after the last of its owners: nobody waits for it
            awaited = [
                p for p in params if num_owners[p] == 1 and engine.layout.params[p].trainable
            ]
            owner = _Owner(engine, params, awaited)
            self._handles += [
                module.register_forward_pre_hook(owner.before_forward, prepend=True),
                module.register_forward_hook(
                    owner.after_forward, with_kwargs=True, always_call=True
                ),
            ]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()


class _Owner:
    """One module with parameters of its own."""

    def __init__(
        self, engine: Engine, params: Sequence[ParamId], awaited: Sequence[ParamId]
    ) -> None:
        self._engine = engine
        self._params = tuple(params)
        self._awaited = tuple(awaited)
        self._chunks = tuple(sorted({engine.chunk_of[param] for param in params}))

    def before_forward(self, module: nn.Module, args: Any) -> None:
        manager = self._engine.manager
        manager.at_moment(self._chunks)
        manager.hold(self._chunks)
        manager.set_state(self._params, TensorState.COMPUTE)

    def after_forward(
        self, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any
    ) -> None:
        manager = self._engine.manager
        manager.let_go(self._chunks)
        outputs = list(tensors_in(output))
        self._engine.keep_escaped_views(outputs)
        outputs = [tensor for tensor in outputs if tensor.requires_grad]
        if not torch.is_grad_enabled() or not outputs:
            manager.set_state(self._params, TensorState.HOLD)
            return
        manager.set_state(self._params, TensorState.HOLD_AFTER_FORWARD)
        call = _BackwardCall(self._engine, self._chunks, self._params, self._awaited)
        register_multi_grad_hook(outputs, call.begin, mode="any")
        inputs = [t for t in tensors_in((args, kwargs)) if t.requires_grad]
        if inputs:
            call.inputs_pending = True
            register_multi_grad_hook(inputs, call.inputs_done, mode="all")


class _BackwardCall:
    """The backward of one module call."""

    def __init__(
        self,
        engine: Engine,
        chunks: tuple[ChunkId, ...],
        params: tuple[ParamId, ...],
        awaited: tuple[ParamId, ...],
    ) -> None:
        self._engine = engine
        self._chunks = chunks
        self._params = params
        self._awaited = set(awaited)
        self.inputs_pending = False
        self.open = False

    def begin(self, grad: Tensor) -> None:
        """The first gradient of an output has arrived."""
        manager = self._engine.manager
        manager.at_moment(self._chunks)
        manager.hold(self._chunks)
        manager.set_state(self._params, TensorState.COMPUTE)
        self.open = True
        self._engine.open_calls.append(self)
        self._close_if_done()

    def inputs_done(self, grads: Sequence[Tensor | None]) -> None:
        """The gradients of all inputs have arrived."""
        self.inputs_pending = False
        self._close_if_done()

    def gradient_arrived(self, param: ParamId) -> None:
        """The gradient of one parameter has arrived, of this module or of another."""
        self._awaited.discard(param)
        self._close_if_done()

    def _close_if_done(self) -> None:
        if self.open and not self.inputs_pending and not self._awaited:
            self.open = False
            manager = self._engine.manager
            manager.let_go(self._chunks)
            idle = [p for p in self._params if manager.state_of(p) is TensorState.COMPUTE]
            manager.set_state(idle, TensorState.HOLD_AFTER_BACKWARD)
            self._engine.open_calls.remove(self)
