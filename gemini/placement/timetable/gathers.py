"""Steps of an executor at every call of a module: what it gathers and frees, from a schedule. Pure.

A moment is the begin or the end of a call. Payloads are gathered at begins only, so that all ranks
issue the same gathers whatever ends when; they are freed at both. `GatherStep` is one begin with
the ends that follow it.

Invariants, of steps that are followed from one iteration to the next:
1. an iteration begins with no payloads but those `carried`, and those that stay gathered;
2. what a call needs is gathered: by an earlier step that did not free it since, by its own step, or
   from the begin;
3. what is gathered at any moment is what the schedule counted into that moment's room;
4. a step frees before it gathers, and first gathers what its own call needs.

[Note: repeated calls] Ranks may differ in how often one call follows another that needs the same
chunks: heads of several depths in one chunk, of which each rank uses its own. So calls are told
apart where what they need changes, and a rank that repeats a call more or less often than its steps
still issues their gathers in their order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from gemini.placement.plan import Gather
from gemini.units import ChunkId

Call = tuple[ChunkId, ...]  # the chunks of a module that begins


@dataclass(frozen=True, slots=True)
class GatherStep:
    """Step at one begin of a call, in the order of doing, and at the ends that follow it."""

    needs: Call
    release: tuple[ChunkId, ...]
    gather: tuple[ChunkId, ...]  # what is needed first, then what is needed soon
    release_at_ends: tuple[tuple[ChunkId, ...], ...]  # payloads to free at each following end


@dataclass(frozen=True, slots=True)
class GatherSteps:
    """Gathers and releases of one iteration, by the call that begins."""

    steps: tuple[GatherStep, ...]
    carried: frozenset[ChunkId]  # payloads that stay from one iteration to the next, or always
    # what must be the same in the next iteration, for these steps to be followed: no call twice in
    # succession
    needs: tuple[Call, ...] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "needs", told_apart(step.needs for step in self.steps))


def told_apart(calls: Iterable[Call]) -> tuple[Call, ...]:
    """Calls without those that need the same as the call before them."""
    return tuple(call for call, _ in groupby(calls))


def gather_steps(
    calls: Sequence[Call | None], gathers: Iterable[Gather], always: Iterable[ChunkId] = ()
) -> GatherSteps:
    """Steps that carry `gathers` out.

    calls: by moment the chunks of the call that begins; None where one ends. gathers: in the order
    in which they are issued, each begun where a call begins. always: chunks that stay gathered.
    """
    begun: dict[int, list[ChunkId]] = {}  # by moment
    freed: dict[int, list[ChunkId]] = {}
    carried = set(always)
    for gather in gathers:
        assert calls[gather.begin] is not None, f"{gather} begins where a call ends"
        begun.setdefault(gather.begin, []).append(gather.chunk)
        if gather.release > len(calls):
            carried.add(gather.chunk)
        if gather.release != len(calls):
            freed.setdefault(gather.release % len(calls), []).append(gather.chunk)
    steps: list[GatherStep] = []
    at_ends: list[tuple[ChunkId, ...]] = []  # of the begin that comes next, from the end
    for moment in range(len(calls) - 1, -1, -1):
        needs, release = calls[moment], tuple(freed.get(moment, ()))
        if needs is None:
            at_ends.append(release)
            continue
        # what the call needs comes first
        gather_now = sorted(begun.get(moment, ()), key=lambda chunk: chunk not in needs)
        steps.append(GatherStep(needs, release, tuple(gather_now), tuple(reversed(at_ends))))
        at_ends.clear()
    return GatherSteps(tuple(reversed(steps)), frozenset(carried))
