"""Gradient handlers: changes of reduced gradients before every step; classes by their names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from gemini import GeminiDDP
from gemini.api import TieredOptimizer

Class = TypeVar("Class", bound=type)


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
            optimizer.bind_to(model.parameters())
        self._model, self._optimizer = model, optimizer
        self._hook = optimizer.register_step_pre_hook(self._before_step)

    def handle_gradient(self) -> None:
        """Change gradients; called on every rank before a step, after all backwards."""
        raise NotImplementedError

    def map_gradients(self, change: Callable[[str, Tensor], Tensor | None]) -> None:
        """Change every gradient; see `GeminiDDP.map_gradients`."""
        self._model.map_gradients(change)

    def remove(self) -> None:
        """Remove the handler: later steps run without it."""
        self._hook.remove()

    def _before_step(self, *_: Any) -> None:
        self.handle_gradient()


class Registry:
    """Registry of classes by their names, of one kind: `MODELS` has models."""

    def __init__(self, kind: str) -> None:
        """kind: name of the registry, for errors."""
        self.name = kind
        self._known: dict[str, type] = {}

    def register_module(self, cls: Class) -> Class:
        """Decorator that registers a class."""
        self._known[cls.__name__] = cls
        return cls

    def has(self, name: str) -> bool:
        """Whether a class of this name is registered."""
        return name in self._known

    def get_module(self, name: str) -> Any:
        """Class by its name. Raises ValueError for an unknown name."""
        if name not in self._known:
            raise ValueError(
                f"no {name!r} in {self.name}; expected one of {sorted(self._known)}, registered "
                f"by @{self.name}.register_module"
            )
        return self._known[name]


GRADIENT_HANDLER = Registry("GRADIENT_HANDLER")
LAYERS, MODELS = Registry("LAYERS"), Registry("MODELS")


@GRADIENT_HANDLER.register_module
class DataParallelGradientHandler(BaseGradientHandler):
    """Handler of replicas, without effect: gradients are reduced while backward runs."""

    def handle_gradient(self) -> None:
        """Do nothing."""
