"""SGD with momentum: the update rule, and HybridSGD."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .base import Folders, TieredOptimizer
from .config import NvmeConfig
from .formulas import sgd
from .rules import number
from .state_layout import Plane, StateLayout


@dataclass(frozen=True, slots=True)
class SGDHyper:
    """Checked hyperparameters of one group."""

    lr: float
    momentum: float
    weight_decay: float


class SGDRule:
    """b <- momentum * b + g;  p <- p - lr * b, with g <- g + weight_decay * p.

    Polyak's momentum in the form of torch.optim.SGD (no dampening, no Nesterov). The momentum
    buffer starts at zero, which makes the first step that of torch, whose buffer starts as g.
    """

    name = "sgd"
    layout = StateLayout((Plane("momentum_buffer", "float32"),))
    num_coefficients = 3

    def hyper(self, group: Mapping[str, Any]) -> SGDHyper:
        return SGDHyper(
            lr=number(group, "lr", 0.0, open_high=True),
            momentum=number(group, "momentum", 0.0, 1.0, open_high=True),
            weight_decay=number(group, "weight_decay", 0.0, open_high=True),
        )

    def coefficients(self, hyper: SGDHyper, step: int) -> Sequence[float]:
        return (hyper.lr, hyper.momentum, hyper.weight_decay)

    def formula(self, param: Tensor, grad: Tensor, *rest: Tensor) -> Sequence[Tensor]:
        return sgd(param, grad, *rest)

    def hyper_row(self, hyper: SGDHyper) -> tuple[float, ...]:
        return (hyper.lr, hyper.momentum, hyper.weight_decay)

    def update(
        self, param: Tensor, grad: Tensor, planes: Sequence[Tensor], hyper: SGDHyper, step: int
    ) -> None:
        (buffer,) = planes
        if hyper.weight_decay:
            grad = grad.add(param, alpha=hyper.weight_decay)
        if hyper.momentum:
            grad = buffer.mul_(hyper.momentum).add_(grad)
        param.add_(grad, alpha=-hyper.lr)


class HybridSGD(TieredOptimizer):
    """SGD with momentum, with fp32 state on device, host or NVMe; see `HybridAdam`.

    Formula: `optim.formulas.sgd`, the same bits as torch.optim.SGD on CPU parameters. Raises as
    `HybridAdam`.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        momentum: float = 0.0,
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
            {"lr": lr, "momentum": momentum, "weight_decay": weight_decay},
            SGDRule(),
            nvme_offload_fraction=nvme_offload_fraction,
            nvme_offload_dir=nvme_offload_dir,
            nvme_write_budget=nvme_write_budget,
            nvme=nvme,
            cpu_path=cpu_path,
        )
