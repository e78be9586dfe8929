"""HybridAdam with state on disk: the bits of f = 0, whatever happens to disk and process."""

import os
import signal
from pathlib import Path
from unittest import mock

import pytest
import torch

import nvme
from bench.shared.models import token_batches, token_loss
from optim.rules.config import NvmeConfig
from optim.state.deferred_signals import END_A_STEP
from optim.step.driver import Step
from optim.update.updaters import CpuUpdater
from tests.nvme.common import ENGINES, engine_or_skip
from tests.support import checkpoints
from tests.support.disks.faults import file_size_limit, flip
from tests.support.disks.stepped import (
    BLOCK,
    copies,
    in_memory,
    make_optimizer,
    make_params,
    one_step,
    same,
    train,
)
from tests.support.disks.taken import Made
from tests.support.towers import wrapped
from tests.support.until import until


def state_of(optimizer):
    return optimizer.targets[0].tiered_state.nvme


# -- the same bits --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ENGINES)
def test_every_engine_gives_the_bits_of_memory(name, tmp_path):
    engine_or_skip(name).close()
    params = make_params()
    optimizer = make_optimizer(params, tmp_path, 0.6, engine=name)
    assert same(train(params, optimizer, 4), in_memory(4))
    optimizer.close()
    assert list(tmp_path.iterdir()) == []


def test_several_folders_are_striped_by_their_measured_speed(tmp_path):
    folders = [tmp_path / name for name in "ab"]
    for folder in folders:
        folder.mkdir()
    params = make_params()
    optimizer = make_optimizer(params, folders, allow_ram=True)
    assert same(train(params, optimizer, 3), in_memory(3))
    placed = state_of(optimizer).store.layout.file_of_block
    assert min(placed.count(0), placed.count(1)) > len(placed) // 8
    optimizer.close()


# -- the pipeline ---------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_buffers_are_at_most_depth_plus_two_blocks(depth, tmp_path):
    params = make_params()
    optimizer = make_optimizer(params, tmp_path, depth=depth)
    train(params, optimizer, 2)
    block_bytes = BLOCK * (8 + 4)  # two moments, and what the parameters were
    assert state_of(optimizer).staging_bytes == (depth + 2) * block_bytes
    optimizer.close()


def test_the_first_step_begins_with_the_first_block_which_is_read_ahead(tmp_path):
    """Its tail is to be ahead of the forward."""
    seen, submit = [], Step.submit

    def begun(step):
        flow = state_of(optimizer).flow
        seen.append((flow.order == flow.spans, [span.id for span in flow.reads]))
        submit(step)

    params = make_params()
    optimizer = make_optimizer(params, tmp_path, 1.0, depth=1)
    with mock.patch.object(Step, "submit", begun):
        train(params, optimizer, 1)
    assert seen == [(True, [0])]
    optimizer.close()


def test_reads_of_the_next_step_begin_when_a_step_ends(tmp_path):
    """They run while forward and backward do; the first blocks are those still in memory."""
    params = make_params()
    optimizer = make_optimizer(params, tmp_path, depth=3)
    train(params, optimizer, 3)
    state = state_of(optimizer)
    begun, since_commit, tickets = [], [], []
    read, commit = state.store.read, state.store.commit

    def recorded(block, view):
        tickets.append(read(block, view))
        begun.append(block)
        since_commit.append(block)
        return tickets[-1]

    def committed(step):
        commit(step)
        since_commit.clear()

    state.store.read, state.store.commit = recorded, committed
    last = state.flow.order[-1].id
    train(params, optimizer, 1, first=3)
    order = [span.id for span in state.flow.order]
    assert order[0] == last  # the order alternates
    kept = 3 - len(since_commit)
    assert since_commit == order[kept:3] and kept > 0  # the first never left memory
    until(lambda: all(ticket.ready() for ticket in tickets))
    moved = optimizer.last_report.traffic
    assert moved.nvme_read < sum(block.numel for block in state.blocks) * 8
    begun.clear()
    train(params, optimizer, 1, first=4)
    assert begun[0] == order[3]
    optimizer.close()


