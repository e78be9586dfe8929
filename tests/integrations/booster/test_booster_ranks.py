"""Every plugin trains, saves, loads and resumes as torch's DDP does, at 2 ranks; some of them
at 4 and at 1."""

import pytest

from bench.shared.workers import run_ranks
from tests.integrations.cases.boosted import HALF, NAMES, all_runs

FEW = ["gemini", "zero2-late", "fsdp"]
CASES = [*((2, name) for name in NAMES), *((4, name) for name in FEW), *((1, n) for n in FEW)]
# fp32, and sums over ranks in another order than DDP's
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """(world size -> its results), each resuming from checkpoints of the one before."""
    found, before = {}, None
    for world_size, names in ((2, NAMES), (4, FEW), (1, FEW)):
        here = str(tmp_path_factory.mktemp(f"ranks{world_size}"))
        found[world_size] = run_ranks(all_runs, world_size, names, here, before)[0]
        before = here
    return found


@pytest.mark.ci
@pytest.mark.parametrize(("world_size", "name"), CASES)
def test_losses_are_those_of_ddp(runs, name, world_size):
    """With no_sync accumulation, clipping by norm and value, and a StepLR made before."""
    wanted, losses, *_ = runs[world_size]
    assert losses[name] == pytest.approx(wanted, rel=TOLERANCE)
    assert wanted[-1] < 0.9 * wanted[0]  # it trains, so that a wrong update shows


@pytest.mark.ci
@pytest.mark.parametrize(("world_size", "name"), CASES)
def test_training_resumes_from_another_plugin_at_another_world_size(runs, name, world_size):
    wanted, _, resumed, _ = runs[world_size]
    assert resumed[name] == pytest.approx(wanted[HALF:], rel=TOLERANCE)


def test_one_rank_trains_and_resumes_in_the_fast_tests(tmp_path):
    names = ["gemini", "zero2", "ddp"]
    wanted, losses, resumed, _ = run_ranks(all_runs, 1, names, str(tmp_path), None)[0]
    for name in names:
        assert losses[name] == pytest.approx(wanted, rel=TOLERANCE)
        assert resumed[name] == pytest.approx(wanted[HALF:], rel=TOLERANCE)
