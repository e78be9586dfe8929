"""The tail at two ranks: gathers wait, all ranks learn of a disk that fails, and undo the step."""

import errno

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from bench.shared.models import Choosy, token_loss
from bench.shared.workers import run_ranks
from tests.support.disks.faults import failing
from tests.support.disks.waiting import waiting
from tests.support.loops.endings import check_told, one_step, serially
from tests.support.loops.tails import (
    SCHEDULES,
    absent,
    batches,
    differences,
    everything,
    has_tail,
    run,
    wrapped,
)

pytestmark = pytest.mark.ci

CASES = {
    **{name: (schedule, {}) for name, schedule in SCHEDULES.items()},
    "partly": (SCHEDULES["clips"], {"fraction": 0.4}),
    "fp32": (SCHEDULES["skips"], {"precision": "fp32", "max_norm": 0.1}),
    "rounded": (SCHEDULES["plain"], {"master_weights": False}),
    "absent": (absent, {"module": Choosy}),
    "replicas": (SCHEDULES["plain"], {"mesh": 1}),
}


def options_of(options):
    made = dict(options)
    if "module" in made:
        made["module"] = made["module"]()
    if "mesh" in made:
        names = ("replicate", "shard")
        made["mesh"] = init_device_mesh("cpu", (2, 1), mesh_dim_names=names)
    return made


def every_schedule(rank):
    found = {}
    for name, (schedule, options) in CASES.items():
        serial_and_tail = []
        for update in ("serial", "tail"):
            with run(schedule, update, **options_of(options)) as (model, optimizer, tails):
                assert any(tails) == (update == "tail"), (name, tails)
                serial_and_tail.append(everything(model, optimizer))
        found[name] = differences(serial_and_tail[1], serial_and_tail[0])
    return found


def test_every_schedule_has_the_bits_of_serial_steps_on_every_rank():
    for found in run_ranks(every_schedule, 2):
        assert found == {name: [] for name in CASES}


def faults(rank, options):
    """Every call of a tail fails on each rank in turn. What was said, and what differed."""
    first, second, third = batches(3)
    before, after = serially([first, second], **options)
    model, optimizer = wrapped("tail", **options)
    one_step(model, optimizer, first)
    state = optimizer.targets[0].tiered_state.nvme
    store, ahead = state.store, state.num_reads_begun
    cases = [("preadv", i) for i in range(len(state.blocks) - ahead)]
    cases += [("pwritev", i) for i in range(store.layout.num_blocks)] + [("fdatasync", 0)]
    said, wrong = [], []
    for number, (call, at) in enumerate(cases):
        guilty = number % 2
        part = store.paths[0].name if rank == guilty else "of no file"
        token_loss(model, second).backward()
        with failing(call, errno.EIO, part, after=at, times=1):
            optimizer.step()
            assert has_tail(optimizer)
            optimizer.zero_grad()
            loss = token_loss(model, third)
            try:
                loss.backward()
                said.append("nothing")
            except Exception as error:
                said.append(f"{type(error).__name__}: {error}")
        wrong += [] if not optimizer.last_report.committed else [f"{call} {at} is committed"]
        optimizer.zero_grad()
        wrong += differences(everything(model, optimizer), before)
    one_step(model, optimizer, second)
    wrong += differences(everything(model, optimizer), after)
    optimizer.close()
    return said, wrong


@pytest.mark.parametrize("options", [{}, {"fraction": 0.4, "precision": "fp32"}],
                         ids=["all on disk", "partly"])  # fmt: skip
def test_a_disk_that_fails_on_one_rank_undoes_the_step_on_all(options):
    check_told(run_ranks(faults, 2, options, processes=True))


def slow_rank(rank):
    """Rank 1's disk waits: rank 0's gathers wait for nobody, and its step counts when both do."""
    model, optimizer = wrapped("tail")
    first, second = batches(2)
    one_step(model, optimizer, first)
    everything(model, optimizer)
    token_loss(model, second).backward()
    dist.barrier()
    with waiting("pwritev", "gemini-" if rank else "of no file") as disk:
        optimizer.step()
        early = optimizer.last_report.committed
        optimizer.zero_grad()
        if rank == 1:
            disk.answer_in(0.2)
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
        model, optimizer = wrapped("tail")
        first, second = batches(2)
        one_step(model, optimizer, first)
        before = everything(model, optimizer)
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


def zero_stages(rank):
    """What is kept gathered would be gathered again by the step: it stays serial."""
    found = []
    for policy in ("zero1", "zero2"):
        with run(SCHEDULES["plain"], "tail", placement_policy=policy) as (model, optimizer, tails):
            found.append((tails, everything(model, optimizer)))
        with run(SCHEDULES["plain"], "serial", placement_policy=policy) as (model, optimizer, _):
            assert differences(everything(model, optimizer), found[-1][1]) == []
    return [tails for tails, _ in found]


def test_zero_1_and_2_step_serially():
    assert run_ranks(zero_stages, 2) == [[[False] * 4] * 2] * 2


def refused(rank):
    try:
        wrapped("tail" if rank else "serial")
    except ValueError as error:
        return str(error)
    return "nothing"


def test_ranks_that_ask_for_different_updates_are_refused():
    assert all("tail" in said and "serial" in said for said in run_ranks(refused, 2))


def test_a_world_without_a_tail_makes_no_group():
    assert run_ranks(groups, 2) == [(1, 2)] * 2


def groups(rank):
    def count():
        return len(dist.distributed_c10d._world.pg_map)

    _, optimizer = wrapped("serial")
    before = count()
    optimizer.close()
    _, optimizer = wrapped("tail")
    optimizer.close()
    return before, count()
