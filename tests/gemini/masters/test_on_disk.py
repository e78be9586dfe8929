"""Masters on disk without what bf16 weights in memory have of them: fewer bytes, the same bits."""

import errno
import functools
import threading
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from torch import nn

import gemini
import nvme
from bench.shared.models import Tower
from gemini import AutoPlacement, GeminiDDP
from gemini.placement.sizes import moves_less_split
from optim import HybridLion, NvmeConfig
from optim.rules.split_master import join, tie_sign
from optim.rules.state_layout import StateLayout
from tests.support.disks.faults import failing
from tests.support.loops.schedules import Sometimes, interrupted, outcome
from tests.support.loops.tails import (
    BLOCK,
    SCHEDULES,
    absent,
    batches,
    differences,
    everything,
    one_step,
    state_of,
    wrapped,
)

UPDATES = ("serial", "tail")


@contextmanager
def whole_masters():
    """As they are where no rule lets them be split."""
    with mock.patch.object(StateLayout, "splits", lambda self, dtype: False):
        yield


def half_way():
    """Every master is a tie that was rounded down: it is all in the sign of the second moment."""
    module = Tower()
    for param in module.parameters():
        param.data.view(torch.int32).bitwise_and_(~0x1FFFF).bitwise_or_(0x8000)
    return module


def some_half_way():
    """Layers of odd sizes, one of which is left out of every third call."""
    module = Sometimes()
    for param in module.parameters():
        param.data.view(torch.int32).flatten()[::3].bitwise_and_(~0x1FFFF).bitwise_or_(0x8000)
    return module


def bits(found):
    """Comparable; one NaN is as good as another."""
    return {
        name: value.where(~value.isnan(), torch.nan).view(torch.uint8)
        if isinstance(value, torch.Tensor)
        else value
        for name, value in found.items()
    }


def reached(schedule, update, **options):
    return bits(outcome(schedule, update, **options).values)


@functools.cache
def with_whole_masters(schedule, make, options):
    with whole_masters():
        return reached(schedule, "serial", module=make(), **dict(options))


def check_same(schedule, updates=UPDATES, make=half_way, **options):
    want = with_whole_masters(schedule, make, tuple(sorted(options.items())))
    for update in updates:
        found = reached(schedule, update, module=make(), **options)
        assert differences(found, want) == [], update


def test_every_master_of_the_model_of_these_tests_is_a_tie():
    with wrapped_now("serial") as (_, optimizer):
        found = []
        optimizer.visit_state(lambda run: found.append((run.plane, run.values.clone())))
        masters = torch.cat([values for plane, values in found if plane == "master"])
        assert masters.numel() > 10_000 and bool((tie_sign(masters) != 0).all())
        assert not any(v.signbit().any() for plane, v in found if plane == "exp_avg_sq")


@contextmanager
def wrapped_now(update, **options):
    model, optimizer = wrapped(update, module=half_way(), **options)
    optimizer.bind()
    try:
        yield model, optimizer
    finally:
        optimizer.close()


@pytest.mark.parametrize("name", ["skips", "writes"])
def test_every_schedule_has_the_bits_of_whole_masters(name):
    check_same(SCHEDULES[name], updates=("serial", "tail"))


@pytest.mark.ci
def test_and_whatever_is_done_behind_a_step_and_before_it():
    for name in SCHEDULES:
        check_same(SCHEDULES[name], updates=("serial", "tail"))


def test_where_parts_of_blocks_have_no_gradient():
    check_same(absent, make=some_half_way)


def test_where_a_part_of_the_state_is_in_memory_and_fp32_is_kept():
    check_same(
        SCHEDULES["skips"], updates=("serial", "tail"), fraction=0.4, max_norm=0.1,
        keep_fp32=lambda name, module: name == "layers.1.1",
    )  # fmt: skip


def test_what_happens_between_backward_and_step():
    names = ("writes a weight", "reads masters", "reads state", "scales one")
    check_same(interrupted(*names), updates=("serial", "tail"))


def test_behind_the_next_forward_of_two_modules_at_once():
    """The pool of one is not that of the other."""
    first, second = (wrapped("tail", module=half_way()) for _ in range(2))
    for batch in batches(3):
        for model, optimizer in (first, second):
            one_step(model, optimizer, batch)
    found = [bits(everything(*pair)) for pair in (first, second)]
    for _, optimizer in (first, second):
        optimizer.close()
    assert differences(*found) == []


# -- what a user writes --


def not_a_number(weight):
    weight[1, 1] = float("nan")


WRITES = [
    lambda weight: weight.zero_(),
    lambda weight: weight.copy_(torch.linspace(-1, 1, weight.numel()).view(weight.shape)),
    lambda weight: weight[0, 3].fill_(2.0),
    lambda weight: weight[1].fill_(-0.0),
    lambda weight: weight.data[2].mul_(0.5),
    not_a_number,
]


