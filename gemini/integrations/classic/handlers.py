"""Gradient handlers: changes of reduced gradients before every step."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import nn

from gemini.ddp import GeminiDDP
from gemini.optim.base import TieredOptimizer
from gemini.runtime.gradients.by_name import ChangeGradient

Handler = TypeVar("Handler", bound="type[BaseGradientHandler]")


class BaseGradientHandler:
    """Base of gradient handlers: every step begins with the subclass's `handle_gradient`.

    model: a wrapped module; optimizer: the one over it.
    Raises ValueError for a plain module.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if not isinstance(model, GeminiDDP):
            raise ValueError(
                f"a gradient handler over a {type(model).__name__}; expected a GeminiDDP: of plain "
                "modules change p.grad before the step"
            )
        if isinstance(optimizer, TieredOptimizer):
            optimizer.bind_to(model.engine)
        self._model, self._optimizer = model, optimizer
        self._hook = optimizer.register_step_pre_hook(self._before_step)

    def handle_gradient(self) -> None:
        """Change gradients; called on every rank before a step, after all backwards."""
        raise NotImplementedError

    def map_gradients(self, change: ChangeGradient) -> None:
        """Change every gradient; see `GeminiDDP.map_gradients`."""
        self._model.map_gradients(change)

    def remove(self) -> None:
        """Remove the handler: later steps run without it."""
        self._hook.remove()

    def _before_step(self, *_: Any) -> None:
        self.handle_gradient()


class HandlerRegistry:
    """Registry of handlers by the names of their classes."""

    def __init__(self) -> None:
        self._kinds: dict[str, type[BaseGradientHandler]] = {}

    def register_module(self, kind: Handler) -> Handler:
        """Decorator that registers a class."""
        self._kinds[kind.__name__] = kind
        return kind

    def get_module(self, name: str) -> type[BaseGradientHandler]:
        """Class by its name. Raises ValueError for an unknown name."""
        if name not in self._kinds:
            raise ValueError(
                f"no gradient handler {name!r}; expected one of {sorted(self._kinds)}, registered "
                "by @GRADIENT_HANDLER.register_module"
            )
        return self._kinds[name]


GRADIENT_HANDLER = HandlerRegistry()
