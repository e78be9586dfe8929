"""Scalars of coefficients: functions of numbers, or of fp64 tensors [] in a trace.

A rule's coefficients are a function of named hyperparameters and the step count. It is called with
Python's floats where the host needs them, and traced once with tensors where a kernel does
(`optim.update.triton_source`); both see the same operators, in fp64.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

TERMS = 28  # of a series in powers of 1/2: the rest is below 2**-33, and fp32 has 2**-24
SMALLEST_LOG = -700.0  # of what fp64 has


def where(condition: Any, chosen: Any, other: Any) -> Any:
    """`chosen` where the condition is true, or not 0; both are computed."""
    if not isinstance(condition, Tensor):
        return chosen if condition else other
    if condition.dtype != torch.bool:
        condition = condition != 0
    return torch.where(condition, _as_tensor(chosen), _as_tensor(other))


def _as_tensor(value: Any) -> Tensor:
    return value if isinstance(value, Tensor) else torch.full((), value, dtype=torch.float64)


def sqrt(x: Any) -> Any:
    """Square root of a number that is not negative."""
    return x.sqrt() if isinstance(x, Tensor) else math.sqrt(x)


def exp(x: Any) -> Any:
    """e**x."""
    return x.exp() if isinstance(x, Tensor) else math.exp(x)


def log(x: Any) -> Any:
    """Natural logarithm of a positive number."""
    return x.log() if isinstance(x, Tensor) else math.log(x)


def power(base: Any, exponent: Any) -> Any:
    """base ** exponent of positive numbers; for whole step counts `**` has fewer roundings."""
    return exp(exponent * log(base))


def at_least(x: Any, low: float) -> Any:
    """The larger of two numbers."""
    return where(x > low, x, low)


def at_most(x: Any, high: Any) -> Any:
    """The smaller of two numbers."""
    return where(x < high, x, high)


def expm1(x: Any) -> Any:
    """e**x - 1 for x <= 0, to a few ulp (Kahan): what e**x loses near 1, its logarithm has lost."""
    x = at_least(x, SMALLEST_LOG)
    grown = exp(x)
    same = grown == 1.0
    return where(same, x, (grown - 1.0) * x / where(same, 1.0, log(grown)))


def falling_product(ratio_log: Any, count: Any) -> Any:
    """prod (1 - q**i / 2) for i = 1 ... count, with q = e**ratio_log <= 1.

    As -log of it, the sum over k of 2**-k / k * (q**k + q**2k + ... + q**(count * k)): each
    geometric sum is q**k (1 - q**(count * k)) / (1 - q**k), without a difference of near numbers.
    """
    is_flat = ratio_log == 0.0
    ratio, ratios = exp(ratio_log), exp(at_least(ratio_log * count, SMALLEST_LOG))
    first = where(is_flat, 1.0, -expm1(ratio_log))
    firsts = where(is_flat, count * 1.0, -expm1(ratio_log * count))
    total, here, there, below, above = 0.0, ratio, ratios, first, firsts
    for k in range(1, TERMS + 1):
        total = total + (0.5**k / k) * here * above / below
        below, above = below + here * first, above + there * firsts
        here, there = here * ratio, there * ratios
    return exp(at_least(-total, SMALLEST_LOG))


def power_sum(exponent: Any, count: Any) -> Any:
    """1**s + 2**s + ... + count**s for s >= 0: eight terms, then Euler and Maclaurin's formula."""
    direct = 8
    total = 0.0
    for i in range(1, direct + 1):
        total = total + where(count < i, 0.0, exp(exponent * math.log(i)))
    beyond = _tail(exponent, at_least(count * 1.0, 1.0)) - _tail(exponent, float(direct))
    return total + where(count > direct, beyond, 0.0)


def _tail(s: Any, x: Any) -> Any:
    """An antiderivative of the sum of i**s, up to a constant; its next term is 1e-12 of it."""
    falling3, grown = s * (s - 1.0) * (s - 2.0), exp(s * log(x))
    falling5, squared = falling3 * (s - 3.0) * (s - 4.0), x * x
    inner = s / 12.0 - falling3 / (720.0 * squared) + falling5 / (30240.0 * squared * squared)
    return grown * (x / (s + 1.0) + 0.5 + inner / x)
