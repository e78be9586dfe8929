"""Choice of the copies to keep between uses, so that the fewest bytes move. Pure.

An item has uses at moments of an iteration that repeats. Between two uses its copy is cached, or
given up and fetched again. What is cached over a moment must fit, with what the moment needs, into
the room of that moment. Belady's rule (when room is short give up the copy whose next use is
farthest) is optimal for items of equal size. For mixed sizes it is not: a large victim leaves gaps,
which are filled, and an iteration that is filled from nothing is sometimes better. `best_schedule`
takes the better of the two, and states how far it is from a lower bound. `bench.host.gathers`
compares them with other rules.
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
    moment. ends: at every moment, the needed items whose copy is worthless after it (its home was
    changed, or it was consumed): it is not cached.
    """

    needs: tuple[tuple[int, ...], ...]
    nbytes: tuple[int, ...]
    room: tuple[int, ...]
    ends: tuple[tuple[int, ...], ...] = ()

    def free_room(self) -> list[int]:
        """Room that the needs of every moment leave. Raises ValueError where they do not fit."""
        free = []
        for moment, (items, room) in enumerate(zip(self.needs, self.room, strict=True)):
            left = room - sum(self.nbytes[item] for item in items)
            if left < 0:
                raise ValueError(f"moment {moment} lacks {-left} bytes")
            free.append(left)
        return free


@dataclass(frozen=True, slots=True)
class Interval:
    """Interval from one use of an item to its next; where it wraps round, `end` is past the
    iteration."""

    item: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class CacheSchedule:
    """Intervals that are cached, and the moves that follow."""

    cached: tuple[Interval, ...]
    fetches: tuple[tuple[int, ...], ...]  # at every moment
    bytes_moved: int
    lower_bound: int = 0  # no schedule moves fewer bytes

    @property
    def gap(self) -> float:
        """Distance from the lower bound, as a fraction of it."""
        return self.bytes_moved / self.lower_bound - 1 if self.lower_bound else 0.0


def intervals_of(problem: CacheProblem) -> list[Interval]:
    """Intervals in which a copy could be cached, by start; a use that ends a copy opens none."""
    total = len(problem.needs)
    ends = _sets(problem.ends, total)
    uses: dict[int, list[int]] = {}
    for moment, items in enumerate(problem.needs):
        for item in items:
            uses.setdefault(item, []).append(moment)
    intervals = []
    for item, times in uses.items():
        for start, end in pairwise([*times, times[0] + total]):
            if item not in ends[start]:
                intervals.append(Interval(item, start, end))
    return sorted(intervals, key=lambda i: (i.start, i.item))


def best_schedule(problem: CacheProblem) -> CacheSchedule:
    """The better of Belady's rule and an empty schedule, both filled, with its lower bound.

    Raises ValueError where the needs of a moment do not fit its room.
    """
    free = problem.free_room()
    intervals = intervals_of(problem)
    bound = lower_bound(problem, intervals, free)
    best = None
    for begin in (by_rule(problem, intervals, free), []):
        schedule = evaluate(problem, filled(problem, begin, intervals, free), bound)
        if best is None or schedule.bytes_moved < best.bytes_moved:
            best = schedule
        if best.bytes_moved == bound:
            break
    assert best is not None
    return best


def evaluate(problem: CacheProblem, cached: Iterable[Interval], bound: int = 0) -> CacheSchedule:
    """Schedule that caches exactly these intervals, with its bytes."""
    total = len(problem.needs)
    cached = tuple(sorted(cached, key=lambda i: (i.start, i.item)))
    arrives = {(i.item, i.end % total) for i in cached}
    fetches = tuple(
        tuple(item for item in items if (item, moment) not in arrives)
        for moment, items in enumerate(problem.needs)
    )
    moved = sum(problem.nbytes[item] for items in fetches for item in items)
    return CacheSchedule(cached, fetches, moved, bound)


def lower_bound(problem: CacheProblem, intervals: Sequence[Interval], free: Sequence[int]) -> int:
    """Lower bound of the bytes of every schedule: the optimum where items may be cached in part.

    Every interval saves the same a byte, so the linear program is solved by Belady's rule on parts
    of items. Room that copies from the last iteration take is left out: they make a schedule only
    dearer.
    """
    total = len(problem.needs)
    active: list[list[int]] = []  # [-end, bytes cached], the farthest end first
    load, lost, next_interval = 0, 0, 0
    closing = [0] * (total + 1)  # bytes whose interval ends at a moment
    for moment in range(total):
        load -= closing[moment]
        over = load - free[moment]
        # only the bytes that are over are given up, of the copy with the farthest next use
        while over > 0:
            end, cached = active[0]
            part = min(over, cached)
            active[0][1] -= part
            if -end < total:
                closing[-end] -= part
            load, over, lost = load - part, over - part, lost + part
            if part == cached:
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


Key = Callable[[Interval], tuple[int, ...]]  # of what is cached, the greatest is given up first
_NO_LIMIT = 1 << 62
_MAX_ROUNDS = 8  # of an iteration, until what it begins and ends with is the same


def farthest_use(interval: Interval) -> tuple[int, ...]:
    """Belady's rule: the copy with the farthest next use is given up first."""
    return (interval.end, -interval.item)


