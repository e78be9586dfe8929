"""Methods of a boosted optimizer for torch's own: clipping by name, and a loss scale.

Under the plugins of torch (DDP, FSDP2) the optimizer stays the same object; its class becomes a
subclass that has these methods.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from gemini.api import Scaling, TieredOptimizer, asked_norm, rank, show_steps

from .precision import MixedPrecision


@dataclass(frozen=True)
class Extras:
    """Options of a step: its loss scale and its clipping.

    max_norm: every step clips gradients to this L2 norm; 0 does not clip.
    """

    scaling: Scaling | None = None
    max_norm: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.max_norm < math.inf:
            raise ValueError(f"max_norm={self.max_norm} is negative; 0 does not clip")


def boost_plain(
    optimizer: torch.optim.Optimizer | None, precision: MixedPrecision | None, max_norm: float = 0.0
) -> None:
    """Give an optimizer of plain parameters the methods of a boosted one.

    It stays the same object, and its class becomes a subclass of the class it had.
    """
    if optimizer is None:
        return
    scaling = None
    if precision is not None and precision.loss_scale is not None:
        scaling = Scaling(
            precision.loss_scale, says_overflows=precision.says_overflows, tells=rank() == 0
        )
    extras = Extras(scaling, max_norm)
    if isinstance(optimizer, TieredOptimizer) and extras == Extras():
        return
    followed = hasattr(optimizer.step, "_wrapped_by_lr_sched")
    # a scheduler has put its own `step` on the object, which would hide that of the new class
    optimizer.__dict__.pop("step", None)
    kind: Any = type(optimizer)
    optimizer.__class__ = _boosted(kind)
    optimizer._extras = extras  # type: ignore[attr-defined]
    if followed:  # by a scheduler that was made before
        show_steps(optimizer)


class Boosted(torch.optim.Optimizer):
    """Base class put before the class of an optimizer; see `boost_plain`."""

    _extras: Extras

    def backward(self, loss: Tensor, **options: Any) -> None:
        """Run `loss.backward(**options)` with the loss scale.

        Raises RuntimeError after a clip: gradients of two scales would be added.
        """
        scaling = self._extras.scaling
        if scaling is None:
            loss.backward(**options)
            return
        if scaling.is_unscaled:
            if any(param.grad is not None for param in self._params()):
                raise RuntimeError(
                    "backward() after gradients were clipped; call optimizer.step() or zero_grad() "
                    "between, or clip after the last backward"
                )
            scaling.forget()
        scaling.scaled(loss).backward(**options)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        scaling = self._extras.scaling
        if scaling is not None:
            if closure is not None:
                raise RuntimeError(
                    "step(closure) with a loss scale: gradients are to be unscaled between; call "
                    "booster.backward(loss, optimizer) and step()"
                )
            scaling.unscale(self._params())
        # clipped after unscaling: `max_norm` is a limit of the gradients without the scale
        if self._extras.max_norm > 0:
            self._clip(self._extras.max_norm, 2.0)
        if scaling is not None and not scaling.stepped():
            return None
        return super().step(closure)  # type: ignore[safe-super, arg-type]

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        if self._extras.scaling is not None:
            self._extras.scaling.forget()

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Clip all gradients; returns their norm before, over all ranks, 0-d."""
        asked_norm(max_norm, norm_type)
        self._unscale()
        return self._clip(max_norm, norm_type, error_if_nonfinite)

    def clip_grad_by_norm(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Clip all gradients; see `clip_grad_norm_`."""
        return self.clip_grad_norm_(max_norm, norm_type, error_if_nonfinite)

    @torch.no_grad()
    def clip_grad_by_value(self, clip_value: float) -> None:
        """Clip every element of the gradients to [-clip_value, clip_value]. Raises ValueError."""
        if not clip_value > 0:
            raise ValueError(f"clip_value={clip_value}; expected a positive number")
        self._unscale()
        for param in self._params():
            if param.grad is not None:
                _local(param.grad).clamp_(-clip_value, clip_value)

    def _unscale(self) -> None:
        if self._extras.scaling is not None:
            self._extras.scaling.unscale(self._params())

    def _clip(self, max_norm: float, norm_type: float, error_if_nonfinite: bool = False) -> Tensor:
        if isinstance(self, TieredOptimizer):
            return TieredOptimizer.clip_grad_norm_(self, max_norm, norm_type, error_if_nonfinite)
        norm = torch.nn.utils.clip_grad_norm_(
            list(self._params()), max_norm, norm_type, error_if_nonfinite
        )
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def _params(self) -> Iterator[Tensor]:
        for group in self.param_groups:
            yield from group["params"]


def scale_of(optimizer: torch.optim.Optimizer) -> dict[str, float] | None:
    """State of an optimizer's loss scale; None for one of shards, or without a scale."""
    scaling = optimizer._extras.scaling if isinstance(optimizer, Boosted) else None
    return None if scaling is None else scaling.state_dict()


def set_scale(optimizer: torch.optim.Optimizer, saved: Any) -> None:
    """Set the optimizer's loss scale to the saved one, if both have one. Raises ValueError."""
    scaling = optimizer._extras.scaling if isinstance(optimizer, Boosted) else None
    if scaling is not None and isinstance(saved, Mapping) and "scale" in saved:
        scaling.load_state_dict(saved)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@functools.cache
def _boosted(kind: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    if issubclass(kind, Boosted):
        raise ValueError(f"this {kind.__name__} is boosted already; expected a new optimizer")
    members = {"__doc__": kind.__doc__, "__module__": kind.__module__}
    return type(kind.__name__, (Boosted, kind), members)
