"""What tells whether a block may be computed again: what its forward changes, draws and gives."""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gemini.trees import tensors_in

_SCALARS = (type(None), bool, int, float, str)
_PLAIN = (*_SCALARS, Tensor, torch.dtype, torch.device)
_OF_TORCH = frozenset(vars(nn.Module())) - {"training"}


class Seen:
    """What a forward may leave changed: buffers, tensors, numbers and lengths of containers among
    the attributes of a block's modules; what it is given; generators of Python and numpy.

    Attributes of other objects, files and globals are not seen.
    """

    def __init__(self, block: nn.Module, given: Any) -> None:
        self._objects: list[Any] = []  # so that no other object has their address
        self._values: list[Any] = []
        for module in block.modules():
            for buffer in module._buffers.values():
                self._see(buffer)
            for key, value in vars(module).items():
                if key not in _OF_TORCH:
                    self._values.append(key)
                    self._see(value)
        self._see_given(given)
        self._python = random.getstate()
        numpy = sys.modules.get("numpy")
        self._numpy = None if numpy is None else _comparable(numpy.random.get_state())

    def _see(self, value: Any) -> None:
        if isinstance(value, Tensor):
            self._objects.append(value)
            # those of inference mode have no version, and nothing that records may change them
            self._values.append(0 if value.is_inference() else value._version)
        elif isinstance(value, _SCALARS):
            self._values.append(repr(value))
        elif isinstance(value, (list, dict, set, deque)):
            self._objects.append(value)
            self._values.append(len(value))

    def _see_given(self, value: Any) -> None:
        self._see(value)
        if isinstance(value, dict):
            value = list(value.values())
        if isinstance(value, (list, tuple)):
            for one in value:
                self._see_given(one)

    def differs(self, other: Seen, *, of_random: bool = True) -> bool:
        """Whether anything is not as it was. of_random: generators count too."""
        if of_random and (self._python, self._numpy) != (other._python, other._numpy):
            return True
        if self._values != other._values or len(self._objects) != len(other._objects):
            return True
        return any(a is not b for a, b in zip(self._objects, other._objects, strict=True))


class Random:
    """State of the generators that a forward may draw from: of torch, Python and numpy."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._python = random.getstate()
        numpy = sys.modules.get("numpy")
        self._numpy = None if numpy is None else numpy.random.get_state()
        self._torch = self._torch_states()

    def _torch_states(self) -> list[Tensor]:
        states = [torch.get_rng_state()]
        if self._device.type == "cuda":
            states.append(torch.cuda.get_rng_state(self._device))
        return states

    def set_torch(self) -> None:
        """As checkpointing does: the others go on."""
        torch.set_rng_state(self._torch[0])
        if len(self._torch) > 1:
            torch.cuda.set_rng_state(self._torch[1], self._device)

    def set_all(self) -> None:
        """Threads that draw go on, where a forward has not drawn."""
        self.set_torch()
        if random.getstate() != self._python:
            random.setstate(self._python)
        if self._numpy is not None:
            now = sys.modules["numpy"].random
            if _comparable(now.get_state()) != _comparable(self._numpy):
                now.set_state(self._numpy)

    def is_torch_now(self) -> bool:
        pairs = zip(self._torch, self._torch_states(), strict=True)
        return all(torch.equal(a, b) for a, b in pairs)


def reason_against(block: nn.Module, args: Any, kwargs: Any) -> str | None:
    """Reason for which a call of a block is not tried twice; None: there is none."""
    if any(True for _ in _foreign_hooks(block)):
        return "modules inside of it have hooks, which would run twice"
    for leaf in _leaves((args, kwargs)):
        if isinstance(leaf, nn.Parameter):
            return "it is given a parameter, which may be elsewhere by then"
        if not isinstance(leaf, _PLAIN):
            return f"it is given a {type(leaf).__name__}, which it may change (use_cache=False)"
    return None


def kind_of_call(block: nn.Module, args: Any, kwargs: Any) -> Hashable:
    """What a proof holds for: modes and foreign hooks of modules, autocast, and all that a block is
    given but the values and shapes of tensors and the values of numbers."""
    modes = tuple(module.training for module in block.modules())
    autocast = tuple(
        torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        for device in ("cpu", "cuda")
    )
    hooks = sum(1 for _ in _foreign_hooks(block))
    return modes, autocast, hooks, _structure(args), _structure(kwargs)


def _structure(value: Any) -> Hashable:
    if isinstance(value, dict):
        return type(value), tuple((key, _structure(one)) for key, one in value.items())
    if isinstance(value, (list, tuple)):
        return type(value), tuple(map(_structure, value))
    if isinstance(value, Tensor):
        return type(value), value.dtype, value.requires_grad
    if isinstance(value, (bool, str, type(None))):
        return value
    return str(type(value))


def _foreign_hooks(block: nn.Module) -> Iterator[Callable[..., Any]]:
    """Hooks inside of a block that are not the engine's. Its own run around what is repeated."""
    for module in block.modules():
        if module is block:
            continue
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for hook in hooks.values():
                made = hook
                while isinstance(made, partial):
                    made = made.func
                if not str(getattr(made, "__module__", "")).startswith("gemini."):
                    yield hook


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for one in value:
            yield from _leaves(one)
    else:
        yield value


def same_bits(first: Any, second: Any) -> bool:
    """Whether two outputs of a forward have equal tensors, bit for bit."""
    mine, theirs = list(tensors_in(first)), list(tensors_in(second))
    if len(mine) != len(theirs):
        return False
    return all(
        a.dtype == b.dtype
        and a.shape == b.shape
        and a.requires_grad == b.requires_grad
        and torch.equal(_bits(a), _bits(b))
        for a, b in zip(mine, theirs, strict=True)
    )


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _comparable(state: Any) -> Any:
    """State of numpy's generator, without arrays, whose == gives arrays."""
    return tuple(part.tobytes() if hasattr(part, "tobytes") else part for part in state)
