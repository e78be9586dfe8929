"""What passes the wrapper's forward on its way in and out: casts, and the loss scale.

In fp16 an output is raised to fp32, and the gradient that comes back for it is multiplied by the
loss scale; a gradient that leaves through an input is divided by it, in the input's own dtype. So
the scale is there whoever computes the loss, inside the module or outside.

The hooks sit on `view_as`: an autograd Function there would break `loss /= k`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from gemini.trees import map_tensors
from optim.scaler import Scaler


class Boundary:
    """Of one wrapped module.

    dtype: of the module's computation; floating inputs are cast to it.
    begins: called when the first gradient of a backward comes in.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        device: torch.device,
        scaler: Scaler,
        begins: Callable[[], None],
        *,
        force_outputs_fp32: bool,
    ) -> None:
        self._dtype = dtype
        self._device = device
        self._scaler = scaler
        self._begins = begins
        self._raises_outputs = force_outputs_fp32 or dtype == torch.float16

    def enter(self, inputs: Any) -> Any:
        """Arguments as the module gets them: on its device, floating ones in its dtype."""
        return map_tensors(inputs, self._enter)

    def leave(self, outputs: Any) -> Any:
        """Outputs as the caller gets them. Raises TypeError in fp16 for what cannot be opened."""
        trains = torch.is_grad_enabled()
        if trains and self._scaler.active:
            _check_opens(outputs)
        if self._raises_outputs:
            outputs = map_tensors(outputs, _to_fp32)
        return map_tensors(outputs, self._leave) if trains else outputs

    def _enter(self, tensor: Tensor) -> Tensor:
        if self._scaler.active and tensor.requires_grad and torch.is_grad_enabled():
            tensor = tensor.view_as(tensor)
            tensor.register_hook(self._unscale)
        dtype = self._dtype if tensor.is_floating_point() else tensor.dtype
        moved = tensor.to(device=self._device, dtype=dtype, non_blocking=True)
        # a leaf has no place in the graph for hooks to watch
        return moved.view_as(moved) if moved.is_leaf and moved.requires_grad else moved

    def _leave(self, output: Tensor) -> Tensor:
        if not output.requires_grad:
            return output
        view = output.view_as(output)
        view.register_hook(self._backward_begins)
        return view

    def _backward_begins(self, grad: Tensor) -> Tensor | None:
        self._begins()
        if not self._scaler.active:
            return None
        return (grad * self._scaler.scale).to(grad.dtype)  # a 0-d gradient would become fp64

    def _unscale(self, grad: Tensor) -> Tensor:
        return (grad / self._scaler.scale).to(grad.dtype)


def _to_fp32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.is_floating_point() else tensor


def _check_opens(value: Any, holder: str | None = None, depth: int = 4) -> None:
    """Raise TypeError for a tensor that needs a gradient inside what `map_tensors` does not open:
    its gradient would carry no loss scale."""
    if isinstance(value, Tensor):
        if holder is not None and value.requires_grad:
            raise TypeError(
                f"the module returned a {holder} with tensors that need gradients; in fp16 every "
                "output gets a loss scale, and this type cannot be opened. Return tensors, lists, "
                "mappings or dataclasses (Hugging Face models: use_cache=False)"
            )
        return
    parts: Iterable[Any] = ()
    if isinstance(value, Mapping):
        parts = value.values()
    elif isinstance(value, (list, tuple)):
        parts = value
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = [getattr(value, field.name) for field in dataclasses.fields(value)]
    elif depth and hasattr(value, "__dict__") and not isinstance(value, type):
        holder, depth, parts = holder or type(value).__name__, depth - 1, vars(value).values()
    for part in parts:
        _check_opens(part, holder, depth)
