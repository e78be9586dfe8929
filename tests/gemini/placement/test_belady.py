from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gemini.placement.timetable.belady import (
    CacheProblem,
    best_schedule,
    by_rule,
    evaluate,
    filled,
    intervals_of,
    lower_bound,
)

NUM_ITEMS = 5
needs_lists = st.lists(
    st.lists(st.integers(0, NUM_ITEMS - 1), max_size=2, unique=True).map(tuple),
    min_size=1,
    max_size=9,
).filter(any)


@st.composite
def problems(draw, mixed=False):
    needs = tuple(draw(needs_lists))
    sizes = st.integers(1, 9) if mixed else st.just(1)
    nbytes = tuple(draw(sizes) for _ in range(NUM_ITEMS))
    extra = [draw(st.integers(0, 12 if mixed else 3)) for _ in needs]
    room = tuple(sum(nbytes[i] for i in n) + e for n, e in zip(needs, extra, strict=True))

    def some_of(items):
        return tuple(i for i in items if draw(st.integers(0, 3)) == 0)

    ends = tuple(some_of(items) for items in needs)
    return CacheProblem(needs, nbytes, room, ends)


def fits(problem, cached):
    """Whether keeping these intervals stays within every moment's room."""
    total = len(problem.needs)
    load = [sum(problem.nbytes[i] for i in items) for items in problem.needs]
    for interval in cached:
        for moment in range(interval.start + 1, interval.end):
            load[moment % total] += problem.nbytes[interval.item]
    return all(used <= room for used, room in zip(load, problem.room, strict=True))


def fewest_bytes(problem):
    """Brute force: over all sets of intervals that fit."""
    intervals = intervals_of(problem)
    best = None
    for count in range(len(intervals) + 1):
        for cached in combinations(intervals, count):
            if fits(problem, cached):
                moved = evaluate(problem, cached).bytes_moved
                best = moved if best is None else min(best, moved)
    return best


def replay(problem, schedule, iterations=3):
    """Bytes that the last of some iterations moves, by carrying the schedule out."""
    cached = {(i.item, i.start) for i in schedule.cached}
    there = set()
    for _ in range(iterations):
        moved = 0
        for moment, items in enumerate(problem.needs):
            for item in items:
                if item not in there:
                    moved += problem.nbytes[item]
                    there.add(item)
            used = sum(problem.nbytes[i] for i in there)
            assert used <= problem.room[moment]
            there -= {item for item in items if (item, moment) not in cached}
    return moved


@settings(max_examples=300, deadline=None)
@given(problems())
def test_equal_chunks_move_the_least_bytes_that_any_schedule_could(problem):
    schedule = best_schedule(problem)
    assert fits(problem, schedule.cached)
    assert schedule.bytes_moved == fewest_bytes(problem)


@settings(max_examples=200, deadline=None)
@given(problems())
def test_the_rule_alone_is_the_best_for_equal_chunks(problem):
    cached = by_rule(problem, intervals_of(problem), problem.free_room())
    assert fits(problem, cached)
    assert evaluate(problem, cached).bytes_moved == fewest_bytes(problem)


@settings(max_examples=200, deadline=None)
@given(problems(mixed=True))
def test_a_schedule_is_never_below_its_bound_and_moves_what_it_says(problem):
    schedule = best_schedule(problem)
    assert fits(problem, schedule.cached)
    assert replay(problem, schedule) == schedule.bytes_moved
    assert schedule.lower_bound <= fewest_bytes(problem) <= schedule.bytes_moved


def every_way(problem):
    """Bytes by the rule, by the rule with its gaps filled, and by filling alone."""
    intervals, free = intervals_of(problem), problem.free_room()
    cached = by_rule(problem, intervals, free)
    ways = (cached, filled(problem, cached, intervals, free), filled(problem, [], intervals, free))
    assert all(fits(problem, way) for way in ways)
    return [evaluate(problem, way).bytes_moved for way in ways]


@pytest.mark.parametrize(
    ("needs", "nbytes", "room", "moved"),
    [
        ((0, 2, 1, 2, 0, 1), (5, 4, 4, 5), 9, [18, 18, 21]),
        ((2, 0, 1, 2, 0), (4, 2, 2, 5), 7, [12, 12, 10]),
        ((1, 3, 2, 0, 3, 0, 3, 2, 1), (3, 2, 5, 2), 9, [19, 17, 21]),
    ],
    ids=["the rule", "filling alone", "the rule and filling"],
)
def test_chunks_of_mixed_sizes_take_the_better_of_two_ways(needs, nbytes, room, moved):
    last = {item: moment for moment, item in enumerate(needs)}
    ends = tuple((item,) if last[item] == moment else () for moment, item in enumerate(needs))
    problem = CacheProblem(tuple((i,) for i in needs), nbytes, (room,) * len(needs), ends)
    assert every_way(problem) == moved
    assert best_schedule(problem).bytes_moved == min(moved) == fewest_bytes(problem)


@settings(max_examples=100, deadline=None)
@given(problems(mixed=True))
def test_lower_bound_is_the_linear_programs_where_nothing_wraps_round(problem):
    scipy_optimize = pytest.importorskip("scipy.optimize")
    last_use = {i: m for m, items in enumerate(problem.needs) for i in items}
    ends = tuple(
        tuple(i for i in items if last_use[i] == m or i in problem.ends[m])
        for m, items in enumerate(problem.needs)
    )
    problem = CacheProblem(problem.needs, problem.nbytes, problem.room, ends)
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
    problem = CacheProblem(needs, (1, 1, 1), (2,) * 6, ends)
    schedule = best_schedule(problem)
    assert [(i.item, i.start, i.end) for i in schedule.cached] == [(1, 1, 3), (2, 2, 5)]
    assert schedule.fetches == ((0,), (1,), (2,), (), (0,), ())


def test_needs_above_the_room_are_refused():
    with pytest.raises(ValueError, match="moment 1 lacks 2 bytes"):
        best_schedule(CacheProblem(((0,), (1,)), (3, 7), (5, 5)))
