from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gemini.placement import opt
from gemini.placement.opt import CacheProblem, best_schedule, evaluate, intervals_of, lower_bound

NUM_ITEMS = 5
needs_lists = st.lists(
    st.lists(st.integers(0, NUM_ITEMS - 1), max_size=2, unique=True).map(tuple),
    min_size=1,
    max_size=9,
).filter(any)


@st.composite
def problems(draw, mixed=False, dirty=False):
    needs = tuple(draw(needs_lists))
    sizes = st.integers(1, 9) if mixed else st.just(1)
    nbytes = tuple(draw(sizes) for _ in range(NUM_ITEMS))
    extra = [draw(st.integers(0, 12 if mixed else 3)) for _ in needs]
    room = tuple(sum(nbytes[i] for i in n) + e for n, e in zip(needs, extra, strict=True))

    def some_of(items):
        return tuple(i for i in items if draw(st.integers(0, 3)) == 0)

    ends = tuple(some_of(items) for items in needs)
    writes = tuple(some_of(items) for items in needs) if dirty else ()
    return CacheProblem(needs, nbytes, room, writes, ends)


def fits(problem, kept):
    """Whether keeping these intervals stays within every moment's room."""
    total = len(problem.needs)
    load = [sum(problem.nbytes[i] for i in items) for items in problem.needs]
    for interval in kept:
        for moment in range(interval.start + 1, interval.end):
            load[moment % total] += problem.nbytes[interval.item]
    return all(used <= room for used, room in zip(load, problem.room, strict=True))


def fewest_bytes(problem):
    """Brute force: over all sets of intervals that fit."""
    intervals = intervals_of(problem)
    best = None
    for count in range(len(intervals) + 1):
        for kept in combinations(intervals, count):
            if fits(problem, kept):
                moved = evaluate(problem, kept).bytes_moved
                best = moved if best is None else min(best, moved)
    return best


def replay(problem, schedule, iterations=3):
    """Bytes that the last of some iterations moves, by carrying the schedule out."""
    total = len(problem.needs)
    kept = {(i.item, i.start) for i in schedule.kept}
    there, dirty = set(), set()
    for _ in range(iterations):
        moved = 0
        for moment, items in enumerate(problem.needs):
            for item in items:
                if item not in there:
                    moved += problem.nbytes[item]
                    there.add(item)
            used = sum(problem.nbytes[i] for i in there)
            assert used <= problem.room[moment]
            if problem.writes:
                dirty |= set(problem.writes[moment])
            for item in items:
                if (item, moment) in kept:
                    continue
                if item in dirty and item not in problem.ends[moment]:
                    moved += problem.nbytes[item]
                there.discard(item)
                dirty.discard(item)
    assert total
    return moved


@settings(max_examples=300, deadline=None)
@given(problems())
def test_equal_chunks_move_the_least_bytes_that_any_schedule_could(problem):
    schedule = best_schedule(problem)
    assert fits(problem, schedule.kept)
    assert schedule.bytes_moved == fewest_bytes(problem)


@settings(max_examples=200, deadline=None)
@given(problems(mixed=True, dirty=True))
def test_schedule_is_never_above_lru_fifo_or_opt_and_never_below_its_bound(problem):
    schedule = best_schedule(problem)
    assert fits(problem, schedule.kept)
    assert replay(problem, schedule) == schedule.bytes_moved
    for policy in ("opt", "lru", "fifo"):
        alone = opt._circular(problem, intervals_of(problem), problem.free_room(), policy)
        assert fits(problem, alone)
        assert schedule.bytes_moved <= evaluate(problem, alone).bytes_moved
    assert schedule.lower_bound <= fewest_bytes(problem) <= schedule.bytes_moved


@settings(max_examples=100, deadline=None)
@given(problems(mixed=True))
def test_lower_bound_is_the_linear_programs_where_nothing_wraps_round(problem):
    scipy_optimize = pytest.importorskip("scipy.optimize")
    last_use = {i: m for m, items in enumerate(problem.needs) for i in items}
    ends = tuple(
        tuple(i for i in items if last_use[i] == m or i in problem.ends[m])
        for m, items in enumerate(problem.needs)
    )
    problem = CacheProblem(problem.needs, problem.nbytes, problem.room, (), ends)
    intervals, free = intervals_of(problem), problem.free_room()
    uses = sum(problem.nbytes[i] for items in problem.needs for i in items)
    saved = 0.0
    if intervals:
        rows = [
            [problem.nbytes[i.item] if i.start < m < i.end else 0 for i in intervals]
            for m in range(len(problem.needs))
        ]
        value = [-problem.nbytes[i.item] for i in intervals]
        saved = -scipy_optimize.linprog(value, A_ub=rows, b_ub=free, bounds=(0, 1)).fun
    assert lower_bound(problem, intervals, free) == pytest.approx(uses - saved)


def test_what_is_used_last_is_given_up_first():
    needs = ((0,), (1,), (2,), (1,), (0,), (2,))
    ends = ((), (), (), (1,), (0,), (2,))
    problem = CacheProblem(needs, (1, 1, 1), (2,) * 6, (), ends)
    schedule = best_schedule(problem)
    assert [(i.item, i.start, i.end) for i in schedule.kept] == [(1, 1, 3), (2, 2, 5)]
    assert schedule.fetches == ((0,), (1,), (2,), (), (0,), ())


def test_copy_that_was_changed_is_written_back_when_given_up():
    needs = ((0,), (1,), (0,))
    problem = CacheProblem(needs, (3, 5), (5, 5, 5), ((0,), (), ()), ())
    schedule = best_schedule(problem)
    # kept from its last use round to its first: one fetch at the end, one write-back at the start
    assert (schedule.bytes_in, schedule.bytes_out) == (3 + 5, 3)


def test_needs_above_the_room_are_refused():
    with pytest.raises(ValueError, match="moment 1 lacks 2 bytes"):
        best_schedule(CacheProblem(((0,), (1,)), (3, 7), (5, 5)))
