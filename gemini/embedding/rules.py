"""Updates of touched rows: row-wise Adagrad, lazy Adam, SGD.

A record is one row with its state beside it: fp32 [dim + state_numel(dim)]. A rule changes records
that have a gradient and no others; each is an elementwise function of one record, so that any
number of records at once gives the same bits. Products and sums are separate operators, and sums
over a row are added in a fixed tree: neither depends on how an operator is vectorised.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from torch import Tensor


class RowRule(Protocol):
    """Rule by which touched rows are updated. Frozen: `replace` gives one with another `lr`."""

    @property
    def lr(self) -> float:
        """Learning rate."""
        ...

    def state_numel(self, dim: int) -> int:
        """Elements of state beside a row of `dim`; they start at zero."""
        ...

    def update(self, records: Tensor, grads: Tensor, step: int) -> None:
        """Update `records` [n, dim + state] in place with `grads` [n, dim], both fp32.

        step: of this update, 1 for the first of the table.
        """
        ...


def settings_of(rule: RowRule) -> dict[str, Any]:
    """Name and settings of a rule, as a checkpoint has them."""
    settings: Any = rule
    return {"name": type(rule).__name__, **asdict(settings)}


@dataclass(frozen=True, slots=True)
class RowSGD:
    """w -= lr * g. The same as SGD without momentum on a whole table."""

    lr: float = 1e-2

    def __post_init__(self) -> None:
        _check(lr=self.lr)

    def state_numel(self, dim: int) -> int:
        return 0

    def update(self, records: Tensor, grads: Tensor, step: int) -> None:
        records.sub_(grads * self.lr)


@dataclass(frozen=True, slots=True)
class RowAdagrad:
    """Row-wise Adagrad: s += mean(g * g) of the row; w -= lr * g / (sqrt(s) + eps).

    One number of state for a row, as in FBGEMM's `EXACT_ROWWISE_ADAGRAD`.
    """

    lr: float = 1e-2
    eps: float = 1e-8

    def __post_init__(self) -> None:
        _check(lr=self.lr, eps=self.eps)

    def state_numel(self, dim: int) -> int:
        return 1

    def update(self, records: Tensor, grads: Tensor, step: int) -> None:
        dim = grads.shape[1]
        weight, total = records[:, :dim], records[:, dim:]
        total.add_(row_sum(grads * grads) * (1 / dim))
        weight.sub_(grads * self.lr / (total.sqrt() + self.eps))


@dataclass(frozen=True, slots=True)
class LazyAdam:
    """Adam whose moments stand still while a row has no gradient: torch's `SparseAdam`.

    Bias corrections count the steps of the table, not those of the row.
    """

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    def __post_init__(self) -> None:
        _check(lr=self.lr, eps=self.eps)
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas={self.betas}; expected two numbers from 0 to below 1")

    def state_numel(self, dim: int) -> int:
        return 2 * dim

    def update(self, records: Tensor, grads: Tensor, step: int) -> None:
        dim, (beta1, beta2) = grads.shape[1], self.betas
        weight, mean, square = records[:, :dim], records[:, dim : 2 * dim], records[:, 2 * dim :]
        mean.mul_(beta1).add_(grads * (1 - beta1))
        square.mul_(beta2).add_(grads * grads * (1 - beta2))
        rate = self.lr * math.sqrt(1 - beta2**step) / (1 - beta1**step)
        weight.sub_(mean * rate / (square.sqrt() + self.eps))


def row_sum(values: Tensor) -> Tensor:
    """Sum of every row of [n, dim] as [n, 1], halves added to halves: the same bits for any n."""
    while values.shape[1] > 1:
        half = values.shape[1] // 2
        rest = values[:, 2 * half :]
        values = values[:, :half] + values[:, half : 2 * half]
        if rest.shape[1]:
            values[:, :1] += rest
    return values


def _check(**settings: float) -> None:
    for name, value in settings.items():
        if not 0 <= value < math.inf:
            raise ValueError(f"{name}={value}; expected a number from 0 up")