def writes_in_turn(model, optimizer):
    """Each to a weight of its own, behind a step, and two steps more."""
    weights = [f"layers.{i}.{j}.weight" for i in (0, 1, 2) for j in (1, 3)]
    for step, batch in enumerate(batches(len(WRITES) + 3)):
        one_step(model, optimizer, batch)
        if 0 < step <= len(WRITES):
            with torch.no_grad():
                WRITES[step - 1](model.module.get_parameter(weights[step - 1]))
            model.state_dict()
        yield


def test_an_element_that_was_written_has_the_value_and_all_others_keep_their_master():
    check_same(writes_in_turn, updates=("serial", "tail"))


def test_a_write_that_changes_nothing_keeps_every_master():
    with wrapped_now("serial") as (model, optimizer):
        before = bits(everything(model, optimizer))
        with torch.no_grad():
            for param in model.module.parameters():
                param.mul_(1.0)
        assert differences(bits(everything(model, optimizer)), before) == []


# -- bytes --


def moved(update):  # of blocks with planes of 5 pages and weights of 1
    """Of the last step: bytes read and written; elements of the state."""
    torch.manual_seed(0)
    layers = [nn.Linear(64, 64, bias=False) for _ in range(6)]
    model, optimizer = wrapped(update, module=nn.Sequential(*layers), nvme=NvmeConfig(
        block_numel=BLOCK
    ))  # fmt: skip
    numel = sum(block.numel for block in optimizer.targets[0].tiered_state.space.blocks)
    for _ in range(4):
        model(torch.ones(2, 64, dtype=torch.bfloat16)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    report, plan = optimizer.last_report, model.engine.planning.plan
    store = optimizer.targets[0].tiered_state.nvme
    assert store.staging_bytes <= plan.device_staging.nbytes
    traffic = report.traffic + report.behind.wait().traffic
    assert traffic.nvme_write == store.written_bytes_per_step
    optimizer.close()
    return traffic.nvme_read, traffic.nvme_write, numel


def test_a_step_reads_10_bytes_an_element_and_writes_12():
    with whole_masters():
        read, written, numel = moved("tail")
        assert (read, written) == (12 * numel, 12 * numel)
    read, written, numel = moved("tail")
    assert (read, written) == (10 * numel, 12 * numel)


def test_lion_and_fp16_and_parameters_in_files_keep_whole_masters(tmp_path):
    def block_counts(optimizer):
        optimizer.bind()
        nvme = optimizer.targets[0].tiered_state.nvme
        found = nvme.store.layout.num_blocks, len(nvme.blocks)
        optimizer.close()
        return found

    split, num_blocks = block_counts(wrapped("serial")[1])
    assert 1.5 * num_blocks < split < 2 * num_blocks  # the last of a chunk may be short
    whole, num_blocks = block_counts(wrapped("serial", precision="fp16")[1])
    assert whole == num_blocks
    model = GeminiDDP(Tower(), min_chunk_size_m=0.004)
    lion = HybridLion(
        model.parameters(), nvme_offload_fraction=1.0, nvme=NvmeConfig(block_numel=BLOCK)
    )
    whole, num_blocks = block_counts(lion)
    assert whole == num_blocks
    torch.manual_seed(0)
    wide = nn.Sequential(*[nn.Linear(96, 96) for _ in range(12)])
    policy = AutoPlacement(
        device_budget=600_000, nvme_budget="1GiB", nvme_dir=str(tmp_path), block_numel=BLOCK
    )
    model, optimizer = wrapped("serial", module=wide, placement_policy=policy)
    assert any(chunk.files is not None for chunk in model.engine.chunks)
    optimizer.bind()
    state, nvme = optimizer.targets[0], optimizer.targets[0].tiered_state.nvme
    in_memory = [
        b for b in nvme.blocks
        if state.trained[b.shard].files is None and moves_less_split(b.numel, 12)
    ]  # fmt: skip
    assert nvme.store.layout.num_blocks == len(nvme.blocks) + len(in_memory)
    optimizer.close()


@pytest.mark.parametrize("numel", [64, 256, 1024, 1472, 2048, 65_600, 1 << 20])
def test_masters_are_split_where_that_moves_fewer_pages(numel):
    def pages(nbytes):
        return -(-nbytes // 4096)

    whole, split = 2 * pages(12 * numel), 2 * pages(10 * numel) + pages(2 * numel)
    assert moves_less_split(numel, 12) == (split < whole)
    assert moves_less_split(1 << 20, 12) and not moves_less_split(1024, 12)


# -- what else reads blocks --


def masters_of(optimizer):
    """[n] of every block on disk, as they are shown."""
    found = []
    optimizer.targets[0].tiered_state.visit(
        lambda block, planes: found.append(planes["master"].clone())
    )
    return found


def test_what_a_killed_process_leaves_has_whole_masters():
    """In its file: remainders and moments block by block, then the weights of the same version."""
    with wrapped_now("serial") as (model, optimizer):
        nvme_state = optimizer.targets[0].tiered_state.nvme
        blocks, paths = nvme_state.blocks, nvme_state.store.paths
        for batch in batches(2):
            one_step(model, optimizer, batch)
        want = masters_of(optimizer)
        with nvme.recover(paths) as found:
            assert found.index.step == 2 and found.layout.digest.endswith("-split")
            beside = len(blocks)  # of the blocks that are split
            for i, block in enumerate(blocks):
                n, state = block.numel, bytearray(found.block(i))
                if not moves_less_split(n, 12):
                    master = torch.frombuffer(state, dtype=torch.float32, count=n)
                    assert torch.equal(master, want[i])
                    continue
                remainder = torch.frombuffer(state, dtype=torch.int16, count=n)
                second = torch.frombuffer(state, dtype=torch.float32, offset=6 * n, count=n)
                weight = torch.frombuffer(bytearray(found.block(beside)), dtype=torch.bfloat16)
                beside += 1
                assert torch.equal(join(weight, remainder, second), want[i])


@pytest.mark.parametrize("update", ["serial", "tail"])
def test_a_save_sees_the_masters_of_its_step_while_others_go_on(update):
    with wrapped_now(update) as (model, optimizer):
        data = batches(4)

        def step(batch):
            one_step(model, optimizer, batch)

        step(data[0])
        want, found = everything(model, optimizer), {}
        (stream,) = optimizer.targets[0].streams(optimizer.targets[0].names)
        pin = stream.pin()
        step(data[1])
        reader = threading.Thread(
            target=lambda: found.update(state_of(functools.partial(stream.visit, at=pin)))
        )
        reader.start()
        for batch in data[2:]:
            step(batch)
        reader.join()
        pin.close()
        assert found and all(torch.equal(values, want[name]) for name, values in found.items())
        assert len(found) == sum("/" in name for name in want)


@pytest.mark.parametrize("update", ["serial", "tail"])
def test_a_step_that_is_undone_restores_weights_and_masters(update):
    """The last write of it fails: all blocks but one were updated, and weights with them."""
    with wrapped_now(update) as (model, optimizer):
        first, second = batches(2)
        store = optimizer.targets[0].tiered_state.nvme.store

        def step(batch):
            one_step(model, optimizer, batch)

        step(first)
        before = bits(everything(model, optimizer))
        at = store.layout.num_blocks - 1
        disk = failing("pwritev", errno.EIO, store.paths[0].name, after=at, times=1)
        with disk as failed, pytest.raises(nvme.TransferError):
            step(second)
            model.state_dict()
        assert len(failed) == 1
        optimizer.zero_grad()
        assert differences(bits(everything(model, optimizer)), before) == []
        step(second)
        found = bits(everything(model, optimizer))
    with whole_masters(), wrapped_now("serial") as (model, optimizer):
        step(first)
        step(second)
        assert differences(bits(everything(model, optimizer)), found) == []


@pytest.mark.parametrize("what", ["optimizer", "model"])
def test_a_load_that_fails_leaves_weights_that_are_their_masters_rounded(what):
    """Some blocks were written, and their shards follow; then none of them counts."""
    with wrapped_now("serial") as (model, optimizer):

        def step(batch):
            one_step(model, optimizer, batch)

        first, second, third = batches(3)
        step(first)
        saved = model.state_dict(), optimizer.state_dict()
        step(second)
        before = bits(everything(model, optimizer))
        path = optimizer.targets[0].tiered_state.nvme.store.paths[0]
        after = {"optimizer": 20, "model": 1}[what]
        disk = failing("pwritev", errno.EIO, path.name, after=after, times=1)
        with disk as failed, pytest.raises(nvme.TransferError):
            if what == "model":
                model.load_state_dict(saved[0])
            else:
                optimizer.load_state_dict(saved[1])
        assert len(failed) == 1
        found = bits(everything(model, optimizer))
        assert differences(found, before) == [] or what == "model"
        masters = torch.cat(masters_of(optimizer))
        shards = torch.cat([chunk.shard for chunk in model.engine.chunks])
        assert torch.equal(masters.bfloat16(), shards)
        step(third)


def test_a_checkpoint_of_whole_masters_is_loaded_to_the_bit(tmp_path):
    def save(folder):
        model, optimizer = wrapped("serial", module=half_way())
        for batch in batches(2):
            one_step(model, optimizer, batch)
        gemini.save_checkpoint(folder, model, optimizer)
        return model, optimizer

    def load(folder, update):
        model, optimizer = wrapped(update)
        gemini.load_checkpoint(folder, model, optimizer)
        return model, optimizer

    def go_on(model, optimizer):
        for batch in batches(5)[2:]:
            one_step(model, optimizer, batch)
        found = bits(everything(model, optimizer))
        optimizer.close()
        return found

    with whole_masters():
        want = go_on(*save(tmp_path / "whole"))
    found = go_on(*save(tmp_path / "split"))
    assert differences(found, want) == []
    for folder in ("whole", "split"):
        assert differences(go_on(*load(tmp_path / folder, "tail")), want) == []
    with whole_masters():
        assert differences(go_on(*load(tmp_path / "split", "serial")), want) == []
