"""Learning rates by their closed forms, under the names that Colossal-AI's users know.

t is the step, from 0; T `total_steps`; W `warmup_steps`; each takes `total_steps` first. A rate
depends on t alone, so a schedule goes on from its state dict. Behind T it stays as it is there.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence

import torch
from torch.optim import lr_scheduler


class Schedule(lr_scheduler.LRScheduler):
    """Base of those below: `rate` says all. Raises ValueError for steps that are none."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        total_steps: int,
        warmup_steps: int = 0,
        last_epoch: int = -1,
    ) -> None:
        if total_steps < 1:
            raise ValueError(f"total_steps={total_steps}; expected 1 or more")
        if not 0 <= warmup_steps < total_steps:
            raise ValueError(
                f"warmup_steps={warmup_steps}; expected 0 to total_steps - 1 = {total_steps - 1}"
            )
        self.total_steps = total_steps
        self.warmup_steps = warmup_steps
        super().__init__(optimizer, last_epoch)

    def rate(self, step: int, base: float) -> float:
        """Of a group whose rate was `base`, at a step of at most `total_steps`."""
        raise NotImplementedError

    def get_lr(self) -> list[float | torch.Tensor]:
        step = min(self.last_epoch, self.total_steps)
        return [self.rate(step, float(base)) for base in self.base_lrs]

    _get_closed_form_lr = get_lr


class Warmed(Schedule):
    """base (t + 1) / W for t < W; `after(t - W)` from there, over T - W steps."""

    def rate(self, step: int, base: float) -> float:
        if step < self.warmup_steps:
            return base * (step + 1) / self.warmup_steps
        return self.after(step - self.warmup_steps, self.total_steps - self.warmup_steps, base)

    def after(self, step: int, total: int, base: float) -> float:
        """The rate at a step of those that follow the warm-up."""
        raise NotImplementedError


class LinearWarmupLR(Schedule):
    """base (t + 1) / (W + 1) for t < W; base (T - t) / (T - W) from there."""

    def rate(self, step: int, base: float) -> float:
        if step < self.warmup_steps:
            return base * (step + 1) / (self.warmup_steps + 1)
        return base * (self.total_steps - step) / (self.total_steps - self.warmup_steps)


class CosineAnnealingWarmupLR(Warmed):
    """Warm-up, then eta_min + (base - eta_min) (1 + cos(pi t' / T')) / 2.

    t' = t - W, T' = T - W.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        total_steps: int,
        warmup_steps: int = 0,
        eta_min: float = 0.0,
        last_epoch: int = -1,
    ) -> None:
        self.eta_min = eta_min
        super().__init__(optimizer, total_steps, warmup_steps, last_epoch)

    def after(self, step: int, total: int, base: float) -> float:
        return _cosine(step, total, base, self.eta_min)


class CosineAnnealingLR(CosineAnnealingWarmupLR):
    """eta_min + (base - eta_min) (1 + cos(pi t / T)) / 2."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        total_steps: int,
        eta_min: float = 0,
        last_epoch: int = -1,
    ) -> None:
        super().__init__(optimizer, total_steps, 0, eta_min, last_epoch)


class FlatAnnealingWarmupLR(Warmed):
    """Warm-up, then base for F = int(pct_start T') steps, then a cosine to eta_min; T' = T - W."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        total_steps: int,
        warmup_steps: int = 0,
        pct_start: float = 0.72,
        eta_min: float = 0,
        last_epoch: int = -1,
    ) -> None:
        if not 0 <= pct_start < 1:
            raise ValueError(f"pct_start={pct_start} is outside [0, 1)")
        self.pct_start, self.eta_min = pct_start, eta_min
        super().__init__(optimizer, total_steps, warmup_steps, last_epoch)

    def after(self, step: int, total: int, base: float) -> float:
        flat = int(self.pct_start * total)
        return base if step < flat else _cosine(step - flat, total - flat, base, self.eta_min)


class FlatAnnealingLR(FlatAnnealingWarmupLR):
    """base for F = int(pct_start T) steps, then a cosine to 0."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        total_steps: int,
        pct_start: float = 0.72,
        last_epoch: int = -1,
    ) -> None:
        super().__init__(optimizer, total_steps, 0, pct_start, 0, last_epoch)


