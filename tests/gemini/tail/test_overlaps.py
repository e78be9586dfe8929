"""Drawn programs of steps that overlap a pass, with disks that fail: the bits of serial steps."""

from unittest import mock

import pytest

from bench.shared.workers import run_ranks
from optim.state.slabs import Slab
from tests.support import corpus
from tests.support.loops.overlaps import AREA, is_wrong, run_found, run_many

FOUND = corpus.read(AREA)


@pytest.mark.parametrize(("first", "count"), [(0, 3), pytest.param(3, 12, marks=pytest.mark.ci)])
def test_drawn_programs_end_with_the_bits_of_serial_steps(first, count):
    assert run_many(0, first, count) == []


@pytest.mark.ci
def test_drawn_programs_at_two_ranks_end_with_the_bits_of_serial_steps():
    assert run_ranks(run_many, 2, 10_000, 4, processes=True) == [[], []]


@pytest.mark.ci
@pytest.mark.parametrize("name", FOUND)
def test_programs_that_were_kept_end_with_the_bits_of_serial_steps(name):
    ranks, program = FOUND[name]["ranks"], FOUND[name]["program"]
    if ranks == 1:
        assert is_wrong(program) is None
    else:
        found = run_ranks(run_found, ranks, [program], processes=True)
        assert found == [[None]] * ranks


def test_a_program_whose_early_spans_do_not_count_is_wrong():
    program = FOUND["a-disk-fails-in-a-tail-behind-early-spans"]["program"]
    with mock.patch.object(Slab, "take_over", Slab.drop):
        wrong = is_wrong(program)
    assert wrong is not None and "differs" in wrong
