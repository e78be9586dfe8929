"""The table of elementwise optimizers: each with options that change its formula, and torch's.

Lion, which torch has not, is as its paper has it.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from optim import (
    HybridAdadelta,
    HybridAdagrad,
    HybridAdam,
    HybridAdamax,
    HybridLamb,
    HybridLion,
    HybridNAdam,
    HybridRAdam,
    HybridRMSprop,
    HybridScheduleFreeAdamW,
    HybridSGD,
)
from optim.rules.rule import UpdateRule


class Lion(torch.optim.Optimizer):
    """Lion (Chen et al. 2023, algorithm 2), with the options that others add."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.99), weight_decay=0.0, **more):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay, **more})

    def step(self):
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                average = state.setdefault("exp_avg", torch.zeros_like(p))
                first, second = group["betas"]
                p.data.mul_(1 - group["lr"] * group["weight_decay"])
                p.data.add_(average.lerp(p.grad, 1 - first).sign(), alpha=-group["lr"])
                average.lerp_(p.grad, 1 - second)


class Case(NamedTuple):
    """theirs: torch's class of the same formula, or one of above; None: nobody has one. its:
    options of that."""

    ours: Any
    theirs: Any
    options: dict[str, Any]
    its: Mapping[str, Any] = MappingProxyType({})

    def rule(self) -> UpdateRule:
        """That these options need."""
        made = self.ours([torch.nn.Parameter(torch.zeros(1))], **self.options)
        return made.rule_for(made.param_groups)

    def group(self) -> dict[str, Any]:
        """A param group of it, without parameters."""
        made = self.ours([torch.nn.Parameter(torch.zeros(1))], **self.options)
        return {name: value for name, value in made.param_groups[0].items() if name != "params"}

    def make(self, params: Any, **places: Any) -> Any:
        """Ours."""
        return self.ours(params, **self.options, **places)

    def of_torch(self, params: Any) -> Any:
        """torch's, without vectors of tensors."""
        own = {name: value for name, value in self.options.items() if name != "adamw_mode"}
        return self.theirs(params, foreach=False, **own, **self.its)


_L2 = {"weight_decay": 0.1}
_RATE = {"lr": 1e-2}
_AVERAGES = {"lr": 1e-2, "betas": (0.9, 0.95)}
CASES = {
    "adamw": Case(HybridAdam, torch.optim.AdamW, {**_AVERAGES, **_L2}),
    "adam": Case(
        HybridAdam, torch.optim.Adam, {**_AVERAGES, **_L2, "adamw_mode": False, "maximize": True}
    ),
    "amsgrad": Case(
        HybridAdam, torch.optim.AdamW, {**_AVERAGES, "weight_decay": 0.0, "amsgrad": True}
    ),
    "adamw, bf16 state": Case(HybridAdam, None, {**_AVERAGES, **_L2, "state": "bf16"}),
    "adamw, 8-bit state": Case(HybridAdam, None, {**_AVERAGES, **_L2, "state": "8bit"}),
    "sgd": Case(HybridSGD, torch.optim.SGD, {**_RATE, **_L2, "maximize": True}),
    "sgd, dampened": Case(HybridSGD, torch.optim.SGD, {**_RATE, "momentum": 0.9, "dampening": 0.5}),
    "sgd, nesterov": Case(
        HybridSGD, torch.optim.SGD, {**_RATE, **_L2, "momentum": 0.9, "nesterov": True}
    ),
    "lion": Case(HybridLion, Lion, {"lr": 1e-3, **_L2}),
    "lamb": Case(HybridLamb, None, {**_AVERAGES, **_L2}),
    "lamb, corrected": Case(
        HybridLamb, None, {**_AVERAGES, "weight_decay": 1.0, "bias_correction": True}
    ),
    "adagrad": Case(HybridAdagrad, torch.optim.Adagrad, {"lr": 3e-2}),
    "adagrad, begun": Case(
        HybridAdagrad,
        torch.optim.Adagrad,
        {"lr": 2e-2, **_L2, "lr_decay": 0.1, "initial_accumulator_value": 0.1, "maximize": True},
    ),
    "rmsprop": Case(HybridRMSprop, torch.optim.RMSprop, {"lr": 2e-2, **_L2}),
    "rmsprop, momentum": Case(
        HybridRMSprop, torch.optim.RMSprop, {"lr": 2e-2, "momentum": 0.9, "maximize": True}
    ),
    "rmsprop, centered": Case(
        HybridRMSprop, torch.optim.RMSprop, {"lr": 2e-2, **_L2, "momentum": 0.5, "centered": True}
    ),
    "adamax": Case(HybridAdamax, torch.optim.Adamax, {**_AVERAGES, **_L2, "maximize": True}),
    "nadam": Case(HybridNAdam, torch.optim.NAdam, {**_AVERAGES, **_L2, "momentum_decay": 0.1}),
    "nadam, decoupled": Case(
        HybridNAdam,
        torch.optim.NAdam,
        {**_AVERAGES, **_L2, "decoupled_weight_decay": True, "maximize": True},
    ),
    "radam": Case(HybridRAdam, torch.optim.RAdam, {**_RATE, **_L2}),  # rectified from step 6
    "radam, decoupled": Case(
        HybridRAdam,
        torch.optim.RAdam,
        {**_RATE, **_L2, "decoupled_weight_decay": True, "maximize": True},
    ),
    "adadelta": Case(HybridAdadelta, torch.optim.Adadelta, {"lr": 2.0, **_L2, "maximize": True}),
    "schedule-free": Case(
        HybridScheduleFreeAdamW, None, {**_RATE, **_L2, "warmup_steps": 3, "r": 0.5}
    ),
}
LIKE_TORCH = {name: case for name, case in CASES.items() if case.theirs is not None}
