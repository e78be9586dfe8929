"""Prices of updates: what `update=` may be, what each costs, and which is best. Pure.

serial     all in `step()`
tail       after the step, during the next forward (ADR 0002)
speculate  in backward, and the rest in `step()` (ADR 0002)
both       in backward, and the rest during the next forward
auto       the best of these for the plan
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

UPDATES = ("serial", "tail", "speculate", "both")  # the simplest first
AUTO = "auto"
BEHIND, IN_BACKWARD = ("tail", "both"), ("speculate", "both")
SAME_SECONDS = 0.02  # of an iteration: no prediction tells them apart


@dataclass(frozen=True, slots=True)
class OverlapCost:
    """Predicted cost of an iteration whose updates overlap its pass."""

    seconds: float
    update_seconds: float  # from the call of `step()` until all is updated
    waited_seconds: float  # by so much the pass is longer than without updates
    num_early: int  # blocks on NVMe that are updated in backward
    kept_bytes: tuple[int, ...]  # of gradients that blocks still need, at every moment of forward

    def __str__(self) -> str:
        return said(self.update_seconds, self.waited_seconds)


def said(update_seconds: float, waited_seconds: float) -> str:
    """Words for what of an update is hidden and what is waited for, as predicted or as measured."""
    hidden = max(0.0, update_seconds - waited_seconds)
    return (
        f"{update_seconds:.3g} s: {hidden:.3g} s hidden during the next forward, "
        f"{waited_seconds:.3g} s waited for"
    )


def blocks_in_words(num_early: int, num_blocks: int) -> str:
    """Words for the blocks that are updated in backward, as predicted or as measured."""
    return f"{num_early} of {num_blocks} blocks on NVMe"


def best_update(seconds: Mapping[str, float]) -> str:
    """The simplest `update` of those that a prediction cannot tell from the fastest."""
    least = min(seconds.values()) * (1 + SAME_SECONDS)
    return next(name for name in UPDATES if name in seconds and seconds[name] <= least)


def priced_in_words(seconds: Mapping[str, float]) -> str:
    """Words for every price, and the choice."""
    prices = ", ".join(f"{name} {seconds[name]:.3g} s" for name in UPDATES if name in seconds)
    return f'an iteration as predicted: {prices}; best is update="{best_update(seconds)}"'
