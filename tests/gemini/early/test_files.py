"""Updates in backward where parameters and gradients are in files: under budgets of RAM."""

import dataclasses
import warnings
import weakref
from contextlib import ExitStack
from unittest import mock

import pytest
import torch
from torch import nn

import gemini
from bench.shared.models import seeded, token_loss
from gemini import AutoPlacement, BudgetWarning
from gemini.placement.tiers import Tier
from optim.state.nvme_state import NvmeState
from optim.step.speculation import Speculation
from tests.support.disks.waiting import when_waited
from tests.support.loops.budgets import MIXED, in_files, within
from tests.support.loops.early import (
    UPDATES,
    Iteration,
    Sometimes,
    outcome,
    patient,
    program,
    same,
    serial,
)
from tests.support.loops.tails import (
    SCHEDULES,
    absent,
    batches,
    differences,
    held_updates,
    one_step,
    run,
    stepped,
    wrapped,
)

STEPS = 2  # behind which blocks are updated in backward


def test_parameters_and_gradients_are_in_files_and_in_memory():
    """Or these tests would be of nothing."""
    with run(SCHEDULES["plain"], "speculate", **within()) as (model, *_):
        assert in_files(model) == (6, 2)
    with run(SCHEDULES["plain"], "both", **within(MIXED)) as (model, *_):
        assert in_files(model) == (3, 1)


def test_a_block_whose_parameters_are_in_a_file_leaves_the_step_nothing():
    """It is not brought again; parameters are written, and gradients read, once."""
    model, optimizer = wrapped("speculate", **within(MIXED))
    with patient():
        for batch in batches(STEPS):
            one_step(model, optimizer, batch)
        files = model.engine.storage.params, model.engine.storage.gradient_files.files[0]
        moved = [dataclasses.replace(each.store.traffic) for each in files]
        token_loss(model, batches(STEPS + 1)[-1]).backward()
        with ExitStack() as counted:
            brought = [  # a row is one or the other
                counted.enter_context(
                    mock.patch.object(NvmeState, name, autospec=True, side_effect=real)
                )
                for name, real in (("planes", NvmeState.planes), ("fetched", NvmeState.fetched))
            ]
            optimizer.step()
    params, gradients = (each.store.traffic for each in files)
    assert params.written_bytes - moved[0].written_bytes == files[0].written_bytes_per_step
    written = gradients.written_bytes - moved[1].written_bytes
    assert gradients.read_bytes - moved[1].read_bytes == written > 0
    state, chunks = optimizer.targets[0].tiered_state.nvme, optimizer.targets[0].trained
    in_memory = sum(chunks[block.shard].files is None for block in state.blocks)
    not_early = len(state.blocks) - optimizer.last_report.speculation.held
    num_brought = sum(each.call_count for each in brought)
    assert 0 < in_memory <= num_brought <= in_memory + not_early < len(state.blocks)
    optimizer.close()


@pytest.mark.parametrize("update", ["speculate", "both"])
def test_gradients_are_gone_when_they_are_dropped_also_beside_one_in_a_file(update):
    """Those of the device, whose memory the plan gives to the next forward."""
    model, optimizer = wrapped(update, **within(MIXED))
    with patient():
        for batch in batches(STEPS + 1):
            token_loss(model, batch).backward()
            kept = [weakref.ref(c.grad.untyped_storage()) for c in model.engine.chunks
                    if c.grad is not None]  # fmt: skip
            optimizer.step()
            optimizer.last_report.behind.wait()
            optimizer.zero_grad()
        assert kept and any(c.gradient.offload for c in model.engine.chunks)
    assert optimizer.last_report.speculation.held > 0
    assert not any(ref() is not None for ref in kept)
    optimizer.close()


CHANGES = {
    "scales": lambda param: param.grad.mul_(0.5),
    "drops": lambda param: setattr(param, "grad", None),
    "assigns": lambda param: setattr(param, "grad", torch.full_like(param, 0.01)),
}


def changes_in_turn(model, optimizer):
    """A gradient in a file, in every other step."""
    for step, batch in enumerate(batches(2 * len(CHANGES) + 1)):
        token_loss(model, batch).backward()
        if step % 2:
            assert model.engine.chunks[-1].gradient.offloaded_dtype is not None
            changed = model.module.get_parameter("layers.3.3.weight")
            list(CHANGES.values())[step // 2](changed)
        optimizer.step()
        optimizer.zero_grad()
        yield


def test_only_the_blocks_of_a_gradient_that_was_changed_in_its_file_are_done_again():
    found = same(changes_in_turn, "speculate", "files").early
    assert all(0 < report.redone < report.held for report in found[1::2])


class Deep(Sometimes):
    """Of more parameters than its buffers have room for."""

    def __init__(self) -> None:
        super().__init__()
        with seeded():
            self.first = nn.Sequential(nn.Linear(5, 65), *(nn.Linear(65, 65) for _ in range(12)))
            self.last = nn.Linear(65, 17)


@pytest.mark.ci
@pytest.mark.parametrize("update", ["speculate", pytest.param("both", marks=pytest.mark.ci)])
def test_parameters_without_a_gradient_keep_their_bits_and_counts(update):
    inputs = torch.zeros(4, 5), 1
    traced = gemini.trace(Deep(), inputs, loss=lambda out: out.float().sum())
    policy = AutoPlacement("200KiB")
    found = same(absent, update, module=Deep, trace=traced, placement_policy=policy)
    assert found.redone > 0 < found.in_files[0]


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
    found = same(SCHEDULES["plain"], "both", **tight)
    assert [report.speculated for report in found.early] == [0] * 4
    model, optimizer = wrapped("speculate", **tight)
    lines = model.explain("layers.0.1.weight").splitlines()
    assert model.engine.planning.result.overlapped.keys() <= {"tail"}
    optimizer.close()
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


# -- who changes what is read or written --


def test_a_weight_that_is_replaced_behind_a_backward_is_alone():
    """Its file counts at once, and nothing that a step may yet take back counts with it."""
    model, optimizer = stepped("speculate", STEPS, **within())
    with patient():
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
    model, optimizer = stepped("speculate", STEPS, **within())
    ended, stop = [], Speculation.stop

    def told(self):
        with when_waited(held.go_on):
            stop(self)
        ended.append(self.is_idle)

    with held_updates() as held, mock.patch.object(Speculation, "stop", told):
        token_loss(model, batches(STEPS + 1)[-1]).backward()
        chunk = next(c for c in reversed(model.engine.chunks) if c.gradient.offloaded_dtype)
        assert not ended
        chunk.gradient.change(lambda grad: grad.mul_(0.5), wide=False)
        assert ended == [True]
    optimizer.step()
    optimizer.close()


EVALUATIONS = program([Iteration(between="evaluates")] * 4)


@pytest.mark.parametrize("update", ["serial", "tail", *UPDATES])
def test_an_evaluation_before_a_step_leaves_no_weights_of_before_it(update):
    """The second one is planned, and keeps what it gathers for the next; the step changes that."""
    want = serial(EVALUATIONS).values
    found = outcome(EVALUATIONS, update, **within("245KiB")).values
    weights = {name: want[name] for name in found if "/" not in name}
    assert differences({name: found[name] for name in weights}, weights) == []
