"""Drawn programs at several ranks: the updates of torch, or an error."""

import pytest

from tests.support.loops.programs import run_many
from tests.support.workers import run_ranks

pytestmark = pytest.mark.dist


@pytest.mark.parametrize(("world_size", "first", "count"), [(2, 0, 120), (3, 500, 60)])
def test_drawn_programs_have_the_updates_of_torch_or_are_refused(world_size, first, count):
    for report in run_ranks(run_many, world_size, first, count):
        assert report.wrong == ()
        assert report.ran > 0.9 * count
