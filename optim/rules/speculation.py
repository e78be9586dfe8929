"""Speculation as values: the assumptions of an update in backward, and what steps have taught.
Pure.

A block is updated as soon as its gradient is final, with what the step is expected to agree on.
Where it agrees on the same, the early update is held; else the block is done again.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from gemini.units import BlockId

from .report import QUIET_STEPS, Speculated


@dataclass(frozen=True, slots=True)
class BlockInputs:
    """Inputs that decide the bits of one block's update, with its last version.

    step: the factor and the limit of gradients. params: of every segment, the hyperparameters and
    the number of the step; None where it is left alone. gradient: a mark that changes with it; None
    where there is none.
    """

    step: Any
    params: tuple[tuple[Any, int] | None, ...]
    gradient: tuple[int, int] | None


def held(
    assumed: Mapping[BlockId, Hashable], agreed: Mapping[BlockId, Hashable]
) -> frozenset[BlockId]:
    """Blocks of `assumed` whose update has the bits of the step that was agreed on."""
    return frozenset(block for block, inputs in assumed.items() if inputs == agreed[block])


@dataclass(frozen=True, slots=True)
class TailTimes:
    """Times of the last step and the forward after it, in seconds.

    forward: from the end of `step()` to the next wait for all of it, less what modules waited.
    disk: time of a tail that updates every block.
    """

    forward: float = 0.0
    disk: float = float("inf")

    @classmethod
    def measured(
        cls,
        forward: float,
        tail: float,
        *,
        blocks: int,
        num_held: int,
        held_share: float,
        num_done: int = 0,
    ) -> TailTimes:
        """Times of a tail of `tail` seconds: `num_held` of its blocks were updated early, and each
        of these moved `held_share` of a block's traffic, but the `num_done` among them moved
        none."""
        moved = blocks - num_held + held_share * (num_held - num_done)
        share = moved / blocks if blocks else 0.0
        return cls(forward, tail / share if share else float("inf"))

    @property
    def tail_hides_disk(self) -> bool:
        return self.forward >= self.disk


@dataclass(frozen=True, slots=True)
class Habit:
    """Habit that decides when updates begin in backward.

    quiet_steps: steps in a row that must be neither clipped nor skipped nor mostly done again.
    asks_clock: not where the tail alone hides the disk.
    """

    quiet_steps: int = QUIET_STEPS
    asks_clock: bool = True


@dataclass(frozen=True, slots=True)
class Learned:
    """Knowledge of one rank from the steps so far.

    backwards: between the last two steps; None before the first. quiet_steps: since the last one
    that was clipped, skipped or mostly done again; at the beginning as many as are asked for.
    max_norm: to which the last step clipped the norm of order 2; 0: it did not.
    """

    habit: Habit = field(default_factory=Habit)
    backwards: int | None = None
    quiet_steps: int = QUIET_STEPS
    max_norm: float = 0.0

    def begins(self, backward: int, *, is_known_last: bool, times: TailTimes | None) -> bool:
        """Whether updates begin in this backward, which is number `backward` since the last step.

        is_known_last: said so, and not learned. times: of the tail that does the rest.
        """
        if self.backwards is None or self.quiet_steps < self.habit.quiet_steps:
            return False
        if times is not None and self.habit.asks_clock and times.tail_hides_disk:
            return False
        return is_known_last or backward == self.backwards

    def after(
        self, backwards: int, found: Speculated, *, was_disturbed: bool, max_norm: float
    ) -> Learned:
        """Knowledge after a step. was_disturbed: it was clipped or skipped."""
        is_quiet = not was_disturbed and found.redone <= found.held
        quiet = min(self.quiet_steps + 1, QUIET_STEPS) if is_quiet else 0
        return replace(self, backwards=backwards, quiet_steps=quiet, max_norm=max_norm)
