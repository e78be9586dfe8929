"""SGD with momentum: the update rule, and HybridSGD."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor

from gemini.optim.rules import formulas
from gemini.optim.rules.rule import UpdateRule
from gemini.optim.rules.state_layout import Plane, StateLayout

from .elementwise import ElementwiseOptimizer


class SGDRule(UpdateRule):
    """SGD: a momentum buffer in fp32; the formula is `formulas.sgd`."""

    name = "sgd"
    layout = StateLayout((Plane("momentum_buffer", "float32"),))
    options: ClassVar = {
        "lr": 1e-3, "momentum": 0.0, "weight_decay": 0.0, "dampening": 0.0, "nesterov": False,
        "maximize": False,
    }  # fmt: skip
    ranges: ClassVar = {"momentum": (0.0, 1.0), "dampening": (-math.inf, math.inf)}
    coefficients = staticmethod(formulas.sgd_coefficients)
    formula = staticmethod(formulas.sgd)

    def hyper(self, group: Mapping[str, Any]) -> Any:
        hyper = super().hyper(group)
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

    def update(
        self, param: Tensor, grad: Tensor, planes: Sequence[Tensor], hyper: Any, step: int
    ) -> None:
        """Update by the operators and with the bits of torch.optim.SGD: multiply-adds contract."""
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


class HybridSGD(ElementwiseOptimizer):
    """SGD with momentum, with fp32 state on device, host or NVMe; see `HybridAdam`.

    dampening, nesterov, maximize: as in torch.optim.SGD; dampening without momentum is refused.

    Formula: `optim.rules.formulas.sgd`, the same bits as torch.optim.SGD on CPU parameters. Raises
    as `HybridAdam`.
    """

    rule = SGDRule

    def state_dict(self) -> dict[str, Any]:
        """State dict; see `TieredOptimizer.state_dict`.

        A buffer with dampening that has not begun yet is None, as in torch, which takes a buffer of
        zeros for one that has begun.
        """
        found = super().state_dict()
        for group in found["param_groups"]:
            for key in group["params"] if group["dampening"] else ():
                planes = found["state"].get(key, {})
                if "momentum_buffer" in planes and planes["step"] == 0:
                    planes["momentum_buffer"] = None
        return found
