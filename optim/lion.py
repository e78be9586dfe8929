"""Lion: the update rule, and HybridLion."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from gemini.optim.rules.config import NvmeConfig
from gemini.optim.rules.formulas import lion
from gemini.optim.rules.rule import betas, number
from gemini.optim.rules.state_layout import Plane, StateLayout

from .base import Folders, TieredOptimizer


@dataclass(frozen=True, slots=True)
class LionHyper:
    """Checked hyperparameters of one group."""

    lr: float
    betas: tuple[float, float]
    weight_decay: float


class LionRule:
    """One moment in fp32; the formula is `formulas.lion`."""

    name = "lion"
    layout = StateLayout((Plane("exp_avg", "float32"),))
    num_coefficients = 4

    def hyper(self, group: Mapping[str, Any]) -> LionHyper:
        return LionHyper(
            lr=number(group, "lr", 0.0, open_high=True),
            betas=betas(group),
            weight_decay=number(group, "weight_decay", 0.0, open_high=True),
        )

    def coefficients(self, hyper: LionHyper, step: int) -> Sequence[float]:
        return (
            1 - hyper.betas[0], 1 - hyper.betas[1], hyper.lr, 1 - hyper.lr * hyper.weight_decay
        )  # fmt: skip

    def formula(self, param: Tensor, grad: Tensor, *rest: Tensor) -> Sequence[Tensor]:
        return lion(param, grad, *rest)

    def hyper_row(self, hyper: LionHyper) -> tuple[float, ...]:
        return (hyper.lr, *hyper.betas, hyper.weight_decay)

    def update(
        self, param: Tensor, grad: Tensor, planes: Sequence[Tensor], hyper: LionHyper, step: int
    ) -> None:
        (exp_avg,) = planes
        if hyper.weight_decay:
            param.mul_(1 - hyper.lr * hyper.weight_decay)
        update = exp_avg.lerp(grad, 1 - hyper.betas[0]).sign_()
        param.add_(update, alpha=-hyper.lr)
        exp_avg.lerp_(grad, 1 - hyper.betas[1])


class HybridLion(TieredOptimizer):
    """Lion (Chen et al. 2023) with fp32 state on device, host or NVMe; see `HybridAdam`.

    Raises as `HybridAdam`. Formula: `optim.rules.formulas.lion`.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        nvme_offload_fraction: float = 0.0,
        nvme_offload_dir: Folders = None,
        *,
        nvme_write_budget: int | str | None = None,
        nvme: NvmeConfig | None = None,
        cpu_path: str = "auto",
    ) -> None:
        super().__init__(
            params,
            {"lr": lr, "betas": betas, "weight_decay": weight_decay},
            LionRule(),
            nvme_offload_fraction=nvme_offload_fraction,
            nvme_offload_dir=nvme_offload_dir,
            nvme_write_budget=nvme_write_budget,
            nvme=nvme,
            cpu_path=cpu_path,
        )