def test_the_report_says_what_was_written_in_this_step_and_in_all(tmp_path):
    params = make_params()
    optimizer = make_optimizer(params, tmp_path)
    per_step = []
    for step in range(3):
        one_step(params, optimizer, step)
        per_step.append(optimizer.last_report.traffic.nvme_write)
    state = state_of(optimizer)
    assert per_step == [state.written_bytes_per_step] * 3
    first_filling = sum(state.store.buffer_nbytes(b) for b in range(len(state.blocks)))
    assert optimizer.last_report.nvme_written_total == sum(per_step) + first_filling
    optimizer.close()


# -- the write budget -----------------------------------------------------------------------------


def test_a_budget_below_one_step_is_refused(tmp_path):
    params = make_params()
    optimizer = make_optimizer(params, tmp_path, budget="4MiB")
    with pytest.raises(ValueError, match=r"nvme_write_budget=4.00 MiB is below the 4\..* MiB"):
        one_step(params, optimizer, 0)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError, match="understood"):
        make_optimizer(params, tmp_path, budget="lots")


def test_the_step_that_would_pass_the_budget_changes_nothing(tmp_path):
    params = make_params()
    optimizer = make_optimizer(params, tmp_path, budget=20 << 20)
    for step in range(3):
        one_step(params, optimizer, step)
    for _ in range(2):
        with pytest.raises(nvme.WriteBudgetError, match=r"nvme_write_budget is 20\.00 MiB"):
            one_step(params, optimizer, 3)
    assert optimizer.last_report.nvme_written_total <= 20 << 20
    assert same(copies(params), in_memory(3))
    saved = optimizer.state_dict()  # what the message advises
    other = make_params()
    resumed = make_optimizer(other, None, 0.0)
    with torch.no_grad():
        for p, q in zip(other, params, strict=True):
            p.copy_(q)
    resumed.load_state_dict(saved)
    assert same(train(other, resumed, 1, first=3), in_memory(4))
    optimizer.close()


# -- faults between steps -------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fault", ["truncated", "emptied", "flipped"])
def test_a_file_changed_between_steps_is_said_and_no_weight_changes(fault, dtype, tmp_path):
    params = make_params(dtype)
    optimizer = make_optimizer(params, tmp_path)
    train(params, optimizer, 3)
    before = copies(params)
    store = state_of(optimizer).store
    middle = store.committed_extent(12).offset
    if fault == "flipped":
        flip(store.paths[0], middle + 77)
    else:
        os.truncate(store.paths[0], middle if fault == "truncated" else 0)
    for _ in range(2):
        with pytest.raises(nvme.NvmeError, match=rf"offset \d+.*{store.paths[0]}"):
            one_step(params, optimizer, 3)
        assert same(copies(params), before)
    with pytest.raises(nvme.NvmeError, match="offset"):
        optimizer.state_dict()
    optimizer.close()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_an_emptied_file_leaves_the_weights_of_an_engine(precision, tmp_path):
    """16-bit weights are restored from masters; those read before the file was lost, from RAM."""
    model, optimizer = wrapped(precision, folder=tmp_path, fraction=1.0)
    batches = token_batches(3, 1)
    checkpoints.train(model, optimizer, batches[:2])
    before = [chunk.shard.clone() for chunk in model.engine.chunks]
    os.truncate(state_of(optimizer).store.paths[0], 0)
    token_loss(model, batches[2][0]).backward()
    with pytest.raises((nvme.TransferError, nvme.ChecksumError)):  # writes may have made it longer
        optimizer.step()
    assert same([chunk.shard for chunk in model.engine.chunks], before)
    if precision != "fp32":  # masters are gone, which nobody may miss
        with pytest.raises((nvme.TransferError, nvme.ChecksumError)):
            optimizer.close()
    optimizer.close(keep_masters=False)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("limit", [1 << 16, 3 << 20])
def test_a_disk_that_fills_up_in_a_step_fails_it_and_the_next_one_is_right(limit, tmp_path):
    params = make_params()
    optimizer = make_optimizer(params, tmp_path)
    train(params, optimizer, 2)
    before = copies(params)
    with file_size_limit(limit), pytest.raises(nvme.DiskFullError, match="EFBIG"):
        one_step(params, optimizer, 2)
    assert same(copies(params), before)
    assert same(train(params, optimizer, 2, first=2), in_memory(4))
    optimizer.close()


