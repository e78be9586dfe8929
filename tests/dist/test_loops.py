"""The loops of tests/gemini/calls/test_loops.py, and drawn programs, at several ranks: torch's
updates on every one, or an error.

Every rank has the same batches, so the mean over ranks is what one process of plain torch has.
"""

import pytest

from bench.shared.workers import run_ranks
from tests.support.loops.cases import BUILDS, LOOPS
from tests.support.loops.programs import run_many
from tests.support.loops.sides import Net, difference

pytestmark = pytest.mark.ci

BOUNDS = {"clip by norm 1": 1e-5}  # torch adds the magnitudes of a tensor up in fp32
# of 24 layers: where plain torch's own updates move by 2e-5 and 7e-6 when its gradients are rounded
# once more (6e-8 of each element)
DEEP = {"adversaries": 4e-5, "grad scaled up": 1e-5}
CASES = [  # ranks, place, and by how much fp32 sums in another order may differ
    (2, "resident", 1e-6),
    (2, "host", 1e-6),
    (2, "nvme", 1e-6),
    (2, "files", 3e-6),  # 24 layers
    (3, "resident", 2e-6),  # a third is no fp32 number
    (3, "zero2", 2e-6),
]


def all_loops(rank, place, names):
    found = {}
    for name in names:
        try:
            found[name] = difference(LOOPS[name], BUILDS.get(name, Net), place)
        except Exception as error:
            raise AssertionError(f"{name} at {place}") from error
    return found


@pytest.mark.parametrize(("world_size", "place", "bound"), CASES)
def test_loops_written_for_torch_have_the_updates_of_torch(world_size, place, bound):
    of_operators = (world_size, place) == (2, "resident")
    names = [name for name in LOOPS if of_operators or "place" not in name]
    if not of_operators:  # two of the other five cases for each loop, or one and "files"
        case, share = CASES.index((world_size, place, bound)), 1 if place == "files" else 2
        names = [name for i, name in enumerate(names) if (i + case) % 5 < share]
    if place == "files":  # in one process: tests/gemini/training/test_unfreeze.py
        names = [name for name in names if not name.startswith("unfrozen")]
    found = run_ranks(all_loops, world_size, place, names)[0]
    bounds = BOUNDS | DEEP if place == "files" else BOUNDS
    wrong = {name: error for name, error in found.items() if error > bounds.get(name, bound)}
    assert len(found) == len(names) and not wrong


@pytest.mark.parametrize(("world_size", "first", "count"), [(2, 0, 40), (3, 500, 20)])
def test_drawn_programs_have_the_updates_of_torch_or_are_refused(world_size, first, count):
    for report in run_ranks(run_many, world_size, first, count):
        assert report.wrong == ()
        assert report.ran > 0.9 * count
