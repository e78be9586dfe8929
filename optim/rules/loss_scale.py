"""The dynamic loss scale as data: its options, its state, and what one step does to it. Pure.

fp16 holds nothing below 6e-8, so the loss is multiplied by a scale before backward and gradients
are divided by it in the step. A step whose gradients are not finite is skipped; enough of them in a
row lower the scale, and enough good ones raise it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from gemini.arguments import by_name


@dataclass(frozen=True, slots=True)
class ScaleState:
    """State of a schedule; part of every checkpoint."""

    scale: float
    good_steps: int  # since the scale last changed, or a step was skipped
    hysteresis_left: int  # overflows that still go without a backoff


@by_name
@dataclass(frozen=True, slots=True)
class LossScale:
    """Options of the loss scale; these defaults are the only ones.

    initial_scale, min_scale, max_scale: factors on the loss; the scale stays within the two.
    growth_factor, backoff_factor: the scale is multiplied by them.
    growth_interval: good steps in a row after which the scale grows; 0 never changes it.
    hysteresis: overflows since the last growth at which the scale begins to back off.

    Raises ValueError, naming the option that is out of range.
    """

    initial_scale: float = 2.0**16
    min_scale: float = 1.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 1000
    hysteresis: int = 2
    max_scale: float = 2.0**32

    def __post_init__(self) -> None:
        _check(0 < self.min_scale < math.inf, "min_scale", self.min_scale, "above 0")
        _check(
            self.min_scale <= self.max_scale < math.inf,
            "max_scale", self.max_scale, f"finite and at least min_scale={self.min_scale:g}",
        )  # fmt: skip
        _check(
            self.min_scale <= self.initial_scale <= self.max_scale,
            "initial_scale", self.initial_scale,
            f"within [min_scale, max_scale] = [{self.min_scale:g}, {self.max_scale:g}]",
        )  # fmt: skip
        _check(1 <= self.growth_factor < math.inf, "growth_factor", self.growth_factor, ">= 1")
        _check(0 < self.backoff_factor <= 1, "backoff_factor", self.backoff_factor, "in (0, 1]")
        _check(
            self.growth_interval >= 0 and self.growth_interval == int(self.growth_interval),
            "growth_interval", self.growth_interval, "a whole number of steps, 0 or more",
        )  # fmt: skip
        _check(
            self.hysteresis >= 1 and self.hysteresis == int(self.hysteresis),
            "hysteresis", self.hysteresis, "a whole number of overflows, 1 or more",
        )  # fmt: skip

    @property
    def least(self) -> float:
        """Scale from which an overflow lowers it no more."""
        falls = self.growth_interval > 0 and self.backoff_factor < 1
        return self.min_scale if falls else math.inf

    def start(self) -> ScaleState:
        """State before the first step."""
        return ScaleState(float(self.initial_scale), 0, int(self.hysteresis))

    def after(self, state: ScaleState, overflow: bool) -> ScaleState:
        """State after one step."""
        if self.growth_interval == 0:
            return state
        if overflow:
            left = max(0, state.hysteresis_left - 1)
            lower = max(state.scale * self.backoff_factor, self.min_scale)
            return ScaleState(lower if left == 0 else state.scale, 0, left)
        good = state.good_steps + 1
        if good < self.growth_interval:
            return replace(state, good_steps=good)
        higher = min(state.scale * self.growth_factor, self.max_scale)
        return ScaleState(higher, 0, int(self.hysteresis))


def _check(inside: bool, name: str, value: object, expected: str) -> None:
    if not inside:
        raise ValueError(f"loss scale: {name}={value!r}; expected {expected}")
