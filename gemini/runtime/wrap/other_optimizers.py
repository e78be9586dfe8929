"""Optimizers that cannot update shards, refused at their first step over a wrapped parameter."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from gemini.optim.base import TieredOptimizer
from gemini.optim.target import owner_of


@functools.cache
def refuse_other_optimizers() -> None:
    """Refuse such optimizers from now on, in this process."""
    register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    if isinstance(optimizer, TieredOptimizer):
        return
    params = (param for group in optimizer.param_groups for param in group["params"])
    if any(owner_of(param) is not None for param in params):
        raise RuntimeError(
            f"{type(optimizer).__name__} would keep its state whole on every rank and update "
            "16-bit weights without fp32 masters; make an optimizer of this project over "
            "model.parameters(): HybridAdam, HybridSGD or another of gemini.optim, with the same "
            "options"
        )
