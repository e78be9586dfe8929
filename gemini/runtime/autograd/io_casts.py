"""Casts and the loss scale, at the inputs and outputs of the wrapper's forward.

In fp16 an output is raised to fp32, and the gradient that comes back for it is multiplied by the
loss scale; a gradient that leaves through an input is divided by it, in the input's own dtype. So
gradients are scaled whether the loss is computed inside the module or outside.

The hooks sit on the tensors themselves, and not on views of them: an operator in place, such as
`loss /= k`, takes the node of a view out of the graph, and its hooks with it.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from gemini.optim.rules.control_vector import ControlVector
from gemini.placement.overruns import user_stacklevel
from gemini.trees import map_tensors, tensors_in

DEPTH = 4  # of objects inside objects that are opened
LOOKS = 16  # first calls in which arguments are looked at
LOOK_NUMEL = 1 << 16  # elements of an argument that are looked at


class Boundary:
    """Boundary of one wrapped module: casts its inputs and outputs, puts the loss scale on and off.

    dtype: of the module's computation; floating inputs are cast to it where `cast_inputs`.
    begins: called when a gradient comes in.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        device: torch.device,
        control_vector: ControlVector,
        begins: Callable[[], None],
        *,
        force_outputs_fp32: bool,
        cast_inputs: bool = True,
    ) -> None:
        self._dtype = dtype
        self._device = device
        self._control_vector = control_vector
        self._begins = begins
        self._casts_inputs = cast_inputs
        self._raises_outputs = force_outputs_fp32 or dtype == torch.float16
        self._looks_left = LOOKS if cast_inputs else 0
        self._looks: deque[_Look] = deque()  # at arguments on a device, not read yet
        self._has_warned = False

    def look(self, inputs: Any) -> None:
        """Warn, once, if a number in the arguments of one of the first calls is changed by the
        cast; see `lost_number`. What is on a device is read in a later call: none waits for it."""
        while self._looks and self._looks[0].ready():
            self._warn(self._looks.popleft())
        if not self._looks_left:
            return
        self._looks_left -= 1
        for tensor in tensors_in(inputs):
            lost = lost_number(tensor, self._dtype)
            if lost is None:
                continue
            look = _Look(lost, tensor.dtype, tuple(tensor.shape))
            if tensor.is_cuda:
                self._looks.append(look)
            else:
                self._warn(look)

    def _warn(self, look: _Look) -> None:
        """Warn of the number that a look found, if it is the first one."""
        changed, before, after = look.found.tolist()
        if not changed or self._has_warned:
            return
        self._has_warned, self._looks_left = True, 0
        warnings.warn(
            f"the cast of floating arguments to {self._dtype} changes numbers: {before!r}, in "
            f"a {look.dtype} of shape {look.shape}, becomes {after!r}; if they "
            "must stay (timesteps, positions, targets), give GeminiDDP cast_inputs=False and "
            "let the module cast what it multiplies with weights",
            stacklevel=user_stacklevel(),
        )

    def enter(self, inputs: Any) -> Any:
        """Arguments as the module gets them: on its device, floating ones in its dtype."""
        return map_tensors(inputs, self._enter)

    def leave(self, outputs: Any) -> Any:
        """Outputs as the caller gets them. Raises TypeError in fp16 for what cannot be changed."""
        outputs = map_tensors(outputs, self._leaving(raises=self._raises_outputs))
        if self._control_vector.active and torch.is_grad_enabled():
            _change_inside(outputs, self._leaving(raises=False))
        return outputs

    def _leaving(self, *, raises: bool) -> Callable[[Tensor], Tensor]:
        """Function from outputs to the caller's; one returned twice stays one tensor, one hook."""
        done: dict[int, tuple[Tensor, Tensor]] = {}  # by identity, before and behind

        def leave(tensor: Tensor) -> Tensor:
            if id(tensor) not in done:
                output = self._leave(tensor, raises)
                done[id(tensor)] = done[id(output)] = tensor, output
            return done[id(tensor)][1]

        return leave

    def _enter(self, tensor: Tensor) -> Tensor:
        if self._control_vector.active and tensor.requires_grad and torch.is_grad_enabled():
            tensor = tensor.view_as(tensor)
            tensor.register_hook(self._unscale)
        casts = self._casts_inputs and tensor.is_floating_point()
        dtype = self._dtype if casts else tensor.dtype
        moved = tensor.to(device=self._device, dtype=dtype, non_blocking=True)
        # a leaf has no place in the graph for hooks to watch
        return moved.view_as(moved) if moved.is_leaf and moved.requires_grad else moved

    def _leave(self, tensor: Tensor, raises: bool) -> Tensor:
        output = tensor.float() if raises and tensor.is_floating_point() else tensor
        if not (output.requires_grad and torch.is_grad_enabled()):
            return output
        if self._control_vector.active and output is tensor:
            output = tensor.clone()  # the module may use it too, and there its gradient is scaled
        if not output.is_leaf:
            output.register_hook(self._backward_begins)
        return output

    def _backward_begins(self, grad: Tensor) -> Tensor | None:
        self._begins()
        if not self._control_vector.active:
            return None
        return (grad * self._control_vector.scale).to(
            grad.dtype
        )  # a 0-d gradient would become fp64

    def _unscale(self, grad: Tensor) -> Tensor:
        return (grad / self._control_vector.scale).to(grad.dtype)


