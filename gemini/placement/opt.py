"""Which copies to keep between uses, so that the fewest bytes move (OPT eviction). Pure.

An item has uses at moments of an iteration that repeats. Between two uses its copy is either kept,
or given up and fetched again. What is kept over a moment, with what the moment needs, must fit into
the room of that moment. Belady's rule (when room is short give up the copy whose next use is
farthest) is optimal for items of equal size; for mixed sizes or items that must be written back it
is not, so `best_schedule` also tries LRU and FIFO, fills the gaps that are left, and states how far
it is from a lower bound.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class CacheProblem:
    """Uses of items over one iteration, which repeats.

    needs: the items that every moment uses. nbytes: of every item. room: bytes for items at every
    moment. writes: at every moment, the needed items whose copy it changes: such a copy is written
    back when it is given up. ends: at every moment, the needed items whose copy is worthless
    behind it (its home was changed, or it was consumed): it is neither kept nor written back.
    """

    needs: tuple[tuple[int, ...], ...]
    nbytes: tuple[int, ...]
    room: tuple[int, ...]
    writes: tuple[tuple[int, ...], ...] = ()
    ends: tuple[tuple[int, ...], ...] = ()

    def free_room(self) -> list[int]:
        """What every moment's needs leave. Raises ValueError where they do not fit."""
        free = []
        for moment, (items, room) in enumerate(zip(self.needs, self.room, strict=True)):
            left = room - sum(self.nbytes[item] for item in items)
            if left < 0:
                raise ValueError(f"moment {moment} lacks {-left} bytes")
            free.append(left)
        return free


@dataclass(frozen=True, slots=True)
class Interval:
    """From one use of an item to its next; `end` is behind the iteration where it wraps round."""

    item: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Schedule:
    """Which intervals are kept, and what follows."""

    kept: tuple[Interval, ...]
    fetches: tuple[tuple[int, ...], ...]  # at every moment
    bytes_in: int
    bytes_out: int  # written back
    policy: str
    lower_bound: int = 0  # no schedule moves fewer bytes

    @property
    def bytes_moved(self) -> int:
        return self.bytes_in + self.bytes_out

    @property
    def gap(self) -> float:
        """How far above the lower bound, as a fraction of it."""
        return self.bytes_moved / self.lower_bound - 1 if self.lower_bound else 0.0


def intervals_of(problem: CacheProblem) -> list[Interval]:
    """Where a copy could be kept, by start; a use that ends a copy opens no interval."""
    total = len(problem.needs)
    ends = _sets(problem.ends, total)
    uses: dict[int, list[int]] = {}
    for moment, items in enumerate(problem.needs):
        for item in items:
            uses.setdefault(item, []).append(moment)
    found = []
    for item, times in uses.items():
        for start, end in pairwise([*times, times[0] + total]):
            if item not in ends[start]:
                found.append(Interval(item, start, end))
    return sorted(found, key=lambda i: (i.start, i.item))


def best_schedule(problem: CacheProblem) -> Schedule:
    """The schedule that moves the fewest bytes of OPT, LRU and FIFO, with its lower bound.

    Raises ValueError where the needs of a moment do not fit its room.
    """
    free = problem.free_room()
    intervals = intervals_of(problem)
    bound = lower_bound(problem, intervals, free)
    best = None
    for policy in POLICIES:
        kept = _fill(problem, _circular(problem, intervals, free, policy), intervals, free)
        schedule = evaluate(problem, kept, policy, bound)
        if best is None or schedule.bytes_moved < best.bytes_moved:
            best = schedule
        if best.bytes_moved == bound:
            break
    assert best is not None
    return best


def evaluate(
    problem: CacheProblem, kept: Iterable[Interval], policy: str = "", bound: int = 0
) -> Schedule:
    """The bytes that keeping exactly these intervals moves."""
    total = len(problem.needs)
    kept = tuple(sorted(kept, key=lambda i: (i.start, i.item)))
    arrives = {(i.item, i.end % total) for i in kept}
    stays = {(i.item, i.start) for i in kept}
    fetches = tuple(
        tuple(item for item in items if (item, moment) not in arrives)
        for moment, items in enumerate(problem.needs)
    )
    bytes_in = sum(problem.nbytes[item] for items in fetches for item in items)
    bytes_out = 0
    writes, ends = _sets(problem.writes, total), _sets(problem.ends, total)
    if any(writes):
        dirty: set[int] = set()
        for sweep in range(2):  # the second begins with what the first left dirty
            for moment, items in enumerate(problem.needs):
                dirty |= writes[moment]
                for item in items:
                    if (item, moment) in stays:
                        continue
                    if item in dirty and item not in ends[moment] and sweep == 1:
                        bytes_out += problem.nbytes[item]
                    dirty.discard(item)
    return Schedule(kept, fetches, bytes_in, bytes_out, policy, bound)


