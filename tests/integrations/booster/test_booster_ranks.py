"""Every plugin, and sizes of it above 1, trains, saves, loads and resumes as torch's DDP does, at 2
ranks; some at 4 and at 1, from what was saved at another size."""

from functools import partial

import pytest

from bench.shared.models import token_loss
from bench.shared.workers import run_ranks
from tests.integrations.cases.boosted import HALF, MICRO, NAMES, ROWS, STEPS, all_runs, made, part
from tests.integrations.cases.meshed import (
    CUT,
    SPLIT,
    pipeline_runs,
    sequential,
    split_runs,
    splittable,
)

FEW = ["gemini", "zero2-late", "fsdp"]
FEW_SPLIT = ["tp-replicas", "tp-sequence", "hybrid-tp-zero2"]
# fp32, and sums over ranks and micro-batches in another order than DDP's
TOLERANCE = 1e-5


def cases(names, few):
    return [*((2, name) for name in names), *((n, name) for n in (4, 1) for name in few)]


def some(runs, names, few, rank, here, before):
    return runs(rank, names if before is None else few, here, before)


def at_all_sizes(work, tmp_path_factory):
    """(world size -> results of all ranks), each resuming from checkpoints of the one before."""
    found, before = {}, None
    for world_size in (2, 4, 1):
        here = str(tmp_path_factory.mktemp(f"ranks{world_size}"))
        found[world_size] = run_ranks(work, world_size, here, before)
        before = here
    return found


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return at_all_sizes(partial(some, all_runs, [*NAMES], FEW), tmp_path_factory)


@pytest.fixture(scope="module")
def split(tmp_path_factory):
    return at_all_sizes(partial(some, split_runs, [*SPLIT], FEW_SPLIT), tmp_path_factory)


@pytest.fixture(scope="module")
def cut(tmp_path_factory):
    return at_all_sizes(pipeline_runs, tmp_path_factory)


def check(results, name, make):
    """With no_sync accumulation, clipping by norm and value, a StepLR made before; and what goes on
    from the checkpoint of another plugin at another size."""
    module, *_ = make("untrained")
    before = sum(token_loss(module, part(STEPS - 1, i, (0, 1))) / MICRO for i in range(MICRO))
    for wanted, losses, resumed, *_ in results:
        assert losses[name] == pytest.approx(wanted, rel=TOLERANCE)
        assert resumed[name] == pytest.approx(wanted[HALF:], rel=TOLERANCE)
        # it trains, so that a wrong update shows
        assert wanted[-1] != pytest.approx(float(before.detach()), rel=100 * TOLERANCE)


@pytest.mark.ci
@pytest.mark.parametrize(("world_size", "name"), cases(NAMES, FEW))
def test_plugins_train_and_resume_as_ddp(plain, name, world_size):
    check(plain[world_size], name, made)


def test_one_rank_trains_and_resumes_in_the_fast_tests(tmp_path):
    names = ["gemini", "zero2", "ddp"]
    results = run_ranks(all_runs, 1, names, str(tmp_path), None)
    for name in names:
        check(results, name, made)


@pytest.mark.ci
@pytest.mark.parametrize(("world_size", "name"), cases(SPLIT, FEW_SPLIT))
def test_layers_that_ranks_split_train_and_resume_as_ddp(split, name, world_size):
    check(split[world_size], name, splittable)


@pytest.mark.ci
@pytest.mark.parametrize("world_size", [2, 4, 1])
@pytest.mark.parametrize("name", CUT)
def test_a_pipeline_trains_and_resumes_as_ddp(cut, name, world_size):
    check(cut[world_size], name, sequential)


@pytest.mark.ci
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("name", CUT)
def test_an_evaluation_gives_all_rows_on_the_last_stage(cut, name, world_size):
    seen = [found[3][name] for found in cut[world_size]]
    given = [found for found in seen if found["loss"] is not None]
    assert len(given) == world_size // 2
    assert all(found["outputs"].shape == (2 * ROWS // world_size, 10, 97) for found in given)
    assert all(f["outputs"] is None for f in seen if f["loss"] is None)
