"""Plans of rows: their invariants, the optimum by brute force, and misses beside LRU's."""

import random
from collections import deque
from functools import cache
from itertools import accumulate, combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemini.embedding.planner import RowPlanner

batches = st.lists(st.sets(st.integers(0, 7), min_size=1, max_size=3), min_size=1, max_size=7)


def moved(batches, num_slots, lookahead):
    """Rows fetched and evicted, as planned with so many batches ahead; -1: not announced."""
    planner, ahead = RowPlanner(num_slots), deque(batches)
    for _ in range(lookahead):
        if ahead:
            planner.announce(ahead.popleft())
    count = 0
    for rows in batches:
        before = dict(planner.resident)
        if lookahead >= 0 and ahead:
            planner.announce(ahead.popleft())
        plan = planner.plan(sorted(rows)) if lookahead < 0 else planner.next_batch()
        plan.check(before, (), num_slots)
        assert planner.resident.keys() >= set(plan.rows) == set(rows)
        count += len(plan.fetched) + len(plan.evicted)
    return count


def optimum(batches, num_slots):
    """Fewest rows moved of all ways to choose who leaves; a cache may give up more than it must."""

    @cache
    def least(at, resident):
        if at == len(batches):
            return 0
        missing = batches[at] - resident
        others, best = sorted(resident - batches[at]), None
        for leave in range(len(others) + 1):
            if len(resident) - leave + len(missing) > num_slots:
                continue
            for gone in combinations(others, leave):
                cost = len(missing) + leave + least(at + 1, resident - set(gone) | missing)
                best = cost if best is None else min(best, cost)
        return best

    return least(0, frozenset())


@given(batches, st.integers(3, 6))
def test_rows_moved_are_the_optimum_of_the_window(batches, num_slots):
    batches = [frozenset(rows) for rows in batches]
    assert moved(batches, num_slots, len(batches)) == optimum(tuple(batches), num_slots)


@given(batches, st.integers(3, 6), st.integers(-1, 4))
def test_plans_keep_their_invariants_at_every_lookahead(batches, num_slots, lookahead):
    least = optimum(tuple(map(frozenset, batches)), num_slots)
    assert moved(batches, num_slots, lookahead) >= least


@given(batches, st.sets(st.integers(0, 7), max_size=3), st.integers(6, 8))
def test_pinned_rows_stay(batches, pinned, num_slots):
    planner = RowPlanner(num_slots)
    planner.plan(sorted(pinned))
    for rows in batches:
        before = dict(planner.resident)
        planner.plan(sorted(rows), pinned).check(before, pinned, num_slots)
        assert planner.resident.keys() >= pinned


def zipf(num, batch, count, seed):
    rng = random.Random(seed)
    weights = list(accumulate(1 / rank**1.05 for rank in range(1, num + 1)))
    return [set(rng.choices(range(num), cum_weights=weights, k=batch)) for _ in range(count)]


@pytest.mark.parametrize("seed", range(3))
def test_eight_batches_ahead_miss_at_most_three_quarters_of_lru(seed):
    """A table of 8 times the cache; half of the cache changes with a batch."""
    drawn = zipf(8000, 1024, 60, seed)
    assert 0 < moved(drawn, 1000, 8) <= 0.75 * moved(drawn, 1000, -1)


def test_plans_do_not_depend_on_the_order_of_ids():
    drawn, plans = zipf(100, 20, 20, 0), []
    for mixed in (False, True):
        planner = RowPlanner(40)
        for rows in drawn:
            planner.announce(random.Random(1).sample(sorted(rows), len(rows)) if mixed else rows)
        plans.append([planner.next_batch() for _ in drawn])
    assert plans[0] == plans[1]


def test_rows_that_do_not_fit_are_refused_and_nothing_changes():
    planner = RowPlanner(3)
    planner.announce([0, 1, 2])
    with pytest.raises(ValueError, match=r"2 wait for step.*expected cache_rows of at least 5"):
        planner.next_batch(pinned=[7, 8])
    with pytest.raises(ValueError, match=r"a batch has 4 rows of its own; expected cache_rows"):
        planner.plan([0, 1, 2, 3])
    assert planner.resident == {}
    assert planner.next_batch().fetched == ((0, 0), (1, 1), (2, 2))


def test_a_window_that_is_forgotten_leaves_lru():
    planner = RowPlanner(2)
    for rows in ([0], [1], [0]):
        planner.announce(rows)
    planner.next_batch(), planner.next_batch()
    planner.forget()
    assert planner.plan([5]).evicted == ((0, 0),)
    with pytest.raises(IndexError):
        planner.next_batch()
