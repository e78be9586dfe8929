"""Bounds of iterations that nobody has measured are never below the truth."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from gemini import trace
from gemini.memtracer.forecast import bound, covers, envelope, with_bytes_added
from gemini.memtracer.trace import Trace, TraceMoment

TERMS = st.tuples(st.integers(0, 1), st.integers(0, 2), st.integers(0, 50))  # b^i s^j, times
SUMS = st.lists(TERMS, min_size=1, max_size=3)
PERIODS = st.lists(st.lists(SUMS, min_size=1, max_size=3), min_size=1, max_size=3)
SHAPES = st.tuples(st.integers(2, 9), st.integers(2, 90))


def drawn_trace(periods, shape, kind="train"):
    batch, length = shape
    moments = [
        TraceMoment(
            "forward", "enter", f"m{i}", (),
            max(sum(c * batch**p * length**q for p, q, c in terms) for terms in sums),
        )
        for i, sums in enumerate(periods)
    ]  # fmt: skip
    return Trace(kind, f"int64[{batch}, {length}]", "", tuple(moments))


@given(PERIODS, st.lists(SHAPES, min_size=1, max_size=4), SHAPES)
def test_a_bound_is_never_below_the_truth(periods, shapes, asked):
    known = [drawn_trace(periods, shape) for shape in shapes]
    truth = drawn_trace(periods, asked)
    found = bound(known, "train", truth.signature)
    assert covers(found, truth)
    assert covers(bound(known, "eval", truth.signature), truth)


def with_saved(trace, periods, shape):
    """Of each period the terms of `periods` are saved all the time, beside what it had."""
    batch, length = shape
    saved = [sum(c * batch**p * length**q for p, q, c in sums[0]) for sums in periods]
    moments = [
        replace(m, non_model_bytes=m.non_model_bytes + n, saved_bytes=n)
        for m, n in zip(trace.moments, saved, strict=False)
    ]
    return replace(trace, moments=(*moments, *trace.moments[len(moments) :]))


@given(PERIODS, PERIODS, st.lists(SHAPES, min_size=1, max_size=4), SHAPES, st.integers(0, 10**6))
def test_neither_saved_bytes_nor_the_rest_pass_their_bounds(periods, saved, shapes, asked, kept):
    """So no iteration of which at most so many saved bytes stay passes what its bound says."""
    known = [with_saved(drawn_trace(periods, shape), saved, shape) for shape in shapes]
    truth = with_saved(drawn_trace(periods, asked), saved, asked)
    found = bound(known, "train", truth.signature)
    for mine, most in zip(truth.moments, found.moments, strict=True):
        assert mine.saved_bytes <= most.saved_bytes
        assert mine.rest_bytes <= most.rest_bytes
    assert all(
        mine <= most
        for mine, most in zip(
            truth.non_model_within(kept), found.non_model_within(kept), strict=True
        )
    )
    both = envelope([*known, truth])
    assert covers(found, truth) and all(covers(both, one) for one in (*known, truth))


def test_a_trace_covers_none_of_which_less_may_leave_the_device():
    known = with_saved(drawn_trace([[[(1, 1, 7)]]], (4, 100)), [[[(1, 1, 5)]]], (4, 100))
    (moment,) = known.moments
    stays = replace(known, moments=(replace(moment, saved_bytes=moment.saved_bytes - 10),))
    assert covers(stays, known) and covers(known, stays, noise_bytes=10)
    assert not covers(known, stays, noise_bytes=9)
    unknown = replace(known, moments=(replace(moment, saved_bytes=0),))
    assert covers(known, unknown)  # of which nobody has counted it
    added = with_bytes_added(known, 3).moments[0]
    assert (added.rest_bytes, added.saved_bytes) == (moment.rest_bytes + 3, moment.saved_bytes)
    less = with_bytes_added(known, -moment.non_model_bytes + 1).moments[0]
    assert (less.rest_bytes, less.saved_bytes) == (0, 1)


def test_a_known_trace_is_its_own_bound_and_chords_are_as_near_as_convex_functions_allow():
    periods = [[[(1, 1, 7), (0, 2, 3)]]]
    low, high = (drawn_trace(periods, (4, length)) for length in (100, 200))
    assert bound([low, high], "train", low.signature).moments == low.moments
    truth = drawn_trace(periods, (4, 150))
    found = bound([low, high], "train", truth.signature).peak_non_model_bytes
    assert 1 <= found / truth.peak_non_model_bytes <= 1.25


@given(st.integers(1, 50), st.integers(0, 2000), st.integers(2, 400))
def test_between_lengths_a_fourfold_apart_a_sum_is_passed_by_a_quarter_at_most(e, d, c):
    """Attention that writes its weights beside what grows with the length, and what does not."""
    periods = [[[(0, 2, e), (0, 1, d), (0, 0, c)]]]
    known = [drawn_trace(periods, (4, length)) for length in (50, 200)]
    for length in (60, 100, 150):
        truth = drawn_trace(periods, (4, length))
        found = bound(known, "train", truth.signature).peak_non_model_bytes
        assert 1 <= found / truth.peak_non_model_bytes <= 1.25 + 1e-3
    square = [drawn_trace([[[(0, 2, e)]]], (4, length)) for length in (50, 200, 120)]
    assert bound(square[:2], "train", square[2].signature).moments == square[2].moments


def test_what_is_not_alike_has_no_bound():
    known = [drawn_trace([[[(1, 1, 7)]]], (4, 100))]
    assert bound(known, "train", "int64[4, 100],int64[4, 100]") is None
    assert bound(known, "train", "float32[4, 100]") is None
    assert bound(known, "train", "") is None and bound([], "train", known[0].signature) is None


def test_an_envelope_has_the_most_of_every_period_and_other_calls_count_with_their_peak():
    low, high = (drawn_trace([[[(1, 1, 7)]]] * 2, (4, length)) for length in (10, 20))
    assert covers(envelope([high, low]), high) and envelope([high, low]).signature == low.signature
    other = drawn_trace([[[(1, 1, 9)]]] * 3, (4, 30))
    assert covers(envelope([other, low]), other)
    assert not covers(low, high) and covers(low, high, noise_bytes=7 * 4 * 10)
    assert with_bytes_added(low, -(1 << 40)).peak_non_model_bytes == 0


class Attention(nn.Module):
    """Writes its weights, so bytes grow with the square of the length."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 8)
        self.mix, self.head = nn.Linear(8, 24), nn.Linear(8, 50)

    def forward(self, ids):
        q, k, v = self.mix(self.embed(ids)).chunk(3, dim=-1)
        return self.head((q @ k.transpose(1, 2) / math.sqrt(8)).softmax(-1) @ v)


@pytest.mark.parametrize(("known", "asked"), [
    ([(4, 16)], (4, 128)), ([(4, 16), (4, 64)], (4, 32)), ([(4, 64)], (4, 16)),
    ([(1, 64)], (4, 64)), ([(1, 16), (4, 16)], (2, 32)),
])  # fmt: skip
def test_a_traced_model_asks_for_no_more_than_its_bound(known, asked):
    traces = [trace(Attention(), (torch.zeros(shape, dtype=torch.int64),)) for shape in known]
    truth = trace(Attention(), (torch.zeros(asked, dtype=torch.int64),))
    assert covers(bound(traces, "train", truth.signature), truth)
