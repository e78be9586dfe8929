"""Power lost at any point of a store's life: the last commit is there, whole."""

import pytest

from tests.support import corpus
from tests.support.disks.crashes import explore, replay
from tests.support.disks.lives import LAYOUTS, MANY, of_interest, recorded_life

FOUND = corpus.read("crashes")
KINDS = pytest.mark.parametrize("kind", LAYOUTS)


@KINDS
def test_a_power_loss_leaves_the_last_commit_whole(kind, tmp_path):
    log, check = recorded_life(tmp_path, "store", kind, 5, 0)
    after = of_interest(kind)
    explored = explore(log, tmp_path / "after", check, samples=1, most=50, after=after)
    assert explored > (20 if kind == MANY else 150)


@pytest.mark.ci
@KINDS
def test_a_power_loss_leaves_the_last_commit_whole_in_any_of_hundreds_of_states(kind, tmp_path):
    """2000 with those of checkpoints; `tests/deep` has ten times as many."""
    log, check = recorded_life(tmp_path, "store", kind, 12, 1)
    after = of_interest(kind)
    explored = explore(log, tmp_path / "after", check, samples=20, most=40, after=after)
    assert explored > (50 if kind == MANY else 400)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("name", FOUND)
def test_what_a_power_loss_once_left_is_whole(name, tmp_path):
    """Of stores and of checkpoints."""
    find = FOUND[name]
    log, check = recorded_life(tmp_path, *find["life"])
    replay(log, tmp_path / "after", check, find["at"], find["kept"])
