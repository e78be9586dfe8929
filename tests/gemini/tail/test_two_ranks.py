"""Steps with a tail at two ranks: gathers wait, all learn of a disk that fails."""

import errno

import pytest
import torch.distributed as dist

import gemini
from bench.shared.models import token_loss
from bench.shared.workers import run_ranks
from gemini import AutoPlacement
from tests.support.disks.faults import failing
from tests.support.disks.waiting import waiting
from tests.support.loops.endings import check_told, faults
from tests.support.loops.schedules import (
    KERNELS,
    Iteration,
    Sometimes,
    interrupted,
    program,
    same,
    short,
)
from tests.support.loops.tails import (
    SCHEDULES,
    absent,
    batches,
    differences,
    everything,
    held_updates,
    on_host,
    stepped,
    wrapped,
)

pytestmark = pytest.mark.ci

PART = ("scales one", "clips by hand", "drops one", "writes a weight", "reads state")
DRAWN = (
    Iteration(), Iteration(), Iteration(2), Iteration(2, synced=False), Iteration(stepless=True),
    Iteration(), Iteration(skipped=True), Iteration(),
)  # fmt: skip
WHAT = {
    **SCHEDULES,
    "absent": absent,
    "interrupted": interrupted(*PART),
    "drawn": program(DRAWN),
}


