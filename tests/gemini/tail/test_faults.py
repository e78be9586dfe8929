"""Disks that fail in a step that goes on behind its caller, or begins in backward: it is undone,
whoever asks first is told, and nothing is lost."""

import errno

import pytest
import torch

import nvme
from bench.shared.models import token_loss
from gemini import AutoPlacement
from gemini.runtime.step import tail
from optim import LossScale
from tests.support.disks.faults import failing, spoil_block
from tests.support.disks.waiting import waiting, when_waited
from tests.support.loops.endings import behind_steps, faults, transfers
from tests.support.loops.tails import batches, differences, everything, stepped


def check_told(found, home):
    assert found.wrong == [] and found.all_told
    assert set(found.told_by) == {"backward"} or home == "files"


@pytest.mark.parametrize("home", ["disk", "files"])
def test_a_transfer_that_fails_undoes_the_step_and_the_next_backward_says_so(home):
    """Some of the reads and writes of a step that has a tail, one by one."""
    check_told(faults("tail", home, every=7), home)


def first_and_last(model, optimizer):
    """Writes of each file, and what makes them durable."""
    found = transfers(model, optimizer)
    last = {(part, call): at for part, call, at in found}  # they come in their order
    return [
        (part, call, at) for part, call, at in found
        if call != "preadv" and at in (0, last[part, call])
    ]  # fmt: skip


def test_a_serial_step_fails_before_anything_counts_whichever_file_fails():
    """Nobody has counted it when the disk says no to its last write."""
    less = {"placement_policy": AutoPlacement("252KiB")}  # than a tail takes: no buffers ahead
    found = faults("serial", "files", cases=first_and_last, max_norm=0.5, **less)
    check_told(found, "files")
    assert len(found.told_by) == 6 and set(found.told_by) == {"step"}


@pytest.mark.ci
@pytest.mark.parametrize("home, options", [
    ("disk", {"max_norm": 0.1}), ("disk", {"precision": "fp32"}), ("partly on disk", {}),
    ("files", {}),
])  # fmt: skip
def test_every_transfer_that_fails_undoes_the_step(home, options):
    check_told(faults("tail", home, **options), home)


def test_a_step_that_another_rank_votes_against_counts_nowhere(monkeypatch):
    """This rank's disk did its part."""
    model, optimizer = stepped("tail", 1)
    before = everything(model, optimizer)
    token_loss(model, batches(2)[1]).backward()

    def another_failed(ranks, judge, error):
        assert error is None
        raise RuntimeError("rank 1: no room")

    monkeypatch.setattr(tail, "vote", another_failed)
    optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match="rank 1: no room"):
        model.state_dict()
    assert differences(everything(model, optimizer), before) == []
    optimizer.close()


def test_the_graph_of_weights_that_were_undone_has_no_backward():
    model, optimizer = stepped("tail", 1)
    name = optimizer.targets[0].tiered_state.nvme.store.paths[0].name
    first, second = batches(2)
    token_loss(model, first).backward()
    with failing("pwritev", errno.EIO, name, after=20, times=1):
        optimizer.step()
        optimizer.zero_grad()
        loss = token_loss(model, second)
        with pytest.raises(nvme.TransferError):
            loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    optimizer.close()


def with_no_grad(model):
    with torch.no_grad():
        model(batches(1)[0])


def in_place(model):
    with torch.no_grad():
        model.module.head.weight.zero_()


ASKS = {
    "backward": lambda m, o: token_loss(m, batches(1)[0]).backward(),
    "another step": lambda m, o: (o.zero_grad(set_to_none=False), o.step()),
    "evaluation": lambda m, o: with_no_grad(m),
    "state_dict": lambda m, o: m.state_dict(),
    "optimizer.state_dict": lambda m, o: o.state_dict(),
    "a parameter": lambda m, o: m.module.head.weight.sum(),
    "a write": lambda m, o: in_place(m),
    "summon": lambda m, o: m.summon_full_params().__enter__(),
    "clip": lambda m, o: (o.zero_grad(set_to_none=False), o.clip_grad_norm_(1.0)),
    "unwrap": lambda m, o: m.unwrap(),
}


