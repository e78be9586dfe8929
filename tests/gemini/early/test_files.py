"""Updates in backward where parameters and gradients are in files: under budgets of RAM."""

import dataclasses
import errno
import time
import warnings
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import gemini
import nvme
from bench.shared.models import token_loss
from bench.shared.workers import run_ranks
from gemini import AutoPlacement, BudgetWarning
from gemini.memtracer.monitor import ProcessMonitor
from gemini.placement.tiers import Tier
from optim.state.nvme_state import NvmeState
from optim.step.speculation import Speculation
from optim.update.updaters import CpuUpdater
from tests.support.disks.faults import failing
from tests.support.loops.budgets import MIXED, MOST_IN_FILES, SHARED, in_files, stores, within
from tests.support.loops.early import (
    BETWEEN,
    HELD_BY,
    UPDATES,
    Iteration,
    Sometimes,
    interrupted,
    iterations,
    num_early,
    patient,
    program,
    reported,
    same,
    serial,
)
from tests.support.loops.endings import one_step, serially
from tests.support.loops.tails import (
    SCHEDULES,
    absent,
    batches,
    differences,
    everything,
    run,
    wrapped,
)

STEPS = 2  # behind which blocks are updated in backward


@pytest.fixture(autouse=True)
def model_data_alone(monkeypatch):
    """What libraries allocate once in a process does not decide what is in files."""
    monkeypatch.setattr(ProcessMonitor, "period", lambda monitor: 0)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("budget, update", [(MOST_IN_FILES, "speculate"), (MIXED, "both")])
def test_every_schedule_has_the_bits_of_serial_steps(name, budget, update):
    for reports in same(SCHEDULES[name], updates=[update], **within(budget)):
        assert reports[0].speculated == 0
        assert (sum(r.held for r in reports) > 0) == (name not in ("clips", "writes"))


def test_parameters_and_gradients_are_in_files_and_in_memory():
    """Or these tests would be of nothing."""
    with run(SCHEDULES["plain"], "speculate", **within()) as (model, *_):
        assert in_files(model) == (6, 2)
    with run(SCHEDULES["plain"], "both", **within(MIXED)) as (model, *_):
        assert in_files(model) == (3, 1)


def test_all_blocks_but_those_that_were_read_ahead_are_updated_in_backward():
    with patient(), run(SCHEDULES["plain"], "speculate", **within()) as (_, optimizer, _):
        found = optimizer.last_report.speculation
        assert found.speculated == found.held == num_early(optimizer) > 20


def test_a_block_whose_parameters_are_in_a_file_leaves_the_step_nothing():
    """It is not brought again; parameters are written, and gradients read, once."""
    model, optimizer = wrapped("speculate", **within(MIXED))
    with patient():
        for batch in batches(STEPS):
            one_step(model, optimizer, batch)
        files = model.engine.storage.params, model.engine.storage.gradient_files.files[0]
        moved = [dataclasses.replace(each.store.traffic) for each in files]
        token_loss(model, batches(STEPS + 1)[-1]).backward()
        with mock.patch.object(
            NvmeState, "bring", autospec=True, side_effect=NvmeState.bring
        ) as brought:
            optimizer.step()
    params, gradients = (each.store.traffic for each in files)
    assert params.written_bytes - moved[0].written_bytes == files[0].written_bytes_per_step
    written = gradients.written_bytes - moved[1].written_bytes
    assert gradients.read_bytes - moved[1].read_bytes == written > 0
    state, chunks = optimizer.targets[0].tiered_state.nvme, optimizer.targets[0].trained
    in_memory = sum(chunks[block.shard].files is None for block in state.blocks)
    not_early = len(state.blocks) - optimizer.last_report.speculation.held
    assert 0 < in_memory <= brought.call_count - 1 <= in_memory + not_early < len(state.blocks)
    optimizer.close()


@pytest.mark.parametrize("name", BETWEEN)
def test_what_a_user_does_between_backward_and_step_counts(name):
    (reports,) = same(interrupted(BETWEEN[name]), updates=["speculate"], **within())
    touched = [r for step, r in enumerate(reports) if step % 2]
    if name in HELD_BY:
        assert [r.redone for r in touched] == [0, 0] and all(r.held for r in touched)
    else:
        assert sum(r.redone for r in touched) > 0


