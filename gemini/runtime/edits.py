"""What is asked of gradients and not done yet: values."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from gemini.optim.rules.clipping import Clip
from gemini.runtime.comm.ballot import Agreement


@dataclass(frozen=True, slots=True)
class PendingClip:
    """What the coming step clips to, and what was measured for it already."""

    clip: Clip
    norm: Tensor | None = None  # fp64 0-d, unscaled, where a norm was asked for
    agreement: Agreement | None = None  # where the host knows it
    present: tuple[bool, ...] | None = None  # where it does not: some rank has a gradient, by param


@dataclass(frozen=True, slots=True)
class Edit:
    """What is asked of one parameter's gradient and not done yet: a product, then limits."""

    factors: tuple[float | Tensor, ...] = ()
    low: float = -math.inf
    high: float = math.inf

    @property
    def factor(self) -> float:
        """May wait for a device."""
        return math.prod(float(factor) for factor in self.factors)

    @property
    def limits(self) -> bool:
        return self.low > -math.inf or self.high < math.inf

    def is_like(self, other: Edit) -> bool:
        """Whether both ask for the same, as far as is known without a device."""
        if (self.low, self.high) != (other.low, other.high):
            return False
        return len(self.factors) == len(other.factors) and all(
            a is b or (isinstance(a, float) and isinstance(b, float) and a == b)
            for a, b in zip(self.factors, other.factors, strict=True)
        )

    def carried_out(self, values: Tensor, scale: float) -> Tensor:
        """In place on `values`, fp32, which carry a loss scale."""
        values.mul_(self.factor)
        return values.clamp_(self.low * scale, self.high * scale) if self.limits else values
