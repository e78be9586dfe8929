"""Power lost at any point of a life: more than 20 000 contents that the disk may then have."""

import pytest

from tests.support import corpus
from tests.support.disks.crashes import explore
from tests.support.disks.lives import LAYOUTS, MANY, drawn_saves, of_interest, recorded_life

pytestmark = [
    pytest.mark.timeout(0),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]


@pytest.mark.parametrize("kind", LAYOUTS)
def test_a_power_loss_leaves_the_last_commit_whole_in_any_of_thousands_of_states(kind, tmp_path):
    life, samples = ["store", kind, 12, 1], 20 if kind == MANY else 200
    log, check = recorded_life(tmp_path, *life)
    with corpus.keeping("crashes", life=life):
        explored = explore(
            log, tmp_path / "after", check, samples=samples, after=of_interest(kind)
        )  # fmt: skip
    print(f"{explored} states of a store in {kind}")
    assert explored > (50 if kind == MANY else 3400)


def test_a_power_loss_while_saving_leaves_whole_checkpoints_in_any_of_thousands_of_states(tmp_path):
    life = ["saves", drawn_saves(24, 0)]
    log, check = recorded_life(tmp_path, *life)
    with corpus.keeping("crashes", life=life):
        explored = explore(log, tmp_path / "after", check, samples=60)
    print(f"{explored} states of checkpoints")
    assert explored > 4000