class MultiStepWarmupLR(Warmed):
    """Warm-up, then base gamma^n, where n milestones (steps of all) are at most t."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        total_steps: int,
        warmup_steps: int = 0,
        milestones: Sequence[int] | None = None,
        gamma: float = 0.1,
        last_epoch: int = -1,
    ) -> None:
        if not milestones:
            raise ValueError("milestones is empty; expected steps at which the rate falls")
        self.milestones, self.gamma = sorted(milestones), gamma
        super().__init__(optimizer, total_steps, warmup_steps, last_epoch)

    def after(self, step: int, total: int, base: float) -> float:
        passed = bisect_right(self.milestones, step + self.warmup_steps)
        return float(base * self.gamma**passed)


class MultiStepLR(MultiStepWarmupLR):
    """base gamma^n, where n milestones are at most t."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        total_steps: int,
        milestones: Sequence[int] | None = None,
        gamma: float = 0.1,
        last_epoch: int = -1,
    ) -> None:
        super().__init__(optimizer, total_steps, 0, milestones, gamma, last_epoch)


class PolynomialWarmupLR(Warmed):
    """Warm-up, then end_lr + (base - end_lr) (1 - t' / T')^power; t' = t - W, T' = T - W."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        total_steps: int,
        warmup_steps: int = 0,
        end_lr: float = 0.0001,
        power: float = 1.0,
        last_epoch: int = -1,
    ) -> None:
        if end_lr < 0:
            raise ValueError(f"end_lr={end_lr} is negative")
        self.end_lr, self.power = end_lr, power
        super().__init__(optimizer, total_steps, warmup_steps, last_epoch)

    def after(self, step: int, total: int, base: float) -> float:
        return float(self.end_lr + (base - self.end_lr) * (1 - step / total) ** self.power)


class PolynomialLR(PolynomialWarmupLR):
    """end_lr + (base - end_lr) (1 - t / T)^power."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        total_steps: int,
        end_lr: float = 0.0001,
        power: float = 1.0,
        last_epoch: int = -1,
    ) -> None:
        super().__init__(optimizer, total_steps, 0, end_lr, power, last_epoch)


class OneCycleLR(lr_scheduler.OneCycleLR):
    """torch's, whose highest rates are those of the groups."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        total_steps: int,
        pct_start: float = 0.3,
        anneal_strategy: str = "cos",
        cycle_momentum: bool = True,
        base_momentum: float = 0.85,
        max_momentum: float = 0.95,
        div_factor: float = 25.0,
        final_div_factor: float = 10000.0,
        last_epoch: int = -1,
    ) -> None:
        highest = [group["lr"] for group in optimizer.param_groups]
        super().__init__(
            optimizer, highest, total_steps=total_steps, pct_start=pct_start,
            anneal_strategy=anneal_strategy,  # type: ignore[arg-type]
            cycle_momentum=cycle_momentum, base_momentum=base_momentum, max_momentum=max_momentum,
            div_factor=div_factor, final_div_factor=final_div_factor, last_epoch=last_epoch,
        )  # fmt: skip


class LambdaLR(lr_scheduler.LambdaLR):
    """base lr_lambda(t), as torch's."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        total_steps: int,
        lr_lambda: Callable[[int], float] | None = None,
        last_epoch: int = -1,
    ) -> None:
        if lr_lambda is None:
            raise ValueError("lr_lambda is None; expected a function of the step")
        super().__init__(optimizer, lr_lambda, last_epoch)


class StepLR(lr_scheduler.StepLR):
    """base gamma^(t // step_size), as torch's."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        total_steps: int,
        step_size: int = 1,
        gamma: float = 0.1,
        last_epoch: int = -1,
    ) -> None:
        super().__init__(optimizer, step_size, gamma, last_epoch)


class ExponentialLR(lr_scheduler.ExponentialLR):
    """base gamma^t, as torch's."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        total_steps: int,
        gamma: float = 1.0,
        last_epoch: int = -1,
    ) -> None:
        super().__init__(optimizer, gamma, last_epoch)


def _cosine(step: int, total: int, base: float, least: float) -> float:
    return least + (base - least) * (1 + math.cos(math.pi * step / total)) / 2
