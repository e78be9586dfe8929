"""SGD with momentum: the update rule, and HybridSGD."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from gemini.optim.rules.config import NvmeConfig
from gemini.optim.rules.formulas import SGDCoefficients, sgd, sgd_coefficients
from gemini.optim.rules.rule import number
from gemini.optim.rules.state_layout import Plane, StateLayout

from .base import Folders, TieredOptimizer


@dataclass(frozen=True, slots=True)
class SGDHyper:
    """Checked hyperparameters of one group."""

    lr: float
    momentum: float
    weight_decay: float
    dampening: float
    nesterov: bool
    maximize: bool


class SGDRule:
    """A momentum buffer in fp32; the formula is `formulas.sgd`."""

    name = "sgd"
    layout = StateLayout((Plane("momentum_buffer", "float32"),))
    num_coefficients = len(SGDCoefficients._fields)

    def hyper(self, group: Mapping[str, Any]) -> SGDHyper:
        hyper = SGDHyper(
            lr=number(group, "lr", 0.0, open_high=True),
            momentum=number(group, "momentum", 0.0, 1.0, open_high=True),
            weight_decay=number(group, "weight_decay", 0.0, open_high=True),
            dampening=number(group, "dampening", -math.inf, open_high=True),
            nesterov=bool(group["nesterov"]),
            maximize=bool(group["maximize"]),
        )
        if hyper.dampening and not hyper.momentum:
            raise ValueError(
                f"dampening={hyper.dampening:g} without momentum does nothing; leave it away"
            )
        if hyper.nesterov and (hyper.momentum == 0 or hyper.dampening != 0):
            raise ValueError(
                f"nesterov=True with momentum={hyper.momentum:g} and "
                f"dampening={hyper.dampening:g}; expected a momentum, and no dampening"
            )
        return hyper

    def coefficients(self, hyper: SGDHyper, step: int) -> SGDCoefficients:
        return sgd_coefficients(
            hyper.lr, hyper.momentum, hyper.weight_decay, hyper.dampening, hyper.nesterov,
            hyper.maximize, step,
        )  # fmt: skip

    def formula(self, param: Tensor, grad: Tensor, *rest: Tensor) -> Sequence[Tensor]:
        return sgd(param, grad, *rest)

    def hyper_row(self, hyper: SGDHyper) -> tuple[float, ...]:
        return (
            hyper.lr, hyper.momentum, hyper.weight_decay, hyper.dampening,
            float(hyper.nesterov), float(hyper.maximize),
        )  # fmt: skip

    def update(
        self, param: Tensor, grad: Tensor, planes: Sequence[Tensor], hyper: SGDHyper, step: int
    ) -> None:
        (buffer,) = planes
        if hyper.maximize:
            grad = grad.neg()
        if hyper.weight_decay:
            grad = grad.add(param, alpha=hyper.weight_decay)
        if hyper.momentum:
            intake = 1.0 if step == 1 else 1.0 - hyper.dampening
            buffer.mul_(hyper.momentum).add_(grad, alpha=intake)
            grad = grad.add(buffer, alpha=hyper.momentum) if hyper.nesterov else buffer
        param.add_(grad, alpha=-hyper.lr)


class HybridSGD(TieredOptimizer):
    """SGD with momentum, with fp32 state on device, host or NVMe; see `HybridAdam`.

    dampening, nesterov, maximize: as in torch.optim.SGD; dampening without momentum is refused.

    Formula: `optim.rules.formulas.sgd`, the same bits as torch.optim.SGD on CPU parameters. Raises
    as `HybridAdam`.
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
        dampening: float = 0.0,
        nesterov: bool = False,
        maximize: bool = False,
    ) -> None:
        super().__init__(
            params,
            {
                "lr": lr,
                "momentum": momentum,
                "weight_decay": weight_decay,
                "dampening": dampening,
                "nesterov": nesterov,
                "maximize": maximize,
            },
            SGDRule(),
            nvme_offload_fraction=nvme_offload_fraction,
            nvme_offload_dir=nvme_offload_dir,
            nvme_write_budget=nvme_write_budget,
            nvme=nvme,
            cpu_path=cpu_path,
        )

    def state_dict(self) -> dict[str, Any]:
        """See `TieredOptimizer.state_dict`.

        A buffer with dampening that did not begin yet is None, as torch has it: to torch, one of
        zeros has begun.
        """
        found = super().state_dict()
        for group in found["param_groups"]:
            for key in group["params"] if group["dampening"] else ():
                planes = found["state"].get(key, {})
                if "momentum_buffer" in planes and planes["step"] == 0:
                    planes["momentum_buffer"] = None
        return found
