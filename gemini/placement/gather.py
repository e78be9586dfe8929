"""What an executor does with payloads at every call of a module, from a schedule. Pure.

A moment is the begin or the end of a call. Payloads are gathered at begins only, so that all ranks
issue the same gathers whatever ends when; they are freed at both. `GatherStep` is one begin with
the ends behind it.

Invariants, of steps that are followed from one iteration to the next:
1. an iteration begins with no payloads but those `carried`, and those that are there all the time;
2. what a call needs is there: gathered by an earlier step that did not free it since, gathered by
   its own step, or there from the begin;
3. what is there at any moment is what the schedule counted into that moment's room;
4. a step frees before it gathers, and first gathers what its own call needs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from gemini.units import ChunkId

from .plan import Gather

Call = tuple[ChunkId, ...]  # the chunks of a module that begins


@dataclass(frozen=True, slots=True)
class GatherStep:
    """One begin of a call, in the order of doing, and the ends behind it."""

    needs: Call
    release: tuple[ChunkId, ...]
    gather: tuple[ChunkId, ...]  # what is needed first, then what is needed soon
    behind: tuple[tuple[ChunkId, ...], ...]  # payloads to free at every following end of a call


@dataclass(frozen=True, slots=True)
class GatherSteps:
    """One iteration."""

    steps: tuple[GatherStep, ...]
    carried: frozenset[ChunkId]  # payloads that stay from one iteration to the next, or always

    @property
    def needs(self) -> tuple[Call, ...]:
        """What must be the same in the next iteration, for these steps to be followed."""
        return tuple(step.needs for step in self.steps)


@dataclass(slots=True)
class _Row:
    needs: Call | None  # None: a call ends
    release: list[ChunkId] = field(default_factory=list)
    gather: list[ChunkId] = field(default_factory=list)


def gather_steps(
    calls: Sequence[Call | None], gathers: Iterable[Gather], always: Iterable[ChunkId] = ()
) -> GatherSteps:
    """The steps that carry `gathers` out.

    calls: by moment the chunks of the call that begins; None where one ends. gathers: in the order
    in which they are issued, each begun where a call begins. always: there all the time.
    """
    rows = [_Row(call) for call in calls]
    carried = set(always)
    for gather in gathers:
        assert rows[gather.begin].needs is not None, f"{gather} begins where a call ends"
        rows[gather.begin].gather.append(gather.chunk)
        if gather.release > len(rows):
            carried.add(gather.chunk)
            rows[gather.release - len(rows)].release.append(gather.chunk)
        elif gather.release < len(rows):
            rows[gather.release].release.append(gather.chunk)
    steps: list[GatherStep] = []
    for i, row in enumerate(rows):
        if row.needs is None:
            continue
        behind = []
        for later in rows[i + 1 :]:
            if later.needs is not None:
                break
            behind.append(tuple(later.release))
        first = {chunk: chunk not in row.needs for chunk in row.gather}
        ordered = sorted(row.gather, key=first.__getitem__)
        steps.append(GatherStep(row.needs, tuple(row.release), tuple(ordered), tuple(behind)))
    return GatherSteps(tuple(steps), frozenset(carried))
