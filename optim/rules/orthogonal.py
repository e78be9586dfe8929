"""Matrices made orthogonal by Newton-Schulz iterations, and the rates of such updates. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # the largest slope at zero (Jordan et al. 2024)
RATES = (None, "original", "match_rms_adamw")
FORMS = ("standard", "gram")
Gram: TypeAlias = Callable[[Tensor], Tensor]  # X X^T in fp32 [r, r], of bf16 [r, c]
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def orthogonal(
    matrix: Tensor,
    coefficients: tuple[float, ...],
    steps: int,
    eps: float,
    *,
    form: str = "standard",
    dtype: torch.dtype = torch.bfloat16,
    gram: Gram | None = None,
) -> Tensor:
    """[r, c]: near U V^T of the matrix's U S V^T, by Newton-Schulz iterations in `dtype`.

        X <- a X + (b A + c A A) X        with A = X X^T, r <= c, and |X| <= 1 at first

    The bits of torch.optim.Muon in bf16. form: `"gram"` iterates on A and on the product of all
    factors, which are of [r, r], and multiplies X with it once: fewer operations where c is above
    r, and other bits. gram: computes its A, in place of torch's product.
    """
    x = matrix.to(dtype, copy=True)
    is_tall = x.size(0) > x.size(1)
    if is_tall:
        x = x.T
    x.div_(x.norm().clamp(min=eps))
    iterate = _iterated if form == "standard" else partial(_iterated_gram, by=gram)
    x = iterate(x, coefficients, steps)
    return x.T if is_tall else x


def _iterated(x: Tensor, coefficients: tuple[float, ...], steps: int) -> Tensor:
    a, b, c = coefficients
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


def _iterated_gram(
    x: Tensor, coefficients: tuple[float, ...], steps: int, by: Gram | None
) -> Tensor:
    """Product of all factors, which are polynomials of one symmetric matrix, and commute. In fp32:
    squares of bf16 values cancel in A, which nothing corrects afterwards."""
    a, b, c = coefficients
    wide = x.float()
    gram = wide @ wide.T if by is None or x.dtype is not torch.bfloat16 else by(x)
    product = None
    for i in range(steps):
        factor = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        factor.diagonal().add_(a)
        product = factor if product is None else factor @ product
        if i < steps - 1:
            gram = factor @ gram @ factor
    return x if product is None else (product @ wide).to(x.dtype)


def adjusted_rate(lr: float, adjust_lr_fn: str | None, rows: int, columns: int) -> float:
    """Rate as torch.optim.Muon has it: `"original"` (also None) times sqrt(max(1, rows / columns)),
    `"match_rms_adamw"` times 0.2 * sqrt(max(rows, columns)) (Liu et al. 2025)."""
    if adjust_lr_fn == "match_rms_adamw":
        return lr * (0.2 * math.sqrt(max(rows, columns)))
    return lr * math.sqrt(max(1, rows / columns))
