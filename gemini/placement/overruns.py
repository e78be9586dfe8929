"""Budgets that were passed: measured while training, noted, and said once. Pure.

Model data is counted exactly, in every iteration. Activations are measured in sampled iterations;
here counts what cannot be anything else: storages that operators made, or the device's allocator.
"""

from __future__ import annotations

import logging
import sys
import warnings
from dataclasses import dataclass

from gemini.memtracer.trace import Departure
from gemini.units import format_bytes

from .policy import AutoPlacement, Placement, StaticPlacement
from .sizes import UNLIMITED, Budgets
from .tiers import Tier

log = logging.getLogger("gemini")


class BudgetWarning(UserWarning):
    """An iteration needs more than a hard budget leaves it in any homes, or passed one for good."""


@dataclass(frozen=True, slots=True)
class Overrun(Departure):
    """Bytes of one rank on one tier when they were most above its budget."""

    tier: Tier
    budget_bytes: int
    model_bytes: int
    other_bytes: int  # activations and temporaries
    where: str

    @property
    def missing_bytes(self) -> int:
        return self.model_bytes + self.other_bytes - self.budget_bytes

    def __str__(self) -> str:
        budget, missing = format_bytes(self.budget_bytes), format_bytes(self.missing_bytes)
        parts = f"model data {format_bytes(self.model_bytes)}"
        if self.other_bytes:
            parts += f", activations and temporaries {format_bytes(self.other_bytes)}"
        return (
            f"{self.tier.value}: the budget of a rank, {budget}, was passed by {missing} "
            f"({self.missing_bytes} bytes) {self.where}: {parts}"
        )


class Overruns:
    """Overruns of one rank's budgets.

    Only `AutoPlacement` has activations in the budget of the device.

    found: the worst of every iteration that passed a budget by more than those before it.
    noise_bytes: error of measured iterations, at most.
    """

    def __init__(self, policy: Placement, budgets: Budgets) -> None:
        limited = () if isinstance(policy, StaticPlacement) else Tier
        self.limits = {t: int(budgets.of(t)) for t in limited if budgets.of(t) < UNLIMITED}
        self._counts_activations = isinstance(policy, AutoPlacement)
        self.noise_bytes = 0
        self.homes_follow = False  # room is made before the next iteration that asks for as much
        self.found: list[Departure] = []
        self._worst: dict[Tier, Overrun] = {}
        self._now: dict[Tier, Overrun] = {}  # of this iteration
        self._notes: dict[str, str] = {}

    @property
    def limits_device(self) -> bool:
        """Whether activations can pass a budget."""
        return self._counts_activations and Tier.DEVICE in self.limits

    def check(self, tier: Tier, model_bytes: int, other_bytes: int, where: str) -> None:
        """Note that a tier holds these bytes. other_bytes: of what is no model data; 0 where not
        measured."""
        limit = self.limits.get(tier)
        if limit is None or model_bytes + other_bytes <= limit:
            return
        overrun = Overrun(tier, limit, model_bytes, other_bytes, where)
        if tier not in self._now or self._now[tier].missing_bytes < overrun.missing_bytes:
            self._now[tier] = overrun

    def settle(self) -> None:
        """End the iteration. Warns of budgets that were passed by more than ever before."""
        for tier, overrun in self._now.items():
            known = self._worst.get(tier)
            if known is not None and known.missing_bytes >= overrun.missing_bytes:
                continue
            self._worst[tier] = overrun
            self.found.append(overrun)
            if known is not None and known.missing_bytes > 0.9 * overrun.missing_bytes:
                continue
            remedy = "use a smaller batch or activation checkpointing"
            if (
                self.homes_follow
                and overrun.missing_bytes > self.noise_bytes
                and overrun.model_bytes <= overrun.budget_bytes
            ):
                log.warning("%s; model data moves before the next such iteration", overrun)
                continue
            if overrun.model_bytes > overrun.budget_bytes:
                remedy = "give the trace= of this loop, or add up fewer backwards before a step"
            warnings.warn(
                f"{overrun}; raise {tier.value}_budget by as much, or {remedy}",
                BudgetWarning,
                stacklevel=user_stacklevel(),
            )
        self._now.clear()

    def note(self, key: str, text: str) -> bool:
        """Keep a text for reports. Returns whether it is new."""
        is_new = self._notes.get(key) != text
        self._notes[key] = text
        return is_new

    def forget(self, key: str) -> None:
        """Drop a note that no longer holds."""
        self._notes.pop(key, None)

    def lines(self) -> tuple[str, ...]:
        """Lines for reports: budgets that were passed, and by how much at most."""
        self.settle()
        return (*map(str, self._worst.values()), *self._notes.values())


def user_stacklevel() -> int:
    """Stack level for `warnings.warn` in the caller: the innermost frame that is neither ours nor
    torch's."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and _is_ours(frame.f_globals.get("__name__", "")):
        level, frame = level + 1, frame.f_back
    return level


def _is_ours(module: str) -> bool:
    return module.partition(".")[0] in ("gemini", "torch", "contextlib")
