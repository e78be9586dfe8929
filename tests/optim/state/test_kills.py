"""A process killed at any moment of a run: what it had done is on disk, whole."""

import pytest

from tests.support import corpus
from tests.support.loops.kills import RUNS

FOUND = corpus.read("kills").values()


@pytest.mark.ci
@pytest.mark.parametrize("run", RUNS)
def test_a_kill_at_any_moment_leaves_the_last_step_or_save_whole(run, tmp_path):
    """At five moments; `tests/deep` has all."""
    RUNS[run](tmp_path, 5)


@pytest.mark.parametrize("run", sorted({find["run"] for find in FOUND}))
def test_what_a_kill_once_left_is_whole(run, tmp_path):
    RUNS[run](tmp_path, [find["change"] for find in FOUND if find["run"] == run])
