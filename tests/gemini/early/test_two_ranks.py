"""Blocks of two ranks that are updated in backward: each decides alone, and all are told alike."""

import errno
from dataclasses import replace

import pytest

from bench.shared.models import token_loss
from bench.shared.workers import run_ranks
from optim.rules.speculation import Habit
from tests.support.disks.faults import failing
from tests.support.loops.early import (
    BETWEEN,
    UPDATES,
    Iteration,
    Sometimes,
    interrupted,
    num_early,
    patient,
    program,
    reported,
)
from tests.support.loops.endings import check_told, one_step, serially
from tests.support.loops.tails import (
    SCHEDULES,
    absent,
    batches,
    differences,
    everything,
    run,
    wrapped,
)

pytestmark = pytest.mark.ci

CASES = {
    **{name: (schedule, {}) for name, schedule in SCHEDULES.items()},
    **{f"between: {name}": (interrupted(BETWEEN[name]), {})
       for name in ("scales one", "clips by hand", "drops one", "writes a weight", "reads state")},
    "partly": (SCHEDULES["skips"], {"fraction": 0.4}),
    "clipped": (SCHEDULES["plain"], {"max_norm": 0.1}),
    "absent": (absent, {"module": Sometimes}),
    "drawn": (program([
        Iteration(), Iteration(), Iteration(2), Iteration(2, synced=False),
        Iteration(stepless=True), Iteration(), Iteration(skipped=True), Iteration(),
    ]), {}),
}  # fmt: skip


def every_schedule(rank):
    found, counts = {}, {}
    for name, (schedule, options) in CASES.items():
        with run(schedule, "serial", **options) as (model, optimizer, _):
            serial = everything(model, optimizer)
        for update in UPDATES:
            got, reports = reported(schedule, update, **options)
            found[name, update] = differences(got, serial)
            counts[name, update] = sum(r.held for r in reports), sum(r.redone for r in reports)
    return found, counts


def test_every_schedule_has_the_bits_of_serial_steps_on_every_rank():
    ranks = run_ranks(every_schedule, 2)
    for found, counts in ranks:
        assert found == {(name, update): [] for name in CASES for update in UPDATES}
        # what is sure to be clipped is left to the step, and who writes state drops all
        idle = {"clips", "clipped", "writes"}
        assert {name for (name, _), (held, _) in counts.items() if held} >= CASES.keys() - idle
        for update in UPDATES:
            assert counts["plain", update][1] == 0 < counts["skips", update][1]
    for update in UPDATES:  # of what is absent one rank has nothing
        assert any(counts["absent", update][1] for _, counts in ranks)


def alone(rank):
    """Rank 1 has learned that it should not."""
    model, optimizer = wrapped("both")
    if rank:
        speculation = model.engine.speculation
        speculation.learned = replace(speculation.learned, habit=Habit(100))
    with patient():
        for batch in batches(3):
            one_step(model, optimizer, batch)
    found, early = optimizer.last_report.speculation.held, num_early(optimizer)
    got = everything(model, optimizer)
    optimizer.close()
    _, want = serially(batches(3))
    return found / early, differences(got, want)


def test_each_rank_decides_alone():
    assert run_ranks(alone, 2) == [(1.0, []), (0.0, [])]


def faults(rank, update, every):
    """Transfers of a step that begins in backward fail on each rank in turn; what differed."""
    *first, third, fourth = batches(4)
    before, after = serially([*first, third])
    model, optimizer = wrapped(update)
    for batch in first:
        one_step(model, optimizer, batch)
    everything(model, optimizer)
    state = optimizer.targets[0].tiered_state.nvme
    cases = [("preadv", i) for i in range(2 * num_early(optimizer))]
    parts = state.store.layout.num_blocks  # planes and weights
    cases += [("pwritev", i) for i in range(parts)] + [("fdatasync", 0)]
    said, wrong = [], []
    for number, (call, at) in enumerate(cases[::-every]):
        guilty = number % 2
        part = state.store.paths[0].name if rank == guilty else "of no file"
        with patient(), failing(call, errno.EIO, part, after=at, times=1):
            token_loss(model, third).backward()
            try:
                optimizer.step()
                optimizer.zero_grad()
                loss = token_loss(model, fourth)
                loss.backward()
                said.append("nothing")
            except Exception as error:
                said.append(f"{type(error).__name__}: {error}")
        optimizer.zero_grad()
        wrong += differences(everything(model, optimizer), before)
    one_step(model, optimizer, third)
    wrong += differences(everything(model, optimizer), after)
    optimizer.close()
    return said, wrong


def check_faults(every):
    check_told(run_ranks(faults, 2, "both", every, processes=True))


def test_a_disk_that_fails_on_one_rank_undoes_the_step_on_all():
    check_faults(every=4)


@pytest.mark.ci
def test_every_transfer_that_fails_on_one_rank_undoes_the_step_on_all():
    check_faults(every=1)


def test_other_collectives_than_those_of_serial_steps_are_not_issued():
    """What a rank does in backward is its own affair; there is one group more for the tail."""
    found = run_ranks(sequences, 2)
    assert found[0] == found[1]
    assert found[0]["speculate"] == found[0]["serial"]


def sequences(rank):
    found = {}
    for update in ("serial", "speculate"):
        model, optimizer = wrapped(update)
        digests = []
        for batch in batches(3):
            token_loss(model, batch).backward()
            digests.append(model.engine.comm.log.digest)
            optimizer.step()
            optimizer.zero_grad()
        found[update] = digests
        optimizer.close()
    return found