# -- signals inside a step ------------------------------------------------------------------------


class Shutdown(Exception):
    """What a user's handler raises."""


def raise_shutdown(number, frame):
    raise Shutdown


CASES = {
    "ctrl-c": (signal.SIGINT, signal.default_int_handler, KeyboardInterrupt),
    "sigterm": (signal.SIGTERM, signal.SIG_DFL, SystemExit),
    "sigterm with a handler": (signal.SIGTERM, raise_shutdown, Shutdown),
    "time-out": (signal.SIGALRM, raise_shutdown, Shutdown),
}


@pytest.mark.parametrize("at", [1, 7, 25])
@pytest.mark.parametrize("case", CASES)
def test_a_signal_inside_a_step_leaves_it_undone_or_whole(case, at, tmp_path, monkeypatch):
    """Ctrl-C and SIGTERM end it; others wait for its end."""
    number, handler, expected = CASES[case]
    params = make_params()
    optimizer = make_optimizer(params, tmp_path)
    train(params, optimizer, 2)
    updated = []
    original = CpuUpdater.update_block

    def send(self, block, planes, views):
        updated.append(block.id)
        if len(updated) == at:
            os.kill(os.getpid(), number)
        return original(self, block, planes, views)

    old = signal.signal(number, handler)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(CpuUpdater, "update_block", send)
            with pytest.raises(expected) as raised:
                one_step(params, optimizer, 2)
        assert signal.getsignal(number) is handler
    finally:
        signal.signal(number, old)
    if expected is SystemExit:
        assert raised.value.code == 128 + signal.SIGTERM
    ends = at < 25 and number in END_A_STEP  # after the last block nothing is left to stop
    completed = 2 if ends else 3
    assert same(copies(params), in_memory(completed))
    assert same(train(params, optimizer, 1, first=completed), in_memory(completed + 1))
    optimizer.close()


def test_a_read_that_a_signal_cut_off_on_its_way_out_leaves_state_to_be_read_and_updated(
    tmp_path, monkeypatch
):
    params = make_params()
    optimizer = make_optimizer(params, tmp_path)
    train(params, optimizer, 2)
    for use in (optimizer.state_dict, lambda: train(params, optimizer, 1, first=2)):
        with monkeypatch.context() as patch, pytest.raises(TimeoutError):
            patch.setattr(nvme.WriteBehind, "abandon", mock.Mock(side_effect=TimeoutError))
            optimizer.state_dict()
        use()
    assert same(copies(params), in_memory(3))
    optimizer.close()


def test_state_that_an_exception_has_left_in_its_middle_says_what_to_do(tmp_path):
    """As another thread may raise one, which nothing defers."""
    params = make_params()
    optimizer = make_optimizer(params, tmp_path)
    train(params, optimizer, 2)
    optimizer.targets[0].tiered_state.nvme.flow.free.pop()
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"middle .between steps, 1 buffers in use"):
            optimizer.state_dict()
    optimizer.close(keep_masters=False)


def test_a_state_dict_is_never_held_twice(tmp_path):
    """Saving makes the copy that it answers; loading makes step counts."""
    params = make_params()
    optimizer = make_optimizer(params, tmp_path)
    train(params, optimizer, 1)
    with Made() as made:
        saved = optimizer.state_dict()
    total = sum(t.nbytes for planes in saved["state"].values() for t in planes.values())
    assert 2 * 4 * sum(p.numel() for p in params) <= made.nbytes <= total
    with Made() as made:
        optimizer.load_state_dict(saved)
    assert made.nbytes < 100
    optimizer.close()


@pytest.mark.parametrize("kind", [str, Path])
def test_one_folder_is_that_folder_however_it_is_named(tmp_path, kind):
    """A name is a sequence of letters, each of which could be taken for a folder: `/` is one."""
    config = NvmeConfig(kind(tmp_path))
    assert config.folders == (str(tmp_path),)
    assert config == NvmeConfig((str(tmp_path),))
    assert hash(config) == hash(NvmeConfig(str(tmp_path)))
