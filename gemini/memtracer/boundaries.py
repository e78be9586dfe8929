"""Module-boundary hooks on any `nn.Module`, wrapped or not: where moments come from.

A module with parameters of its own is entered before its forward and left behind it; in backward
it is entered when the first gradient of an output arrives, and left when the gradients of its
inputs and of its own parameters have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook

from gemini.trees import tensors_in
from gemini.units import ParamId

from .trace import Edge, Phase

Listener = Callable[[Phase, Edge, str, tuple[ParamId, ...]], None]


@contextmanager
def module_boundaries(
    module: nn.Module,
    param_ids: Mapping[str, ParamId],
    listener: Listener,
    actual: Mapping[str, Tensor] | None = None,
) -> Iterator[None]:
    """Call `listener` at every boundary. `param_ids` is by parameter name; `actual` are the tensors
    that stand for the parameters, where they are not the module's own."""
    handles: list[Any] = []
    owners: dict[ParamId, int] = {}
    plans: list[_Owner] = []
    for name, sub in module.named_modules():
        own = {f"{name}.{n}" if name else n: p for n, p in sub.named_parameters(recurse=False)}
        if not own:
            continue
        ids = tuple(dict.fromkeys(param_ids[n] for n in own))
        for param in ids:
            owners[param] = owners.get(param, 0) + 1
        tensors = {param_ids[n]: (actual or own)[n] for n in own}
        plans.append(_Owner(sub, name, ids, tensors, listener))
    for owner in plans:
        # a shared parameter's gradient comes after the last of its owners: nobody waits for it
        owner.awaited = [
            tensor for param, tensor in owner.tensors.items()
            if owners[param] == 1 and tensor.requires_grad
        ]  # fmt: skip
        handles += [
            owner.module.register_forward_pre_hook(owner.before_forward, prepend=True),
            owner.module.register_forward_hook(
                owner.after_forward, with_kwargs=True, always_call=True
            ),
        ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for owner in plans:
            owner.remove_hooks()


@dataclass(eq=False)
class _Owner:
    module: nn.Module
    name: str
    params: tuple[ParamId, ...]
    tensors: dict[ParamId, Tensor]
    listener: Listener
    awaited: list[Tensor] = field(default_factory=list)
    _handles: list[Any] = field(default_factory=list)

    def tell(self, phase: Phase, edge: Edge) -> None:
        self.listener(phase, edge, self.name, self.params)

    def before_forward(self, module: nn.Module, args: Any) -> None:
        self.tell("forward", "enter")

    def after_forward(
        self, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any
    ) -> None:
        self.tell("forward", "leave")
        outputs = [t for t in tensors_in(output) if t.requires_grad]
        if not torch.is_grad_enabled() or not outputs:
            return
        inputs = [t for t in tensors_in((args, kwargs)) if t.requires_grad]
        call = _BackwardCall(self, pending=bool(inputs) + len(self.awaited))
        hooks = [register_multi_grad_hook(outputs, call.begin, mode="any")]
        if inputs:
            hooks.append(register_multi_grad_hook(inputs, call.inputs_done, mode="all"))
        hooks += [t.register_post_accumulate_grad_hook(call.param_done) for t in self.awaited]
        self._handles += hooks

    def remove_hooks(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


@dataclass(eq=False)
class _BackwardCall:
    """The backward of one call of a module."""

    owner: _Owner
    pending: int  # what must arrive before it is over
    open: bool = False

    def begin(self, grad: Tensor) -> None:
        self.owner.tell("backward", "enter")
        self.open = True
        self._close_if_done()

    def inputs_done(self, grads: Any) -> None:
        self.param_done(None)

    def param_done(self, param: Tensor | None) -> None:
        self.pending -= 1
        self._close_if_done()

    def _close_if_done(self) -> None:
        if self.open and self.pending <= 0:
            self.open = False
            self.owner.tell("backward", "leave")
