"""When blocks are updated: what `update=` may be, what an iteration costs with each. Pure.

serial     all in `step()`
tail       behind the next forward (ADR 0011)
speculate  in backward, and the rest in `step()` (ADR 0013)
both       in backward, and the rest behind the next forward
auto       the best of these for the plan
"""

from __future__ import annotations

from collections.abc import Mapping

from gemini.placement.cost import StepCost

from .speculation import SpeculationCost
from .tail import TailCost

UPDATES = ("serial", "tail", "speculate", "both")  # the simplest first
AUTO = "auto"
BEHIND, IN_BACKWARD = ("tail", "both"), ("speculate", "both")
SAME_SECONDS = 0.02  # of an iteration: no prediction tells them apart


def seconds_by_update(
    serial: StepCost, tail: TailCost | None, speculation: SpeculationCost | None
) -> dict[str, float]:
    """Of an iteration, for every `update=` that has a price."""
    found = {"serial": serial.seconds}
    if tail is not None:
        found["tail"] = tail.seconds
    if speculation is not None:
        found["speculate"] = speculation.serial_seconds
        if speculation.tail is not None:
            found["both"] = speculation.tail.seconds
    return found


def best_update(seconds: Mapping[str, float]) -> str:
    """The simplest that takes no longer than any other, as far as a prediction tells them apart."""
    least = min(seconds.values()) * (1 + SAME_SECONDS)
    return next(name for name in UPDATES if name in seconds and seconds[name] <= least)


def priced_in_words(seconds: Mapping[str, float]) -> str:
    """Every price, and the choice."""
    prices = ", ".join(f"{name} {seconds[name]:.3g} s" for name in UPDATES if name in seconds)
    return f'an iteration as predicted: {prices}; best is update="{best_update(seconds)}"'