@dataclass(slots=True)
class _Sweep:
    """One pass over the iteration."""

    cached: list[Interval] = field(default_factory=list)  # without those that wrap round
    wrapped: list[Interval] = field(default_factory=list)  # cached up to the end of the pass
    used: list[Interval] = field(default_factory=list)  # of those given, cached to their use


def by_rule(
    problem: CacheProblem,
    intervals: Sequence[Interval],
    free: Sequence[int],
    key: Key = farthest_use,
) -> list[Interval]:
    """Best repeating schedule that passes over the iteration lead to.

    A pass ends with copies that the next one begins with. Each such set is fixed in turn, and the
    rest is planned around it.
    """
    total = len(problem.needs)
    wrapping = [i for i in intervals if i.end >= total]
    plain = [i for i in intervals if i.end < total]
    if not wrapping:
        return _sweep(problem, plain, (), free, key).cached

    def repeat(boundary: frozenset[Interval]) -> tuple[int, list[Interval]] | None:
        left, fixed = list(free), sorted(boundary, key=_by_end)
        for interval in fixed:
            for moment in _covered(interval, total):
                left[moment] -= problem.nbytes[interval.item]
        if any(left[m] < 0 for i in fixed for m in _covered(i, total)):
            return None
        cached = [*_sweep(problem, plain, (), left, key).cached, *fixed]
        return evaluate(problem, cached).bytes_moved, cached

    seen: dict[frozenset[Interval], tuple[int, list[Interval]] | None] = {}
    carried: frozenset[Interval] = frozenset()
    # A repeating schedule begins with what it ends with. Those copies that a pass was given and has
    # used are tried too: the others only took room.
    for _ in range(_MAX_ROUNDS):
        sweep = _sweep(problem, intervals, tuple(sorted(carried, key=_by_end)), free, key)
        for boundary in (frozenset(sweep.used), frozenset(sweep.wrapped)):
            if boundary not in seen:
                seen[boundary] = repeat(boundary)
        if frozenset(sweep.wrapped) == carried:
            break
        carried = frozenset(sweep.wrapped)
    seen.setdefault(frozenset(), repeat(frozenset()))
    _, best = min(
        (schedule for schedule in seen.values() if schedule is not None), key=lambda f: f[0]
    )
    return best


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
    key: Key,
) -> _Sweep:
    """Pass over the iteration: keeps every copy, and where room is short gives up the greatest by
    `key`."""
    total = len(problem.needs)
    result = _Sweep()
    heap: list[tuple[tuple[int, ...], int, Interval]] = []  # negated keys
    alive: dict[tuple[int, int], bool] = {}  # (item, end) that is cached: and whether carried in
    closing: dict[int, list[Interval]] = {}
    load, next_interval = 0, 0

    def open_interval(interval: Interval, end: int, is_carried: bool) -> None:
        nonlocal load
        alive[interval.item, end] = is_carried
        place = Interval(interval.item, interval.start - interval.end + end, end)
        negated = tuple(-k for k in key(place))
        heapq.heappush(heap, (negated, end, interval))
        load += problem.nbytes[interval.item]
        if end < total:
            closing.setdefault(end, []).append(interval)

    for interval in carried:
        open_interval(interval, interval.end - total, True)
    for moment in range(total):
        for interval in closing.pop(moment, ()):
            is_carried = alive.pop((interval.item, moment), None)
            if is_carried is None:
                continue  # given up on the way
            load -= problem.nbytes[interval.item]
            (result.used if is_carried else result.cached).append(interval)
        # A copy ends before its moment's room is counted, and begins after it: the own needs of the
        # moment are not in `free`. Copies that ended are still in the heap, and skipped here.
        while load > free[moment]:
            _, end, interval = heapq.heappop(heap)
            if end > moment and alive.pop((interval.item, end), None) is not None:
                load -= problem.nbytes[interval.item]
        while next_interval < len(intervals) and intervals[next_interval].start == moment:
            open_interval(intervals[next_interval], intervals[next_interval].end, False)
            next_interval += 1
    result.wrapped = [i for i in intervals if i.end >= total and (i.item, i.end) in alive]
    return result


def filled(
    problem: CacheProblem,
    cached: Sequence[Interval],
    intervals: Sequence[Interval],
    free: Sequence[int],
) -> list[Interval]:
    """Intervals with more of them kept where room is left: the largest first, then the soonest
    used."""
    total = len(problem.needs)
    left = list(free)
    for interval in cached:
        for moment in _covered(interval, total):
            left[moment] -= problem.nbytes[interval.item]
    chosen = set(cached)
    for interval in sorted(intervals, key=lambda i: (-problem.nbytes[i.item], i.end - i.start)):
        nbytes = problem.nbytes[interval.item]
        if interval in chosen or nbytes > _least(left, interval):
            continue
        chosen.add(interval)
        for moment in _covered(interval, total):
            left[moment] -= nbytes
    return sorted(chosen, key=lambda i: (i.start, i.item))


def _least(left: Sequence[int], interval: Interval) -> int:
    """Least room between the two uses."""
    total = len(left)
    least = min(left[interval.start + 1 : interval.end], default=_NO_LIMIT)
    if interval.end > total:
        least = min(least, min(left[: interval.end - total], default=_NO_LIMIT))
    return least


def _sets(rows: Sequence[Sequence[int]], total: int) -> list[frozenset[int]]:
    empty: frozenset[int] = frozenset()
    return [frozenset(row) if row else empty for row in rows] if rows else [empty] * total