def rows():
    """Every schedule on a disk, and in files or elsewhere. All pairs at one rank: test_bits.py."""
    others = ("partly on disk", "host", "budget", "host, parameters", "host, gradients")
    for i, what in enumerate(WHAT):
        for home in ("disk", "shared files" if i % 2 else others[i // 2 % len(others)]):
            if not ("files" in home and what == "absent"):
                yield what, home
    yield from (("plain", "replicas"), ("plain", "untimed"))
    yield from (("absent", "kernels, parameters"), ("absent", "kernels and disk"))


def every_schedule(rank):
    found = {}
    for what, home in rows():
        schedule = short(WHAT[what], 3) if home in KERNELS else WHAT[what]
        got = same(schedule, "tail", home, **({"module": Sometimes} if what == "absent" else {}))
        found[what, home] = any(got.tails), got.in_files[0]
    precise = {"fp32": {"precision": "fp32", "max_norm": 0.1}, "rounded": {"master_weights": False}}
    for name, options in precise.items():
        assert all(same(SCHEDULES["evaluates"], "tail", **options).tails), name
    return found


def test_every_schedule_has_the_bits_of_serial_steps_on_every_rank():
    ranks = run_ranks(every_schedule, 2, processes=True)
    for found in ranks:
        for (what, home), (has_tail, in_files) in found.items():
            assert has_tail or home in ("budget", "untimed"), (what, home)
            assert (in_files > 0) == (home == "shared files"), (what, home)


def disks_fail(rank, home, every, options):
    """Transfers of a step fail on each rank in turn."""
    return faults("tail", home, every=every, guilty=lambda number: number % 2 == rank, **options)


@pytest.mark.parametrize("home, every, options", [
    ("disk", 2, {}), ("partly on disk", 1, {"precision": "fp32"}), ("shared files", 3, {}),
    ("shared files", 3, {"placement_policy": AutoPlacement("420KiB")}),
])  # fmt: skip
def test_a_disk_that_fails_on_one_rank_undoes_the_step_on_all(home, every, options):
    ranks = run_ranks(disks_fail, 2, home, every, options, processes=True)
    check_told(ranks)


def slow_rank(rank):
    """Rank 1's disk waits until both have looked: a step counts when it does on every rank."""
    model, optimizer = stepped("tail", 1)
    first, second = batches(2)
    token_loss(model, second).backward()
    dist.barrier()
    with waiting("pwritev", "gemini-" if rank else "of no file") as disk:
        optimizer.step()
        early = optimizer.last_report.committed
        optimizer.zero_grad()
        dist.barrier()
        disk.answer()
        token_loss(model, first).backward()
        late = optimizer.last_report.committed
    optimizer.close()
    return early, late


def test_a_step_counts_when_it_does_on_every_rank():
    assert run_ranks(slow_rank, 2, processes=True) == [(False, True)] * 2


def asks(rank):
    """A disk fails on rank 0, and all ranks ask for something else than a backward."""
    said = []
    for ask in (
        lambda m, o: m.state_dict(),
        lambda m, o: o.state_dict(),
        lambda m, o: m.summon_full_params().__enter__(),
        lambda m, o: m.digest(),
        lambda m, o: list(m.named_parameters())[-1][1].sum(),
    ):
        model, optimizer = stepped("tail", 1)
        before, second = everything(model, optimizer), batches(2)[1]
        name = optimizer.targets[0].tiered_state.nvme.store.paths[0].name
        token_loss(model, second).backward()
        with failing("pwritev", errno.EIO, name if rank == 0 else "of no file", after=5, times=1):
            optimizer.step()
            optimizer.zero_grad()
            try:
                ask(model, optimizer)
                said.append("nothing")
            except Exception as error:
                said.append(type(error).__name__)
        said += differences(everything(model, optimizer), before)
        optimizer.close()
    return said


def test_all_ranks_are_told_by_what_they_ask_first():
    assert run_ranks(asks, 2, processes=True) == [["TransferError"] * 5, ["RuntimeError"] * 5]


def tears(rank, folder):
    """An update ends in its middle on rank 0, behind a step of all."""
    first, second = batches(2)
    model, optimizer = stepped("tail", 1, **on_host("cpu"))
    gemini.save_checkpoint(folder, model, optimizer)
    before, said = everything(model, optimizer), []

    def step(batch):
        try:
            token_loss(model, batch).backward()
            optimizer.step()
            said.append("stepped")
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")

    step(second)
    everything(model, optimizer)
    with held_updates(fails_at=3 if rank == 0 else 1000):
        step(first)
        step(second)  # its backward asks first
    step(second)
    optimizer.zero_grad()
    gemini.load_checkpoint(folder, model, optimizer)
    wrong = differences(everything(model, optimizer), before)
    step(second)
    wrong += [] if everything(model, optimizer) else ["nothing"]
    optimizer.close()
    return said, wrong


def test_an_update_that_ends_in_its_middle_is_told_to_all_ranks(tmp_path):
    (torn, wrong), (other, wrong_there) = run_ranks(tears, 2, tmp_path / "saved", processes=True)
    assert wrong == wrong_there == []
    assert [said.split(":")[0] for said in torn] == [
        "stepped", "stepped", "MemoryError", "RuntimeError", "stepped"
    ]  # fmt: skip
    assert [said.split(":")[0] for said in other] == [
        "stepped", "stepped", "RuntimeError", "RuntimeError", "stepped"
    ]  # fmt: skip
    assert "updates on ranks [0] ended in their middle" in other[2] and "no room" in other[2]
    for said in (torn[3], other[3]):
        assert "of two steps; load a checkpoint" in said


def zero_stages(rank):
    """What is kept gathered would be gathered again by the step: it stays serial."""
    policies = ("zero1", "zero2")
    return [same(SCHEDULES["plain"], "tail", placement_policy=policy).tails for policy in policies]


def test_zero_1_and_2_step_serially():
    assert run_ranks(zero_stages, 2, processes=True) == [[[False] * 4] * 2] * 2


def refused(rank):
    try:
        wrapped("tail" if rank else "serial")
    except ValueError as error:
        return str(error)
    return "nothing"


def test_ranks_that_ask_for_different_updates_are_refused():
    ranks = run_ranks(refused, 2, processes=True)
    assert all("tail" in said and "serial" in said for said in ranks)


def test_a_world_without_a_tail_makes_no_group():
    assert run_ranks(groups, 2, processes=True) == [(1, 2)] * 2


def groups(rank):
    def count():
        return len(dist.distributed_c10d._world.pg_map)

    _, optimizer = wrapped("serial")
    before = count()
    optimizer.close()
    _, optimizer = wrapped("tail")
    optimizer.close()
    return before, count()


def sequences(rank):
    found = {}
    for update in ("serial", "tail"):
        model, optimizer = wrapped(update)
        found[update] = []
        for batch in batches(3):
            token_loss(model, batch).backward()
            found[update].append(model.engine.comm.log.digest)
            optimizer.step()
            optimizer.zero_grad()
        optimizer.close()
    return found


def test_other_collectives_than_those_of_serial_steps_are_not_issued():
    """What a rank does in backward is its own affair; there is one group more for the tail."""
    found = run_ranks(sequences, 2, processes=True)
    assert found[0] == found[1]
    assert found[0]["tail"] == found[0]["serial"]
