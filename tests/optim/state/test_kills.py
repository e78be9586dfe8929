"""A process killed at any moment of a run: what it had done is on disk, whole."""

import pytest

from tests.support.loops.kills import RUNS


@pytest.mark.ci
@pytest.mark.parametrize("run", RUNS)
def test_a_kill_at_any_moment_leaves_the_last_step_or_save_whole(run, tmp_path):
    """At ten moments; `tests/deep` has all."""
    RUNS[run](tmp_path, 10)