@pytest.mark.parametrize("ask", ASKS.values(), ids=ASKS)
def test_whoever_asks_first_is_told_and_what_was_asked_is_not_done(ask):
    model, optimizer = stepped("tail", 1)
    name = optimizer.targets[0].tiered_state.nvme.store.paths[0].name
    token_loss(model, batches(2)[1]).backward()
    with failing("pwritev", errno.EIO, name, after=20, times=1):
        optimizer.step()
        with pytest.raises(nvme.TransferError, match="EIO"):
            ask(model, optimizer)
    optimizer.zero_grad()
    assert differences(everything(model, optimizer), behind_steps(1)) == []
    token_loss(model, batches(2)[1]).backward()
    optimizer.step()
    assert differences(everything(model, optimizer), behind_steps(2)) == []
    optimizer.close()


def test_gradients_that_nobody_dropped_are_there_for_the_step_taken_again():
    model, optimizer = stepped("tail", 1)
    name = optimizer.targets[0].tiered_state.nvme.store.paths[0].name
    token_loss(model, batches(2)[1]).backward()
    with failing("preadv", errno.EIO, name, after=9, times=1):
        optimizer.step()
        with pytest.raises(nvme.TransferError, match="EIO"):
            optimizer.step()
    optimizer.step()
    assert differences(everything(model, optimizer), behind_steps(2)) == []
    optimizer.close()


def test_counts_and_the_loss_scale_are_put_back():
    scale = LossScale(initial_scale=2.0**10, growth_interval=1)  # another one behind every step
    options = {"precision": "fp16", "loss_scale": scale}
    model, optimizer = stepped("tail", 1, **options)
    before = everything(model, optimizer)
    name = optimizer.targets[0].tiered_state.nvme.store.paths[0].name
    token_loss(model, batches(2)[1]).backward()
    with failing("pwritev", errno.EIO, name, after=12, times=1):
        optimizer.step()
        steps = {float(state["step"]) for state in optimizer.state.values()}
        with pytest.raises(nvme.TransferError):
            token_loss(model, batches(2)[1]).backward()
    assert steps == {2.0}
    assert {float(state["step"]) for state in optimizer.state.values()} == {1.0}
    optimizer.zero_grad()
    assert differences(everything(model, optimizer), before) == []
    optimizer.close()


def test_a_block_that_does_not_verify_undoes_the_step():
    model, optimizer = stepped("tail", 1)
    put_back = spoil_block(optimizer, 7)
    token_loss(model, batches(2)[1]).backward()
    optimizer.step()
    with pytest.raises((nvme.ChecksumError, nvme.RollbackError)):
        token_loss(model, batches(2)[1]).backward()
    put_back()
    optimizer.zero_grad()
    assert differences(everything(model, optimizer), behind_steps(1)) == []
    optimizer.close()


def test_a_budget_that_is_used_up_is_told_by_the_step_itself(tmp_path):
    """It is known before anything is written, and the gradients are still there."""
    model, optimizer = stepped("tail", 1)
    store = optimizer.targets[0].tiered_state.nvme.store
    store.meter.budget = store.meter.written_bytes
    token_loss(model, batches(2)[1]).backward()
    with pytest.raises(nvme.WriteBudgetError):
        optimizer.step()
    store.meter.budget = None
    optimizer.step()
    assert differences(everything(model, optimizer), behind_steps(2)) == []
    optimizer.close()


def test_an_optimizer_is_closed_whatever_its_last_step_came_to():
    model, optimizer = stepped("tail", 1)
    path = optimizer.targets[0].tiered_state.nvme.store.paths[0]
    token_loss(model, batches(2)[1]).backward()
    with failing("pwritev", errno.EIO, path.name, after=20, times=1):
        optimizer.step()
        with pytest.raises(nvme.TransferError):
            optimizer.close()
    assert not path.exists()


def test_closing_without_masters_waits_for_the_tail():
    model, optimizer = stepped("tail", 1)
    token_loss(model, batches(2)[1]).backward()
    with waiting("pwritev", "gemini-") as disk, when_waited(disk.answer):
        optimizer.step()
        optimizer.close(keep_masters=False)
    assert optimizer.last_report.committed