def lower_bound(problem: CacheProblem, intervals: Sequence[Interval], free: Sequence[int]) -> int:
    """Bytes that every schedule moves: the optimum where items may be kept in part.

    Every interval saves the same a byte, so the linear program is solved by Belady's rule on parts
    of items. Write-backs, and what wraps round holds at the start of the iteration, are left out:
    both make a schedule only dearer.
    """
    total = len(problem.needs)
    active: list[list[int]] = []  # [-end, bytes kept], the farthest end first
    load, lost, next_interval = 0, 0, 0
    closing = [0] * (total + 1)  # bytes whose interval ends at a moment
    for moment in range(total):
        load -= closing[moment]
        over = load - free[moment]
        while over > 0:
            end, kept = active[0]
            part = min(over, kept)
            active[0][1] -= part
            if -end < total:
                closing[-end] -= part
            load, over, lost = load - part, over - part, lost + part
            if part == kept:
                heapq.heappop(active)
        while next_interval < len(intervals) and intervals[next_interval].start == moment:
            interval = intervals[next_interval]
            next_interval += 1
            nbytes = problem.nbytes[interval.item]
            heapq.heappush(active, [-interval.end, nbytes])
            load += nbytes
            if interval.end < total:
                closing[interval.end] += nbytes
    uses = sum(problem.nbytes[item] for items in problem.needs for item in items)
    return uses - sum(problem.nbytes[i.item] for i in intervals) + lost


# -- policies: what is given up first, as a key; the greatest goes --

Key = Callable[[Interval, int], tuple[int, ...]]
POLICIES: dict[str, Key] = {
    "opt": lambda interval, entered: (interval.end, -interval.item),
    "lru": lambda interval, entered: (-interval.start, -interval.item),
    "fifo": lambda interval, entered: (-entered, -interval.item),
}
_NO_LIMIT = 1 << 62
_MAX_ROUNDS = 8  # of an iteration, until what it begins and ends with is the same


@dataclass(slots=True)
class _Sweep:
    """One pass over the iteration."""

    kept: list[Interval] = field(default_factory=list)  # without those that wrap round
    wrapped: list[Interval] = field(default_factory=list)  # kept up to the end of the pass
    used: list[Interval] = field(default_factory=list)  # of those given, kept to their use


def _circular(
    problem: CacheProblem, intervals: Sequence[Interval], free: Sequence[int], policy: str
) -> list[Interval]:
    """The best repeating schedule that passes over the iteration lead to.

    A pass ends with copies that the next one begins with. Each such set is fixed in turn, the rest
    is planned around it, and the set is changed by one copy while that helps.
    """
    total = len(problem.needs)
    wrapping = [i for i in intervals if i.end >= total]
    plain = [i for i in intervals if i.end < total]
    if not wrapping:
        return _sweep(problem, plain, (), free, policy).kept

    def repeat(fixed: frozenset[Interval]) -> tuple[int, list[Interval]] | None:
        left = list(free)
        for interval in fixed:
            for moment in _covered(interval, total):
                left[moment] -= problem.nbytes[interval.item]
        if any(left[m] < 0 for i in fixed for m in _covered(i, total)):
            return None
        kept = [*_sweep(problem, plain, (), left, policy).kept, *fixed]
        return evaluate(problem, kept).bytes_moved, kept

    seen: dict[frozenset[Interval], tuple[int, list[Interval]] | None] = {}
    carried: frozenset[Interval] = frozenset()
    for _ in range(_MAX_ROUNDS):
        sweep = _sweep(problem, intervals, tuple(sorted(carried, key=_by_end)), free, policy)
        for boundary in (frozenset(sweep.used), frozenset(sweep.wrapped)):
            if boundary not in seen:
                seen[boundary] = repeat(boundary)
        if frozenset(sweep.wrapped) == carried:
            break
        carried = frozenset(sweep.wrapped)
    seen.setdefault(frozenset(), repeat(frozenset()))
    fixed, best = min(
        ((boundary, found) for boundary, found in seen.items() if found is not None),
        key=lambda entry: entry[1][0],
    )
    improved = policy == "opt" and len(wrapping) * len(intervals) <= 200_000
    while improved:
        improved = False
        for neighbour in _neighbours(fixed, wrapping):
            found = repeat(neighbour)
            if found is not None and found[0] < best[0]:
                fixed, best, improved = neighbour, found, True
                break
    return best[1]


