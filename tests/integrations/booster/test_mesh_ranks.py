"""Plugins' sizes above 1 train, save, load and resume as torch's DDP does, at 2 ranks; some of them
at 4 and 1, from what was saved at another size."""

import pytest

from bench.shared.models import token_loss
from bench.shared.workers import run_ranks
from tests.integrations.cases.boosted import HALF, MICRO, ROWS, STEPS, part
from tests.integrations.cases.meshed import (
    CUT,
    SPLIT,
    pipeline_runs,
    sequential,
    split_runs,
    splittable,
)

pytestmark = pytest.mark.ci

FEW = ("tp-replicas", "tp-sequence", "hybrid-tp-zero2")
SPLIT_CASES = [*((2, name) for name in SPLIT), *((4, name) for name in FEW), *((1, n) for n in FEW)]
# fp32, and sums over ranks and micro-batches in another order than DDP's
TOLERANCE = 1e-5


def at_all_sizes(work, tmp_path_factory):
    """(world size -> results of all ranks), each resuming from checkpoints of the one before."""
    found, before = {}, None
    for world_size in (2, 4, 1):
        here = str(tmp_path_factory.mktemp(f"ranks{world_size}"))
        found[world_size] = run_ranks(work, world_size, here, before)
        before = here
    return found


def some_split_runs(rank, here, before):
    return split_runs(rank, list(SPLIT) if before is None else list(FEW), here, before)


@pytest.fixture(scope="module")
def split(tmp_path_factory):
    return at_all_sizes(some_split_runs, tmp_path_factory)


@pytest.fixture(scope="module")
def cut(tmp_path_factory):
    return at_all_sizes(pipeline_runs, tmp_path_factory)


def check(results, name, made):
    module, *_ = made("untrained")
    before = sum(token_loss(module, part(STEPS - 1, i, (0, 1))) / MICRO for i in range(MICRO))
    for wanted, losses, resumed, *_ in results:
        assert losses[name] == pytest.approx(wanted, rel=TOLERANCE)
        assert resumed[name] == pytest.approx(wanted[HALF:], rel=TOLERANCE)
        # it trains, so that a wrong update shows
        assert wanted[-1] != pytest.approx(float(before.detach()), rel=100 * TOLERANCE)


@pytest.mark.parametrize(("world_size", "name"), SPLIT_CASES)
def test_layers_that_ranks_split_train_and_resume_as_ddp(split, name, world_size):
    """With accumulation, clipping by norm and value, a StepLR made before; from another size."""
    check(split[world_size], name, splittable)


@pytest.mark.parametrize("world_size", [2, 4, 1])
@pytest.mark.parametrize("name", CUT)
def test_a_pipeline_trains_and_resumes_as_ddp(cut, name, world_size):
    check(cut[world_size], name, sequential)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("name", CUT)
def test_an_evaluation_gives_all_rows_on_the_last_stage(cut, name, world_size):
    seen = [found[3][name] for found in cut[world_size]]
    given = [found for found in seen if found["loss"] is not None]
    assert len(given) == world_size // 2
    assert all(found["outputs"].shape == (2 * ROWS // world_size, 10, 97) for found in given)
    assert all(f["outputs"] is None for f in seen if f["loss"] is None)
