"""Disks that fail in backward or behind it: the step is undone, told, and can be taken again."""

import errno
import time

import pytest

import nvme
from bench.shared.models import token_loss
from tests.support.disks.faults import failing, flip
from tests.support.disks.waiting import waiting
from tests.support.loops.early import UPDATES, patient
from tests.support.loops.endings import one_step
from tests.support.loops.tails import batches, differences, everything, wrapped

STEPS = 2  # behind which blocks are updated in backward


def stepped(update, steps, **options):
    model, optimizer = wrapped(update, **options)
    for batch in batches(steps):
        one_step(model, optimizer, batch)
    everything(model, optimizer)
    return model, optimizer


def wait(*args):
    """Until the step asks."""
    time.sleep(0.02)


def serial(steps, **options):
    model, optimizer = stepped("serial", steps, **options)
    found = everything(model, optimizer)
    optimizer.close()
    return found


def fail_one_by_one(update, every):
    """Each transfer of a step in turn; of what its backward, itself and what is behind it say."""
    model, optimizer = stepped(update, STEPS)
    state = optimizer.targets[0].tiered_state.nvme
    name, blocks, ahead = state.store.paths[0].name, len(state.blocks), state.num_reads_begun
    before, again = serial(STEPS), serial(STEPS + 1)
    third, fourth = batches(STEPS + 2)[STEPS:]
    # read to be updated, and again where they are held; written once each
    cases = [("preadv", i) for i in range(2 * (blocks - ahead))]
    parts = state.store.layout.num_blocks  # planes and weights
    cases += [("pwritev", i) for i in range(parts)] + [("fdatasync", 0)]
    told_by = set()
    for call, number in cases[::-every]:
        with failing(call, errno.EIO, name, after=number, times=1) as failed:
            token_loss(model, third).backward()
            try:
                optimizer.step()
            except nvme.TransferError as error:
                assert "EIO" in str(error)
                told_by.add("step")
            else:
                told_by.add("backward")
                optimizer.zero_grad()
                loss = token_loss(model, fourth)
                with pytest.raises(nvme.TransferError, match=f"{name}.*EIO"):
                    loss.backward()
        assert len(failed) == 1, (call, number)
        optimizer.zero_grad()
        assert differences(everything(model, optimizer), before) == [], (call, number)
    one_step(model, optimizer, third)
    assert optimizer.last_report.speculation.held > 10
    assert differences(everything(model, optimizer), again) == []
    optimizer.close()
    return told_by


def test_a_transfer_that_fails_undoes_the_step_and_is_told():
    """Some of the reads and writes of a step that begins in backward, one after the other."""
    with patient():
        assert fail_one_by_one("both", every=9) == {"step", "backward"}


@pytest.mark.ci
def test_every_transfer_that_fails_undoes_the_step():
    with patient():
        assert fail_one_by_one("both", every=1) == {"step", "backward"}


@pytest.mark.ci
def test_every_transfer_that_fails_in_backward_or_in_a_step_undoes_it():
    model, optimizer = stepped("speculate", STEPS)
    state = optimizer.targets[0].tiered_state.nvme
    name, blocks, ahead = state.store.paths[0].name, len(state.blocks), state.num_reads_begun
    before, again = serial(STEPS), serial(STEPS + 1)
    third = batches(STEPS + 1)[STEPS]
    cases = [("preadv", i) for i in range(2 * (blocks - ahead))]
    parts = state.store.layout.num_blocks  # planes and weights
    cases += [("pwritev", i) for i in range(parts)] + [("fdatasync", 0)]
    with patient():
        for call, number in cases:
            with failing(call, errno.EIO, name, after=number, times=1) as failed:
                token_loss(model, third).backward()
                with pytest.raises(nvme.TransferError, match=f"{name}.*EIO"):
                    optimizer.step()
            assert len(failed) == 1, (call, number)
            optimizer.zero_grad()
            assert differences(everything(model, optimizer), before) == [], (call, number)
    one_step(model, optimizer, third)
    assert differences(everything(model, optimizer), again) == []
    optimizer.close()


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
    assert differences(everything(model, optimizer), serial(STEPS + 1)) == []
    optimizer.close()


@pytest.mark.parametrize("update", UPDATES)
def test_a_disk_that_writes_slowly_and_fails_costs_no_buffer(update):
    """A step reads what was written before it, and is told there that it never was."""
    model, optimizer = stepped(update, STEPS)
    state = optimizer.targets[0].tiered_state.nvme
    name, in_use = state.store.paths[0].name, state.num_in_use
    for batch in batches(STEPS + 4)[STEPS:]:
        slow_failure = failing("pwritev", errno.EIO, name, after=20, first=wait)
        with patient(), slow_failure, pytest.raises(nvme.TransferError, match="EIO"):
            token_loss(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            token_loss(model, batch).backward()  # a tail is told here
        optimizer.zero_grad()
        everything(model, optimizer)
        assert state.num_in_use <= in_use
    one_step(model, optimizer, batches(STEPS + 1)[STEPS])
    assert differences(everything(model, optimizer), serial(STEPS + 1)) == []
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
    assert differences(everything(model, optimizer), serial(STEPS, precision=precision)) == []
    one_step(model, optimizer, first)
    assert differences(everything(model, optimizer), serial(STEPS + 1, precision=precision)) == []
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
    assert differences(everything(model, optimizer), serial(STEPS + 1)) == []
    optimizer.close()


def test_an_optimizer_is_closed_while_blocks_are_updated_in_backward():
    model, optimizer = stepped("both", STEPS)
    path = optimizer.targets[0].tiered_state.nvme.store.paths[0]
    with waiting("pwritev", "gemini-") as disk:
        token_loss(model, batches(1)[0]).backward()
        disk.until_asked()
        disk.answer_in(0.03)
        optimizer.close()
    assert not path.exists()
