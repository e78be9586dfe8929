"""A kill at every moment of a run: in place of each call that changes a file."""

import pytest

from tests.support import corpus
from tests.support.loops.kills import RUNS


@pytest.mark.timeout(0)
@pytest.mark.parametrize("run", RUNS)
def test_a_kill_at_every_moment_leaves_the_last_step_or_save_whole(run, tmp_path):
    with corpus.keeping("kills", run=run):
        RUNS[run](tmp_path, None)