def _neighbours(
    fixed: frozenset[Interval], wrapping: Sequence[Interval]
) -> Iterable[frozenset[Interval]]:
    inside = sorted(fixed, key=_by_end)
    outside = [i for i in wrapping if i not in fixed]
    yield from (fixed | {new} for new in outside)
    yield from (fixed - {old} for old in inside)
    yield from (fixed - {old} | {new} for old in inside for new in outside)


def _by_end(interval: Interval) -> tuple[int, int]:
    return (interval.end, interval.item)


def _covered(interval: Interval, total: int) -> Iterable[int]:
    """Moments strictly between the two uses."""
    return (moment % total for moment in range(interval.start + 1, interval.end))


def _sweep(
    problem: CacheProblem,
    intervals: Sequence[Interval],
    carried: Sequence[Interval],
    free: Sequence[int],
    policy: str,
) -> _Sweep:
    """One pass: keep everything, and where room is short give up what the policy says."""
    total = len(problem.needs)
    key = POLICIES[policy]
    result = _Sweep()
    entered = dict.fromkeys(range(len(problem.nbytes)), 0)  # FIFO: when the copy was fetched
    heap: list[tuple[tuple[int, ...], int, Interval]] = []  # negated keys
    alive: dict[tuple[int, int], bool] = {}  # (item, end) that is kept: and whether carried in
    closing: dict[int, list[Interval]] = {}
    load, next_interval = 0, 0

    def open_interval(interval: Interval, end: int, is_carried: bool) -> None:
        nonlocal load
        alive[interval.item, end] = is_carried
        place = Interval(interval.item, interval.start - interval.end + end, end)
        negated = tuple(-k for k in key(place, entered[interval.item]))
        heapq.heappush(heap, (negated, end, interval))
        load += problem.nbytes[interval.item]
        if end < total:
            closing.setdefault(end, []).append(interval)

    for interval in carried:
        open_interval(interval, interval.end - total, True)
    for moment in range(total):
        arrived = set()
        for interval in closing.pop(moment, ()):
            is_carried = alive.pop((interval.item, moment), None)
            if is_carried is None:
                continue  # given up on the way
            load -= problem.nbytes[interval.item]
            arrived.add(interval.item)
            (result.used if is_carried else result.kept).append(interval)
        while load > free[moment]:
            _, end, interval = heapq.heappop(heap)
            if end > moment and alive.pop((interval.item, end), None) is not None:
                load -= problem.nbytes[interval.item]
        for item in problem.needs[moment]:
            if item not in arrived:
                entered[item] = moment
        while next_interval < len(intervals) and intervals[next_interval].start == moment:
            open_interval(intervals[next_interval], intervals[next_interval].end, False)
            next_interval += 1
    result.wrapped = [i for i in intervals if i.end >= total and (i.item, i.end) in alive]
    return result


def _fill(
    problem: CacheProblem,
    kept: Sequence[Interval],
    intervals: Sequence[Interval],
    free: Sequence[int],
) -> list[Interval]:
    """Also keep what fits beside: with mixed sizes a large victim leaves gaps."""
    total = len(problem.needs)
    left = list(free)
    for interval in kept:
        for moment in _covered(interval, total):
            left[moment] -= problem.nbytes[interval.item]
    chosen = set(kept)
    for interval in sorted(intervals, key=lambda i: (-problem.nbytes[i.item], i.end - i.start)):
        nbytes = problem.nbytes[interval.item]
        if interval in chosen or nbytes > _least(left, interval):
            continue
        chosen.add(interval)
        for moment in _covered(interval, total):
            left[moment] -= nbytes
    return sorted(chosen, key=lambda i: (i.start, i.item))


def _least(left: Sequence[int], interval: Interval) -> int:
    """The least room that is left between the two uses."""
    total = len(left)
    least = min(left[interval.start + 1 : interval.end], default=_NO_LIMIT)
    if interval.end > total:
        least = min(least, min(left[: interval.end - total], default=_NO_LIMIT))
    return least


def _sets(rows: Sequence[Sequence[int]], total: int) -> list[frozenset[int]]:
    empty: frozenset[int] = frozenset()
    return [frozenset(row) if row else empty for row in rows] if rows else [empty] * total
