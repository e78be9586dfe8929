"""SGD with momentum as an update rule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

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

    def hyper(self, group: Mapping[str, Any]) -> SGDHyper:
        return SGDHyper(
            lr=number(group, "lr", 0.0, open_high=True),
            momentum=number(group, "momentum", 0.0, 1.0, open_high=True),
            weight_decay=number(group, "weight_decay", 0.0, open_high=True),
        )

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
