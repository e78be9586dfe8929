"""A run that goes on from a checkpoint removes what processes before it left, but for later steps,
and these once a checkpoint of its own has them.

A killed process is one whose files are copied while it lives and put back after its end: nobody
holds their locks then, as after a kill (tests/nvme/test_orphans.py kills).
"""

import shutil

import pytest

import nvme
from bench.shared.models import Tower
from bench.shared.threads import run_threads
from gemini import load_checkpoint, save_checkpoint
from optim import HybridAdam, NvmeConfig
from tests.support.checkpoints import ADAM, batches, make, train


def make_plain():
    module = Tower()
    config = NvmeConfig(block_numel=1024)
    return module, HybridAdam(module.parameters(), nvme_offload_fraction=1.0, nvme=config, **ADAM)


@pytest.fixture
def disk(tmp_path, monkeypatch):
    """The folder of all state on disk."""
    folder = tmp_path / "disk"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    return folder


def killed(optimizer):
    """Ends it; its files stay, and nobody holds them."""
    paths = [path for store in optimizer.stores for path in store.paths]
    for path in paths:
        shutil.copy(path, path.with_suffix(".copy"))
    optimizer.close()
    for path in paths:
        path.with_suffix(".copy").rename(path)
    return set(paths)


def run_for(made, first, last, world_size=1):
    train(*made, batches(first, last, world_size))
    return made


@pytest.mark.parametrize("kind", ["wrapped", "plain"])
def test_a_later_checkpoint_removes_what_every_process_before_it_left(kind, disk, tmp_path):
    def begin():
        return make("nvme") if kind == "wrapped" else make_plain()

    of_another_run = killed(run_for(begin(), 0, 1)[1])

    first = run_for(begin(), 0, 2)
    save_checkpoint(tmp_path / "at 2", *first)
    run_for(first, 2, 3)
    of_first = killed(first[1])

    second = begin()
    load_checkpoint(tmp_path / "at 2", *second)
    assert set(nvme.orphans(disk)) == of_another_run | of_first  # step 3 is in no checkpoint
    save_checkpoint(tmp_path / "at 2 again", *second)
    assert set(nvme.orphans(disk)) == of_another_run | of_first
    run_for(second, 2, 4)
    save_checkpoint(tmp_path / "at 4", *second)
    assert set(nvme.orphans(disk)) == of_another_run
    run_for(second, 4, 5)
    of_second = killed(second[1])

    third = begin()
    load_checkpoint(tmp_path / "at 4", *third)
    assert set(nvme.orphans(disk)) == of_another_run | of_second  # its third step, the run's fifth
    save_checkpoint(tmp_path / "at 5", *run_for(third, 4, 5), async_save=True).wait()
    assert set(nvme.orphans(disk)) == of_another_run
    killed(third[1])

    fourth = begin()
    load_checkpoint(tmp_path / "at 5", *fourth)
    assert set(nvme.orphans(disk)) == of_another_run
    fourth[1].close()


def test_the_optimizer_alone_is_not_all_that_files_of_a_run_hold(disk, tmp_path):
    first = run_for(make("nvme"), 0, 1)
    save_checkpoint(tmp_path / "state", *first, weights=False)
    left = killed(first[1])
    second = make("nvme")
    load_checkpoint(tmp_path / "state", *second, weights=False)
    assert set(nvme.orphans(disk)) == left
    second[1].close()


@pytest.mark.ci
def test_one_rank_removes_the_files_of_two(disk, tmp_path):
    def work(rank):
        made = run_for(make("nvme"), 0, 1, world_size=2)
        save_checkpoint(tmp_path / "a", *made)
        return len(killed(made[1]))

    assert run_threads(work, 2, backend="gloo") == [1, 1]
    assert len(nvme.orphans(disk)) == 2
    made = make("nvme")
    load_checkpoint(tmp_path / "a", *made)
    assert nvme.orphans(disk) == ()
    made[1].close()
