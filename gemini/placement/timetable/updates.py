"""Prices of updates: what `update=` may be, what each costs, and which is best. Pure.

serial     all in `step()`
tail       after the step, during the next forward (ADR 0002)
speculate  during backward, with what the step is expected to agree on; the rest in `step()`
both       the same, and the rest after the step, during the next forward
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass

SERIAL, TAIL = "serial", "tail"
UPDATES = (SERIAL, TAIL)  # the simplest first
# have a price, but nothing chooses them: with a clip that bites, what was done early is done again
SPECULATE, BOTH = "speculate", "both"
ASKED = (*UPDATES, SPECULATE, BOTH)
EARLY_WINDOW = 16  # spans that streams have at once in backward: a queue of all lets the host wait
RETIRED = ("auto",)  # of earlier versions: run as `TAIL`
SAME_SECONDS = 0.02  # of an iteration: no prediction tells them apart


@dataclass(frozen=True, slots=True)
class StepCost:
    """Predicted cost of an iteration with one `update`."""

    seconds: float
    busy: dict[str, float]  # seconds of every resource: links, `compute`, `update`
    update_seconds: float  # from the call of `step()` until all is updated
    waited_seconds: float  # by so much the iteration is longer than without updates
    kept_bytes: tuple[int, ...]  # of gradients that blocks still need, at every moment of forward

    @property
    def pass_seconds(self) -> float:
        """Seconds of forward and backward, without a step."""
        return self.seconds - self.waited_seconds

    @property
    def stall_seconds(self) -> float:
        """Seconds of a serial iteration in which nothing computes nor updates: a link is waited
        for."""
        return self.seconds - self.busy["compute"] - self.busy["update"]

    @property
    def bound_by(self) -> str:
        """The resource that is busy the longest: with everything overlapped it sets the time."""
        return max(self.busy, key=lambda name: self.busy[name])

    def __str__(self) -> str:
        return said(self.update_seconds, self.waited_seconds)


def goes_on(update: str) -> bool:
    """Whether a step goes on when `step()` has returned."""
    return update in (TAIL, BOTH)


def is_early(update: str) -> bool:
    """Whether blocks are updated during backward."""
    return update in (SPECULATE, BOTH)


def current_update(update: str, *, by_kernels: bool) -> str:
    """The `update=` of today: a retired one is `TAIL`, with a warning that each is given once; so
    is `BOTH` unless kernels of a device update.

    Raises ValueError for what no version knew.
    """
    if update in RETIRED or (update == BOTH and not by_kernels):
        where = " on a CPU" if update == BOTH else ""
        warnings.warn(
            f'update="{update}" is no longer offered{where} and runs as update="tail": blocks are '
            'not updated during backward. The bits are the same; write update="tail"',
            FutureWarning,
            stacklevel=2,
        )
        return TAIL
    if update not in ASKED:
        raise ValueError(f"update={update!r}; expected one of {[*ASKED]}")
    return update


def said(update_seconds: float, waited_seconds: float) -> str:
    """Words for what of an update is hidden and what is waited for, as predicted or as measured."""
    hidden = max(0.0, update_seconds - waited_seconds)
    return (
        f"{update_seconds:.3g} s: {hidden:.3g} s hidden during the next forward, "
        f"{waited_seconds:.3g} s waited for"
    )


def best_update(seconds: Mapping[str, float]) -> str:
    """The simplest of `UPDATES` that a prediction cannot tell from the fastest of them."""
    may = [name for name in UPDATES if name in seconds]
    least = min(seconds[name] for name in may) * (1 + SAME_SECONDS)
    return next(name for name in may if seconds[name] <= least)


def priced_in_words(seconds: Mapping[str, float]) -> str:
    """Words for every price, and the choice."""
    prices = ", ".join(f"{name} {seconds[name]:.3g} s" for name in ASKED if name in seconds)
    return f'an iteration as predicted: {prices}; best is update="{best_update(seconds)}"'
