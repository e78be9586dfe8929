"""What an update rule is to the rest: its planes, its hyperparameters, one CPU formula.

A rule has no state and is made without arguments. Adding an optimizer is one rule, one formula in
`formulas.py`, one kernel, and a class of a few lines (docs/extending.md).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from .state_layout import StateLayout


class UpdateRule(Protocol):
    """How one optimizer updates a run of elements."""

    name: str
    layout: StateLayout  # without master and undo planes
    num_coefficients: int  # how many `coefficients` gives

    def hyper(self, group: Mapping[str, Any]) -> Any:
        """The group's hyperparameters as a frozen, hashable value.

        Raises ValueError naming the first one that is out of range.
        """
        ...

    def coefficients(self, hyper: Any, step: int) -> Sequence[float]:
        """What `formula` takes, in fp64; `step` counts from 1."""
        ...

    def formula(self, param: Tensor, grad: Tensor, *rest: Tensor) -> Sequence[Tensor]:
        """The rule's function of `formulas.py`.

        (param, grad, *planes, coefficients), all fp32, to the new (param, *planes).
        """
        ...

    def hyper_row(self, hyper: Any) -> tuple[float, ...]:
        """The same as a row of the kernels' hyperparameter table; see the rule's kernel file."""
        ...

    def update(
        self, param: Tensor, grad: Tensor, planes: Sequence[Tensor], hyper: Any, step: int
    ) -> None:
        """Update fp32 [n] `param` and `planes` in place; fp32 [n] `grad` is only read.

        `step` counts from 1. Must treat every element alike, so that cutting a run at multiples
        of 16 elements changes no bit.
        """
        ...


def number(
    group: Mapping[str, Any], name: str, low: float, high: float = math.inf, *, open_high: bool
) -> float:
    """`group[name]` as a float in [low, high] or [low, high). Raises ValueError."""
    value = _scalar(name, group[name])
    inside = low <= value and (value < high if open_high else value <= high)
    if math.isnan(value) or math.isinf(value) or not inside:
        bracket = ")" if open_high else "]"
        raise ValueError(f"{name}={group[name]!r} is outside [{low:g}, {high:g}{bracket}")
    return value


def betas(group: Mapping[str, Any]) -> tuple[float, float]:
    """Two decay rates in [0, 1), as in torch both numbers or both tensors. Raises ValueError."""
    pair = group["betas"]
    if len(pair) != 2 or len({isinstance(beta, Tensor) for beta in pair}) != 1:
        raise ValueError(f"betas={pair!r}; expected two numbers in [0, 1), or two tensors")
    first, second = (_scalar(f"betas[{i}]", beta) for i, beta in enumerate(pair))
    for i, beta in enumerate((first, second)):
        if not 0 <= beta < 1:
            raise ValueError(f"betas[{i}]={pair[i]!r} is outside [0, 1)")
    return first, second


def _scalar(name: str, value: Any) -> float:
    if isinstance(value, Tensor) and value.numel() != 1:
        raise ValueError(f"{name} is a tensor of shape {tuple(value.shape)}; expected one element")
    return float(value)
