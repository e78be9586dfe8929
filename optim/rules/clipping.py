"""Limits on gradients of a step, as a value. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Clip:
    """Limit on gradients, after they are unscaled.

    max_norm: over all parameters and ranks; 0 does not clip.
    max_value: of every element's magnitude; inf does not clip.
    fixed_factor: gradients are multiplied with it, whatever their norm; in (0, 1].

    Raises ValueError for an impossible limit, and for a norm of no positive order.
    """

    max_norm: float = 0.0
    norm_type: float = 2.0
    max_value: float = math.inf
    fixed_factor: float | None = None

    def __post_init__(self) -> None:
        if not self.max_norm >= 0:
            raise ValueError(f"max_norm={self.max_norm} is negative; 0 does not clip")
        if not self.max_value > 0:
            raise ValueError(f"clip_value={self.max_value}; expected a positive number")
        if not self.norm_type > 0:
            raise ValueError(f"norm_type={self.norm_type}; expected a positive number or inf")

    def factor(self, norm: float) -> float:
        """Factor of gradients of this norm.

        As torch.nn.utils.clip_grad_norm_: max_norm / (norm + 1e-6), at most 1.
        """
        if self.fixed_factor is not None:
            return self.fixed_factor
        if self.max_norm == 0:
            return 1.0
        return min(1.0, self.max_norm / (norm + 1e-6))

    def factor_of(self, norm: Tensor) -> Tensor:
        """`factor` of a 0-d tensor, wherever it is, for a `max_norm` above 0."""
        return (self.max_norm / (norm + 1e-6)).clamp(max=1.0)

    def with_max_norm(self, norm: float) -> Clip:
        """Limit with the same effect on gradients of this norm, as a `max_norm`."""
        if self.fixed_factor is None:
            return self
        max_norm = self.fixed_factor * (norm + 1e-6)
        return replace(self, max_norm=max_norm, fixed_factor=None)

    def norm(self, power_sum: float) -> float:
        """Norm from the sum of |g|^p, or from the largest |g|."""
        if self.norm_type == 2:
            return math.sqrt(power_sum)
        return power_sum if math.isinf(self.norm_type) else power_sum ** (1 / self.norm_type)

    def norm_of(self, power_sum: Tensor) -> Tensor:
        """`norm` of a 0-d tensor, wherever it is."""
        if self.norm_type == 2:
            return power_sum.sqrt()
        return power_sum if math.isinf(self.norm_type) else power_sum ** (1 / self.norm_type)


def combined(power_sums: list[float], norm_type: float) -> float:
    """Total of all parts: their sum, correctly rounded in any order, or their maximum."""
    if norm_type == math.inf:
        return max(power_sums, default=0.0)
    return math.fsum(power_sums)


def asked_norm(max_norm: float, norm_type: float) -> Clip:
    """Limit that a call of `clip_grad_norm_` asks for. Raises ValueError."""
    if not max_norm > 0:
        raise ValueError(f"max_norm={max_norm}; expected a positive number (inf only measures)")
    return Clip(max_norm=float(max_norm), norm_type=float(norm_type))
