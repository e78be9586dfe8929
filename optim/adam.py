"""Adam (L2) and AdamW as an update rule."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .formulas import AdamCoefficients, adam_coefficients
from .rules import betas, number
from .state_layout import Plane, StateLayout


@dataclass(frozen=True, slots=True)
class AdamHyper:
    """Checked hyperparameters of one group."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    adamw_mode: bool
    bias_correction: bool

    def coefficients(self, step: int) -> AdamCoefficients:
        return adam_coefficients(
            self.lr, self.betas, self.eps, self.weight_decay,
            self.adamw_mode, self.bias_correction, step,
        )  # fmt: skip


class AdamRule:
    """m and v in fp32; the formula is `formulas.adam`."""

    name = "adam"
    layout = StateLayout((Plane("exp_avg", "float32"), Plane("exp_avg_sq", "float32")))

    def hyper(self, group: Mapping[str, Any]) -> AdamHyper:
        return AdamHyper(
            lr=number(group, "lr", 0.0, open_high=True),
            betas=betas(group),
            eps=number(group, "eps", 0.0, open_high=True),
            weight_decay=number(group, "weight_decay", 0.0, open_high=True),
            adamw_mode=bool(group["adamw_mode"]),
            bias_correction=bool(group["bias_correction"]),
        )

    def hyper_row(self, hyper: AdamHyper) -> tuple[float, ...]:
        return (
            hyper.lr, *hyper.betas, hyper.eps, hyper.weight_decay,
            float(hyper.adamw_mode), float(hyper.bias_correction),
        )  # fmt: skip

    def update(
        self, param: Tensor, grad: Tensor, planes: Sequence[Tensor], hyper: AdamHyper, step: int
    ) -> None:
        """torch's own fused CPU step, which is vectorised and needs no compiler.

        Its result differs from `formulas.adam` by a few ulp (docs/numerics.md): it contracts
        multiply-adds, and its square root is not correctly rounded.
        """
        exp_avg, exp_avg_sq = planes
        fused = torch._fused_adamw_ if hyper.adamw_mode else torch._fused_adam_
        # beta^inf = 0: the bias corrections become 1 exactly
        count = float(step) if hyper.bias_correction else float("inf")
        fused(
            [param], [grad], [exp_avg], [exp_avg_sq], [], [_step_tensor(count)],
            lr=hyper.lr, beta1=hyper.betas[0], beta2=hyper.betas[1], eps=hyper.eps,
            weight_decay=hyper.weight_decay, amsgrad=False, maximize=False,
        )  # fmt: skip


@functools.lru_cache(maxsize=64)
def _step_tensor(step: float) -> Tensor:
    """fp32 0-d, which the fused step reads and does not write."""
    return torch.tensor(step, dtype=torch.float32)
