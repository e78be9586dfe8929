"""Disks that fail in backward: the step is undone, told, and can be taken again. Each transfer in
turn: `tail/test_faults.py`."""

import errno
from dataclasses import replace
from unittest import mock

import pytest

import nvme
from bench.shared.models import token_loss
from nvme import BlockStore
from optim.rules.speculation import Habit
from optim.step.driver import TargetStep
from tests.support.disks.faults import failing, flip
from tests.support.disks.waiting import waiting, when_waited
from tests.support.loops.budgets import stores
from tests.support.loops.early import HOMES, UPDATES, patient
from tests.support.loops.endings import behind_steps, faults
from tests.support.loops.tails import batches, differences, everything, one_step, stepped

STEPS = 2  # behind which blocks are updated in backward


def some_of_each_kind(model, optimizer, update):
    """Reads and writes of parameters, gradients and state: the first, and one in the middle."""
    return [
        (store.paths[0].name, call, number)
        for store in stores(model, optimizer).values()
        for call in ("preadv", "pwritev")
        for number in (0, store.layout.num_blocks // 2)
    ]


def test_a_transfer_of_files_that_fails_is_told_and_loses_nothing():
    """By the pass or by the step; then all can be done again."""
    found = faults("speculate", "files", cases=some_of_each_kind)
    assert found.wrong == [] and found.all_told and len(found.said) == 12
    assert set(found.told_by) == {"backward before it", "step"}


@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("call", ["preadv", "pwritev"])
def test_gradients_are_there_for_the_step_taken_again(call, update):
    """What failed in backward is told by the step, which has lost nothing."""
    model, optimizer = stepped(update, STEPS)
    name = optimizer.targets[0].tiered_state.nvme.store.paths[0].name
    with patient(), failing(call, errno.EIO, name, after=5, times=1):
        token_loss(model, batches(STEPS + 1)[STEPS]).backward()
        with pytest.raises(nvme.TransferError, match="EIO"):
            optimizer.step()
    optimizer.step()
    assert optimizer.last_report.speculation.held == 0
    assert differences(everything(model, optimizer), behind_steps(STEPS + 1)) == []
    optimizer.close()


@pytest.mark.parametrize("update", UPDATES)
def test_a_disk_that_fails_costs_no_buffer(update):
    """A step reads what was written before it, and is told there that it never was."""
    model, optimizer = stepped(update, STEPS)
    state = optimizer.targets[0].tiered_state.nvme
    in_use = state.num_in_use
    for batch in batches(STEPS + 4)[STEPS:]:
        gone = mock.patch.object(BlockStore, "read_uncommitted", side_effect=OSError("on purpose"))
        with patient(), gone, pytest.raises(OSError, match="on purpose"):
            token_loss(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            token_loss(model, batch).backward()  # a tail is told here
        optimizer.zero_grad()
        everything(model, optimizer)
        assert state.num_in_use <= in_use
    one_step(model, optimizer, batches(STEPS + 1)[STEPS])
    assert differences(everything(model, optimizer), behind_steps(STEPS + 1)) == []
    optimizer.close()


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_weight_or_master_that_does_not_read_back_undoes_the_step(precision):
    """Of a block that is held: the step reads it again, and trusts its checksum."""
    model, optimizer = stepped("both", STEPS, precision=precision)
    state = optimizer.targets[0].tiered_state.nvme
    first, second = batches(STEPS + 2)[STEPS:]
    with patient():
        token_loss(model, first).backward()
    block = state.store.layout.num_blocks - 1
    versions = state.store.layout.extents()[block]
    (written,) = [e for e in versions if e != state.store.committed_extent(block)]
    flip(state.store.paths[0], written.offset + 2)
    optimizer.step()
    assert optimizer.last_report.speculation.held > 10
    optimizer.zero_grad()
    with pytest.raises(nvme.ChecksumError, match=f"offset {written.offset} "):
        token_loss(model, second).backward()
    optimizer.zero_grad()
    assert differences(everything(model, optimizer), behind_steps(STEPS, precision=precision)) == []
    one_step(model, optimizer, first)
    assert (
        differences(everything(model, optimizer), behind_steps(STEPS + 1, precision=precision))
        == []
    )
    optimizer.close()


def test_an_error_of_what_nobody_needs_is_nobodys():
    """The gradients are dropped before a step asks for what was done with them."""
    model, optimizer = stepped("both", STEPS)
    name = optimizer.targets[0].tiered_state.nvme.store.paths[0].name
    with patient(), failing("pwritev", errno.EIO, name, after=5, times=1) as failed:
        token_loss(model, batches(1)[0]).backward()
        optimizer.zero_grad()
    assert len(failed) == 1
    one_step(model, optimizer, batches(STEPS + 1)[STEPS])
    assert differences(everything(model, optimizer), behind_steps(STEPS + 1)) == []
    optimizer.close()


def test_an_optimizer_is_closed_while_blocks_are_updated_in_backward():
    model, optimizer = stepped("both", STEPS)
    path = optimizer.targets[0].tiered_state.nvme.store.paths[0]
    with waiting("pwritev", "gemini-") as disk, when_waited(disk.answer) as waited:
        token_loss(model, batches(1)[0]).backward()
        disk.until_asked()
        optimizer.close()
    assert waited
    assert not path.exists()


def of_one_weight(model, optimizer):
    """A step that leaves all others alone."""
    model.module.get_parameter("layers.3.3.weight").square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return everything(model, optimizer)


@pytest.mark.parametrize("home", ["disk", "files"])
def test_what_was_done_before_a_step_that_ctrl_c_kept_from_beginning_does_not_count(home):
    model, optimizer = stepped("speculate", STEPS, **HOMES[home]())
    with patient():
        token_loss(model, batches(STEPS + 1)[-1]).backward()
    with (
        mock.patch.object(TargetStep, "submit", side_effect=KeyboardInterrupt),
        mock.patch.object(TargetStep, "undo"),  # as where it comes before the step has begun
        pytest.raises(KeyboardInterrupt),
    ):
        optimizer.step()
    optimizer.zero_grad()
    speculation = model.engine.target.speculation
    never = Habit(quiet_steps=9)
    speculation.learned = replace(speculation.learned, quiet_steps=0, habit=never)
    got = of_one_weight(model, optimizer)
    want = of_one_weight(*stepped("serial", STEPS, **HOMES[home]()))
    assert differences(got, want) == []
    optimizer.close()