CHANGES = {
    "scales": lambda param: param.grad.mul_(0.5),
    "drops": lambda param: setattr(param, "grad", None),
    "assigns": lambda param: setattr(param, "grad", torch.full_like(param, 0.01)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_only_the_blocks_of_a_gradient_that_was_changed_in_its_file_are_done_again(name):
    def between(model, optimizer):
        chunk = model.engine.chunks[-1]
        assert chunk.gradient.offloaded_dtype is not None
        CHANGES[name](model.module.get_parameter("layers.3.3.weight"))

    ((_, found, *_),) = same(interrupted(between), updates=["speculate"], **within())
    assert 0 < found.redone < found.held


class Deep(Sometimes):
    """Of more parameters than its buffers have room for."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(5, 65), *(nn.Linear(65, 65) for _ in range(12)))
        self.last = nn.Linear(65, 17)


def test_parameters_without_a_gradient_keep_their_bits_and_counts():
    inputs = torch.zeros(4, 5), 1
    traced = gemini.trace(Deep(), inputs, loss=lambda out: out.float().sum())
    beside = {"module": Deep, "trace": traced, "placement_policy": AutoPlacement("200KiB")}
    found = same(absent, **beside)
    assert all(sum(r.redone for r in reports) > 0 for reports in found)
    with run(absent, "speculate", **beside) as (model, *_):
        assert in_files(model)[0] > 0


@given(st.lists(iterations, min_size=3, max_size=7), st.booleans())
@settings(max_examples=6, suppress_health_check=[HealthCheck.too_slow])
def test_every_program_has_the_bits_of_serial_steps(drawn, hurried):
    same(program([Iteration(), *drawn]), updates=["speculate"], hurried=hurried, **within())


@pytest.mark.ci
@given(st.lists(iterations, min_size=3, max_size=9), st.sampled_from(UPDATES),
       st.booleans(), st.sampled_from(["245KiB", MOST_IN_FILES, MIXED]))  # fmt: skip
@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])
def test_very_many_programs_have_the_bits_of_serial_steps(drawn, update, hurried, budget):
    turns = program([Iteration(), *drawn])
    same(turns, updates=[update], hurried=hurried, **within(budget))


# -- memory --


def test_buffers_of_these_updates_are_in_the_plan_and_pass_no_budget():
    model, optimizer = wrapped("speculate", **within())
    ledger, plan = model.engine.manager.ledger, model.engine.planning
    most = 0
    with patient(), warnings.catch_warnings():
        warnings.simplefilter("error", BudgetWarning)
        for batch in batches(5):
            token_loss(model, batch).backward()
            staging = model.engine.storage.staging_bytes
            most = max(most, staging - sum(f.staging_bytes for f in model.engine.storage.files))
            assert ledger.totals()[Tier.DEVICE] <= plan.plan.budgets.device
            optimizer.step()
            optimizer.zero_grad()
    planned = plan.plan.device_staging
    assert most == plan.inputs.num_ahead * (planned.param_bytes + planned.grad_bytes) > 0
    optimizer.close()


def test_a_budget_without_room_for_them_has_serial_steps():
    tight = {"placement_policy": AutoPlacement("130KiB")}
    for reports in same(SCHEDULES["plain"], **tight):
        assert [r.speculated for r in reports] == [0] * 4
    with run(SCHEDULES["plain"], "speculate", **tight) as (model, *_):
        lines = model.explain("layers.0.1.weight").splitlines()
        assert model.engine.planning.result.speculation is None
    because = "its budget has no room for blocks under way"
    assert f"update: in step(), and none in backward, as {because}" in lines


@pytest.mark.parametrize("lacks", [0, 1])
def test_a_write_budget_has_room_for_what_is_written_twice(lacks):
    """Of parameters, too."""
    model, optimizer = wrapped("speculate", **within())
    with patient():
        for batch in batches(STEPS):
            one_step(model, optimizer, batch)
        state, storage = optimizer.targets[0].tiered_state.nvme, model.engine.storage
        twice = state.written_bytes_per_step + storage.params.written_bytes_per_step
        once = sum(files.written_bytes_per_step for files in storage.gradient_files.files)
        meter = state.store.meter
        meter.budget = meter.written_bytes + 2 * twice + once - lacks
        one_step(model, optimizer, batches(STEPS + 1)[-1])
    assert (optimizer.last_report.speculation.speculated > 0) == (not lacks)
    optimizer.close()


# -- faults --


@pytest.mark.parametrize("kind", ["parameters", "gradients", "state"])
@pytest.mark.parametrize("call", ["preadv", "pwritev"])
def test_a_transfer_that_fails_is_told_and_loses_nothing(call, kind):
    """By the pass or by the step; then all can be done again."""
    before, again = serially(batches(STEPS + 1), **within())
    model, optimizer = wrapped("speculate", **within())
    for batch in batches(STEPS):
        one_step(model, optimizer, batch)
    everything(model, optimizer)
    third, store = batches(STEPS + 1)[STEPS], stores(model, optimizer)[kind]
    name, half = store.paths[0].name, store.layout.num_blocks // 2
    for number in (0, half - 1, half):
        fails, told = (
            failing(call, errno.EIO, name, after=number, times=1),
            pytest.raises(nvme.TransferError, match="EIO"),
        )
        with patient(), fails as failed, told:
            token_loss(model, third).backward()
            optimizer.step()
        assert len(failed) == 1
        optimizer.zero_grad()
        assert differences(everything(model, optimizer), before) == [], number
    one_step(model, optimizer, third)
    assert differences(everything(model, optimizer), again) == []
    optimizer.close()


# -- ranks --


def on_ranks(rank):
    found = {}
    cases = {**SCHEDULES, **{n: interrupted(BETWEEN[n]) for n in ("scales one", "drops one")}}
    for name, schedule in cases.items():
        policy = within(SHARED)
        with run(schedule, "serial", **policy) as (model, optimizer, _):
            serial, there = everything(model, optimizer), in_files(model)
        got, reports = reported(schedule, "speculate", **policy)
        found[name] = differences(got, serial), sum(r.held for r in reports), there
    return found


@pytest.mark.ci
def test_two_ranks_have_the_bits_of_serial_steps():
    for found in run_ranks(on_ranks, 2):
        assert {name: different for name, (different, *_) in found.items() if different} == {}
        assert found["plain"][1] > 0 and found["plain"][2][0] > 0


# -- who changes what is read or written --


def test_a_weight_that_is_replaced_behind_a_backward_is_alone():
    """Its file counts at once, and nothing that a step may yet take back counts with it."""
    model, optimizer = wrapped("speculate", **within())
    with patient():
        for batch in batches(STEPS):
            one_step(model, optimizer, batch)
        storage = model.engine.storage
        chunks = {c: model.engine.chunks[c] for c in storage.params}
        before = {c: chunk.load_shard() for c, chunk in chunks.items()}
        token_loss(model, batches(STEPS + 1)[-1]).backward()
        first = next(iter(chunks))
        storage.replace(first, torch.zeros_like(before[first]))
    assert not chunks[first].load_shard().any()
    for c, values in before.items():
        assert c == first or torch.equal(chunks[c].load_shard(), values)
    optimizer.close()


def test_a_gradient_in_a_file_is_changed_when_nobody_reads_it():
    """Updates under way end first: what they read is written over."""
    model, optimizer = wrapped("speculate", **within())
    for batch in batches(STEPS):
        one_step(model, optimizer, batch)
    running, ended = [], []
    update, stop = CpuUpdater.update_staged, Speculation.stop

    def slowly(self, *args):
        running.append(self)
        time.sleep(0.02)
        return update(self, *args)

    def told(self):
        stop(self)
        ended.append(self.is_idle)

    slow = mock.patch.object(CpuUpdater, "update_staged", slowly)
    with slow, mock.patch.object(Speculation, "stop", told):
        token_loss(model, batches(STEPS + 1)[-1]).backward()
        chunk = next(c for c in reversed(model.engine.chunks) if c.gradient.offloaded_dtype)
        assert running and not ended
        chunk.gradient.change(lambda grad: grad.mul_(0.5), wide=False)
        assert ended == [True]
    optimizer.step()
    optimizer.close()


def test_an_evaluation_before_a_step_leaves_no_weights_of_before_it():
    """The second one is planned, and keeps what it gathers for the next; the step changes that."""
    turns = program([Iteration(between="evaluates") for _ in range(4)])
    want = serial(turns)
    for update in ("serial", "tail", *UPDATES):
        found = reported(turns, update, **within("245KiB"))[0]
        weights = {name: want[name] for name in found if "/" not in name}
        assert differences({name: found[name] for name in weights}, weights) == []
