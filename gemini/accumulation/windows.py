"""Window: micro-batches of one step, in a loop that gives them one by one.

Such a loop (Trainer's) calls the model and forms gradients in one function of its own. Layer by
layer the forward is not that function's. So it is run up to its call of the model, which shows the
arguments, and once more with an output in place of the forward, up to its backward, which shows the
loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

import torch
from torch import Tensor

from gemini.ddp import GeminiDDP
from gemini.placement.orders import LAYERS, ORDERS

from .accumulate import accumulate
from .chain import refuse
from .streams import generators, same

# Forward and loss of a micro-batch; its argument: whether what the loop counts (tokens) stays
Loss = Callable[[bool], Tensor]


class _Called(BaseException):
    """End of a step that called its model. No `except Exception` catches it."""


class AccumulationWindow:
    """Micro-batches of one step layer by layer: `num_batches` of them are added, one after the
    other. Random numbers are those of the other order, if nothing is drawn between them."""

    def __init__(self, model: GeminiDDP, num_batches: int) -> None:
        self._model, self._num_batches = model, num_batches
        self._steps: list[Loss] = []

    def add(self, step: Loss) -> Tensor:
        """Add a micro-batch, and with the last one run all of them.

        Returns 0, and with the last one the sum of all losses, detached. Raises NoChainError,
        before any gradient is changed, for a step that cannot be taken apart, and as
        `gemini.accumulate`.
        """
        self._steps.append(step)
        is_last = len(self._steps) == self._num_batches
        return self._by_layers() if is_last else torch.zeros((), device=self._device)

    @property
    def _device(self) -> torch.device:
        engine = self._model.engine
        return engine.backend.device

    def _by_layers(self) -> Tensor:
        steps, self._steps = self._steps, []
        given = [self._arguments(step) for step in steps]
        step_of = {id(kwargs): step for kwargs, step in zip(given, steps, strict=True)}
        counted = set[int]()

        def loss(output: Any, kwargs: dict[str, Any]) -> Tensor:
            # a loss of no graph is a look ahead, and one of a second graph is for tied weights
            counts = torch.is_grad_enabled() and id(kwargs) not in counted
            if counts:
                counted.add(id(kwargs))
            with self._answering(output):
                return step_of[id(kwargs)](counts)

        losses = accumulate(self._model, given, loss, order=LAYERS)
        return sum(losses, torch.zeros((), device=self._device))

    def _arguments(self, step: Loss) -> dict[str, Any]:
        """Arguments of the forward that a step asks for."""
        found: list[dict[str, Any]] = []

        def called(*args: Any, **kwargs: Any) -> NoReturn:
            if args:
                refuse("a step gives its model arguments without names")
            found.append(kwargs)
            raise _Called

        before = generators(self._device)
        with self._replaced(called), suppress(_Called):
            step(False)
        if not found:
            refuse("a step does not call its model")
        if not same(before, generators(self._device)):
            refuse("a step draws random numbers before it calls its model")
        return found[0]

    @contextmanager
    def _answering(self, output: Any) -> Iterator[None]:
        """Context in which the model's one forward is `output`."""
        waiting = [output]

        def called(*args: Any, **kwargs: Any) -> Any:
            if not waiting:
                refuse("a step calls its model more than once")
            return waiting.pop()

        with self._replaced(called):
            yield

    @contextmanager
    def _replaced(self, forward: Callable[..., Any]) -> Iterator[None]:
        """Context in which the wrapped model has this forward."""
        own = self._model.__dict__
        own["forward"] = forward
        try:
            yield
        finally:
            del own["forward"]


def check_order(order: str) -> None:
    """Raise ValueError for an unknown order."""
    if order not in ORDERS:
        raise ValueError(f"accumulate_order={order!r}; expected one of {', '.join(ORDERS)}")
