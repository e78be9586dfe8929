"""Schedules of learning rates by their closed forms, under the names of Colossal-AI.

t is the step, from 0; T `total_steps`; W `warmup_steps`. Each schedule takes `total_steps` first. A
rate depends on t alone, so a schedule resumes from its state dict. After T it stays constant.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from inspect import Parameter, Signature
from typing import Any, ClassVar

import torch
from torch.optim import lr_scheduler


def _takes(schedule: Any, options: Mapping[str, Any]) -> None:
    """Give a class these options with their defaults, in this order, after `total_steps`."""
    names = {"optimizer": Parameter.empty, "total_steps": Parameter.empty, **options}
    schedule.parameters = schedule.__signature__ = Signature(
        [
            Parameter(name, Parameter.POSITIONAL_OR_KEYWORD, default=default)
            for name, default in {**names, "last_epoch": -1}.items()
        ]
    )


def _given(schedule: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    given = schedule.parameters.bind(*args, **kwargs)
    given.apply_defaults()
    found: dict[str, Any] = given.arguments
    return found


class Schedule(lr_scheduler.LRScheduler):
    """Warm-up, base (t + 1) / W for t < W; then `after` t' = t - W steps of T' = T - W.

    Its arguments are attributes. Raises ValueError for steps and options outside their range.
    """

    parameters: ClassVar[Signature]
    fixed: ClassVar[dict[str, float]] = {"warmup_steps": 0}  # what is no argument
    peak_delay = 0  # steps after the warm-up at which the rate is base
    total_steps: int
    warmup_steps: int

    def __init_subclass__(cls, after: Callable[..., float] | None = None, **options: Any) -> None:
        if after is not None:
            cls.after = after  # type: ignore[method-assign]
            _takes(cls, options)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        options = _given(self, args, kwargs)
        optimizer, last_epoch = options.pop("optimizer"), options.pop("last_epoch")
        self._check(**options)
        if "milestones" in options:
            options["milestones"] = sorted(options["milestones"])
        vars(self).update(self.fixed, **options)
        super().__init__(optimizer, last_epoch)

    def _check(
        self,
        total_steps: int,
        warmup_steps: int = 0,
        pct_start: float = 0.0,
        end_lr: float = 0.0,
        milestones: Sequence[int] | None = (0,),
        **_: float,
    ) -> None:
        if total_steps < 1:
            raise ValueError(f"total_steps={total_steps}; expected 1 or more")
        if warmup_steps < 0:
            raise ValueError(f"warmup_steps={warmup_steps}; expected 0 or more")
        if not 0 <= pct_start < 1:
            raise ValueError(f"pct_start={pct_start} is outside [0, 1)")
        if end_lr < 0:
            raise ValueError(f"end_lr={end_lr} is negative")
        if not milestones:
            raise ValueError("milestones is empty; expected steps at which the rate falls")

    def rate(self, step: int, base: float) -> float:
        """Rate of a group with initial rate `base`, at a step of at most `total_steps`.

        A warm-up of `total_steps` or more goes on to the end.
        """
        warmup = self.warmup_steps
        if step < warmup or warmup >= self.total_steps:
            return base * (step + 1) / (warmup + self.peak_delay)
        return self.after(step - warmup, self.total_steps - warmup, base)

    def after(self, step: int, total: int, base: float) -> float:
        """Rate at step t' of T' after the warm-up."""
        raise NotImplementedError

    def get_lr(self) -> list[float | torch.Tensor]:
        step = min(self.last_epoch, self.total_steps)
        return [self.rate(step, float(base)) for base in self.base_lrs]

    _get_closed_form_lr = get_lr


def _linear(self: Any, step: int, total: int, base: float) -> float:
    return base * (total - step) / total


def _cosine(self: Any, step: int, total: int, base: float) -> float:
    return float(self.eta_min + (base - self.eta_min) * (1 + math.cos(math.pi * step / total)) / 2)


def _flat(self: Any, step: int, total: int, base: float) -> float:
    flat = int(self.pct_start * total)
    return base if step < flat else _cosine(self, step - flat, total - flat, base)


def _steps(self: Any, step: int, total: int, base: float) -> float:
    passed = bisect_right(self.milestones, step + self.warmup_steps)
    return float(base * self.gamma**passed)


def _polynomial(self: Any, step: int, total: int, base: float) -> float:
    return float(self.end_lr + (base - self.end_lr) * (1 - step / total) ** self.power)


class LinearWarmupLR(Schedule, after=_linear, warmup_steps=0):
    """Rate base (t + 1) / (W + 1) for t < W, then base (T - t) / (T - W)."""

    peak_delay = 1


class CosineAnnealingLR(Schedule, after=_cosine, eta_min=0.0):
    """Rate eta_min + (base - eta_min) (1 + cos(pi t / T)) / 2."""


class CosineAnnealingWarmupLR(Schedule, after=_cosine, warmup_steps=0, eta_min=0.0):
    """Warm-up, then eta_min + (base - eta_min) (1 + cos(pi t' / T')) / 2."""


class FlatAnnealingLR(Schedule, after=_flat, pct_start=0.72):
    """Rate base for F = int(pct_start T) steps, then a cosine to 0."""

    fixed = Schedule.fixed | {"eta_min": 0.0}


class FlatAnnealingWarmupLR(Schedule, after=_flat, warmup_steps=0, pct_start=0.72, eta_min=0.0):
    """Warm-up, then base for F = int(pct_start T') steps, then a cosine to eta_min."""


class MultiStepLR(Schedule, after=_steps, milestones=None, gamma=0.1):
    """Rate base gamma^n, where n milestones are at most t."""


class MultiStepWarmupLR(Schedule, after=_steps, warmup_steps=0, milestones=None, gamma=0.1):
    """Warm-up, then base gamma^n, where n milestones (steps of all) are at most t."""


class PolynomialLR(Schedule, after=_polynomial, end_lr=0.0001, power=1.0):
    """Rate end_lr + (base - end_lr) (1 - t / T)^power."""


class PolynomialWarmupLR(Schedule, after=_polynomial, warmup_steps=0, end_lr=0.0001, power=1.0):
    """Warm-up, then end_lr + (base - end_lr) (1 - t' / T')^power."""


class _OfTorch:
    """Base class put before a schedule of torch's, so that it takes `total_steps` too."""

    def __init_subclass__(cls, **options: Any) -> None:
        if options:
            _takes(cls, options)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(**self.asked(**_given(self, args, kwargs)))

    def asked(self, total_steps: int, **options: Any) -> dict[str, Any]:
        """Arguments for torch's schedule."""
        return options


class OneCycleLR(
    _OfTorch, lr_scheduler.OneCycleLR, pct_start=0.3, anneal_strategy="cos", cycle_momentum=True,
    base_momentum=0.85, max_momentum=0.95, div_factor=25.0, final_div_factor=10000.0,
):  # fmt: skip
    """Schedule of torch with the groups' rates as the highest ones."""

    def asked(self, total_steps: int, **options: Any) -> dict[str, Any]:
        highest = [group["lr"] for group in options["optimizer"].param_groups]
        return {"max_lr": highest, "total_steps": total_steps, **options}


class LambdaLR(_OfTorch, lr_scheduler.LambdaLR, lr_lambda=None):
    """Rate base lr_lambda(t), by torch's schedule."""

    def asked(self, total_steps: int, **options: Any) -> dict[str, Any]:
        if options["lr_lambda"] is None:
            raise ValueError("lr_lambda is None; expected a function of the step")
        return options


class StepLR(_OfTorch, lr_scheduler.StepLR, step_size=1, gamma=0.1):
    """Rate base gamma^(t // step_size), by torch's schedule."""


class ExponentialLR(_OfTorch, lr_scheduler.ExponentialLR, gamma=1.0):
    """Rate base gamma^t, by torch's schedule."""
