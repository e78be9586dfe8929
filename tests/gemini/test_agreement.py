import functools
import math
import operator

from hypothesis import given
from hypothesis import strategies as st

from gemini.comm.ballot import Agreement, Ballot, Scope

ballots = st.builds(
    Ballot,
    power_sum=st.floats(0, 1e30),
    present=st.tuples(st.booleans(), st.booleans(), st.booleans()),
    first_nonfinite=st.none() | st.integers(0, 2),
    deviated=st.booleans(),
    io_failed=st.booleans(),
)


@given(st.lists(ballots, min_size=1, max_size=4), st.randoms())
def test_all_ranks_learn_what_each_said_whatever_the_order_of_the_sum(said, random):
    w = len(said)
    vectors = [ballot.encode(Scope(rank, w)) for rank, ballot in enumerate(said)]
    random.shuffle(vectors)
    total = [sum(column) for column in zip(*vectors, strict=True)]
    agreed = Agreement.decode(total, Scope(0, w))
    assert agreed.present == tuple(any(b.present[i] for b in said) for i in range(3))
    assert agreed.deviated == tuple(r for r, b in enumerate(said) if b.deviated)
    assert agreed.io_failed == tuple(r for r, b in enumerate(said) if b.io_failed)
    bad = [(b.first_nonfinite, r) for r, b in enumerate(said) if b.first_nonfinite is not None]
    assert agreed.nonfinite == min(bad, default=None)
    if not bad:
        in_order = functools.reduce(operator.add, (b.power_sum for b in said))
        assert agreed.power_sum == in_order
    texts = [ballot.to_text() for ballot in said]
    assert Agreement.of(list(map(Ballot.from_text, texts)), Scope(0, w)) == agreed or bad


def test_power_sums_are_added_in_the_order_of_ranks():
    said = [Ballot(2.0**53, (True,)), Ballot(1.0, (True,)), Ballot(1.0, (True,))]
    vectors = [ballot.encode(Scope(rank, 3)) for rank, ballot in enumerate(said)]
    total = [sum(column) for column in zip(*reversed(vectors), strict=True)]
    assert Agreement.decode(total, Scope(0, 3)).power_sum == 2.0**53


def test_a_nan_on_one_rank_spoils_no_other_slot():
    said = [Ballot(math.nan, (True,), first_nonfinite=0), Ballot(4.0, (True,))]
    total = [sum(c) for c in zip(*(b.encode(Scope(r, 2)) for r, b in enumerate(said)), strict=True)]
    assert all(math.isfinite(value) for value in total)
    assert Agreement.decode(total, Scope(0, 2)).nonfinite == (0, 0)
