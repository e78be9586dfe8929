"""Schedules of gathers, carried out step by step."""

from itertools import groupby

from hypothesis import given, settings
from hypothesis import strategies as st

from gemini.placement.timetable.belady import CacheProblem, best_schedule
from gemini.placement.timetable.gathers import gather_steps
from gemini.placement.timetable.steps import schedule_gathers

NUM_CHUNKS = 6
traces = st.lists(
    st.lists(st.integers(0, NUM_CHUNKS - 1), min_size=1, max_size=2, unique=True).map(tuple),
    min_size=1,
    max_size=10,
)


def steps_of(needs, nbytes, room, max_prefetch, stale=()):
    """Every moment is the begin of a call."""
    schedule = schedule_gathers(needs, room, nbytes, max_prefetch, stale)
    return gather_steps(needs, schedule.gathers, schedule.always)


def replay(found, nbytes, iterations=3):
    """Bytes gathered in the last of some iterations, and what is there at every step of it.

    A payload that is carried over is gathered on demand where no iteration before left it.
    """
    there = set()
    for _ in range(iterations):
        moved, held = 0, []
        there &= found.carried  # an iteration begins with no more
        for step in found.steps:
            there -= set(step.release)
            gathered = [*step.gather, *(c for c in step.needs if c not in there)]
            for chunk in dict.fromkeys(gathered):
                assert chunk not in there
                there.add(chunk)
                moved += nbytes[chunk]
            held.append(sum(nbytes[c] for c in there))
            for ended in step.release_at_ends:
                there -= set(ended)
    return moved, held


@settings(max_examples=200, deadline=None)
@given(traces, st.lists(st.integers(0, 20), min_size=10, max_size=10), st.integers(1, 9),
       st.integers(0, 3), st.booleans())  # fmt: skip
def test_steps_move_what_the_schedule_says_within_the_room_of_every_moment(
    needs, spare, seed, max_prefetch, ends_with_a_step
):
    nbytes = {chunk: 1 + (chunk * seed) % 7 for chunk in range(NUM_CHUNKS)}
    room = [sum(nbytes[c] for c in call) + s for call, s in zip(needs, spare, strict=False)]
    stale = set(nbytes) if ends_with_a_step else set()
    found = steps_of(needs, nbytes, room, max_prefetch, stale)
    moved, held = replay(found, nbytes)
    last = {c: m for m, call in enumerate(needs) for c in call}
    ends = tuple(tuple(c for c in call if c in stale and last[c] == m)
                 for m, call in enumerate(needs))  # fmt: skip
    problem = CacheProblem(tuple(needs), tuple(nbytes.values()), tuple(room), ends)
    assert moved == best_schedule(problem).bytes_moved
    assert all(used <= limit for used, limit in zip(held, room, strict=True))
    assert found.needs == tuple(call for call, _ in groupby(needs))
    assert not (ends_with_a_step and found.carried)


def test_prefetch_begins_before_the_moment_of_use():
    found = steps_of([(0,), (1,), (2,)], dict.fromkeys(range(3), 1), [2] * 3, 1, {0, 1, 2})
    assert [step.gather for step in found.steps] == [(0, 1), (2,), ()]
    found = steps_of([(0,), (1,), (2,)], dict.fromkeys(range(3), 1), [2] * 3, 0, {0, 1, 2})
    assert [step.gather for step in found.steps] == [(0,), (1,), (2,)]


def test_nothing_is_gathered_where_a_call_ends():
    calls = [(0,), None, (1,), None, (2,), None]
    needs = [call or () for call in calls]
    nbytes = dict.fromkeys(range(3), 1)
    # room for a second payload at the ends of calls only
    schedule = schedule_gathers(
        needs, [1, 2] * 3, nbytes, 1, stale={0, 1, 2}, may_begin=[c is not None for c in calls]
    )
    found = gather_steps(calls, schedule.gathers)
    assert [step.gather for step in found.steps] == [(0,), (1,), (2,)]
    assert [step.release_at_ends for step in found.steps] == [((0,),), ((1,),), ((2,),)]


def test_chunks_that_are_never_released_are_not_planned():
    found = steps_of([(0, 1)], {1: 10}, [10], 1, {1})
    assert found.steps[0].gather == (1,)
