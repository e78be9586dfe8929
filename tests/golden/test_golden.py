"""What must not change while the step is rebuilt: bits and prices; see `tests.golden`."""

import itertools
import json
from pathlib import Path

import pytest

from bench.shared.workers import run_ranks
from tests.golden.bits import HOMES, KINDS, UPDATES, bits
from tests.golden.prices import PLANS, prices

GOLDEN = json.loads(Path(__file__).with_name("golden.json").read_text(encoding="utf-8"))
CELLS = [(kind, home, update) for kind in KINDS for home in HOMES for update in UPDATES]
# eager norms are summed in fp32 by rows of a shard, so their clip depends on how many there are
OF_SHARDS = [cell for cell in CELLS if cell[0] != "rounded"]


@pytest.mark.parametrize(
    "home, update",
    [
        pytest.param(home, update, marks=[pytest.mark.ci] if update == "tail" else [])
        for home, update in itertools.product(HOMES, UPDATES)
    ],
)
def test_bits_are_those_of_the_file(home, update, tmp_path):
    """One kind in each cell."""
    kind = list(KINDS)[(3 * list(HOMES).index(home) + list(UPDATES).index(update)) % len(KINDS)]
    assert bits(kind, home, update, tmp_path) == GOLDEN["bits"][kind]


def _of_two_ranks(rank, folder, kind, home, update):
    return bits(kind, home, update, Path(folder))


@pytest.mark.ci
@pytest.mark.parametrize("cell", OF_SHARDS[::23], ids="-".join)
def test_bits_at_two_ranks_are_the_same(cell, tmp_path):
    found = run_ranks(_of_two_ranks, 2, str(tmp_path), *cell)
    assert found == [GOLDEN["bits"][cell[0]]] * 2


@pytest.mark.deep
@pytest.mark.parametrize("cell", CELLS, ids="-".join)
def test_bits_are_the_same_everywhere(cell, tmp_path):
    assert bits(*cell, tmp_path) == GOLDEN["bits"][cell[0]]


@pytest.mark.deep
@pytest.mark.parametrize("cell", OF_SHARDS, ids="-".join)
def test_bits_at_two_ranks_are_the_same_everywhere(cell, tmp_path):
    found = run_ranks(_of_two_ranks, 2, str(tmp_path), *cell)
    assert found == [GOLDEN["bits"][cell[0]]] * 2


@pytest.mark.parametrize("name", PLANS)
def test_prices_are_those_of_the_file(name):
    assert prices(name) == pytest.approx(GOLDEN["prices"][name], rel=1e-9)