class _Look:
    """Look at one argument of a call: what `lost_number` found, on its way to the host.

    found: fp64 [3], pinned where it comes from a device, and there only if `ready()`.
    """

    def __init__(self, found: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        self.found, self.dtype, self.shape = found, dtype, shape
        self._copied: torch.cuda.Event | None = None
        if found.is_cuda:
            self.found = torch.empty_like(found, device="cpu", pin_memory=True)
            self.found.copy_(found, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record(torch.cuda.current_stream(found.device))

    def ready(self) -> bool:
        return self._copied is None or self._copied.query()


def lost_number(tensor: Tensor, dtype: torch.dtype) -> Tensor | None:
    """First number of an argument that a cast to `dtype` changes.

    Returns fp64 [3] on the argument's device: whether there is one, the number, and what becomes of
    it; None for an argument that is not cast.

    Features lose bits in every cast, and are meant to. A number is an integer, what would overflow,
    or any element of an argument that has one for each sample, such as a time or a target.
    """
    is_plain = type(tensor) is Tensor and not tensor.is_meta and tensor.numel()
    if not is_plain or not tensor.is_floating_point() or tensor.dtype == dtype:
        return None
    values = tensor.detach().reshape(-1)[:LOOK_NUMEL]
    became = values.to(dtype).to(values.dtype)
    changed = (became != values) & values.isfinite()
    if tensor.dim() and tensor.numel() > len(tensor):
        changed &= (values == values.round()) | became.isinf()
    first = changed.to(torch.uint8).argmax().view(1)  # no index of the host's: that would wait
    return torch.cat([x.index_select(0, first).double() for x in (changed, values, became)])


def _change_inside(value: Any, change: Callable[[Tensor], Tensor], depth: int = DEPTH) -> None:
    """Put changed tensors into objects that `map_tensors` does not open, a model's cache say.

    Raises TypeError for an object that cannot be changed: its gradients would carry no loss scale.
    """
    if isinstance(value, (Tensor, nn.Module)) or not depth:
        return
    if isinstance(value, Mapping):
        parts: Iterable[Any] = value.values()
    elif isinstance(value, (list, tuple)):
        parts = value
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = [getattr(value, field.name) for field in dataclasses.fields(value)]
    else:
        if hasattr(value, "__dict__") and not isinstance(value, type):
            _change_attributes(value, change, depth - 1)
        return
    for part in parts:
        _change_inside(part, change, depth)


def _change_attributes(holder: Any, change: Callable[[Tensor], Tensor], depth: int) -> None:
    for name, value in list(vars(holder).items()):
        if not any(tensor.requires_grad for tensor in tensors_in(value)):
            _change_inside(value, change, depth)
            continue
        try:
            setattr(holder, name, map_tensors(value, change))
        except (AttributeError, TypeError) as error:
            raise TypeError(
                f"the module returned a {type(holder).__name__} with tensors that need gradients; "
                "in fp16 every output gets a loss scale, and this one cannot be changed. Return "
                "tensors, lists, mappings or dataclasses"
            ) from error
