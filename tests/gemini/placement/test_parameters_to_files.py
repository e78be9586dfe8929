"""Parameters go down to files where the host is full, and come up again: no bit changes by that."""

import errno
import os
from dataclasses import replace

import pytest
import torch
from torch import nn

import nvme
from bench.shared.models import Tower, token_loss
from bench.shared.simulated import SimBackend
from gemini import AutoPlacement, GeminiDDP, trace
from gemini.placement.planner import plan_within
from gemini.placement.sizes import BudgetError
from gemini.placement.tiers import Tier
from gemini.runtime.memory.shard_storage import ShardStorage
from gemini.units import PAGE_BYTES
from optim import HybridAdam, NvmeConfig
from tests.support.disks.faults import failing
from tests.support.loops.lengths import KIB, Loop, assert_same
from tests.support.spilled import BLOCKS, SMALL

N = Tier.NVME
S, L = 4, 16  # 0.1 and 0.42 MiB of activations; 0.34 MiB of model data
ALL = (1 << 20, None)
FULL = (440, "100KiB")  # which leaves the host staging alone
SIZES = [  # split masters; none, and fp32 parameters; none, and bf16 parameters
    pytest.param(FULL, {}, id="bf16"),
    pytest.param((735, "92KiB"), {"precision": "fp32"}, id="fp32"),
    pytest.param((420, "92KiB"), {"precision": "bf16", "master_weights": False}, id="rounded"),
]


def pair(budgets, **options):
    return Loop(*budgets, released=True, **options), Loop(*ALL, **options)


def train(loops, *lengths):
    for loop in loops:
        loop.train(*lengths)


def in_files(loop):
    return {chunk.spec.id for chunk in loop.model.engine.chunks if chunk.files is not None}


def homes(loop):
    return [shard.param_home for shard in loop.model.engine.plan.shards]


def lower_all(loop):
    """Move all to the lowest homes, in a host that has room for staging alone."""
    engine = loop.model.engine
    planning = engine.planning
    floor = planning.plan
    shards = tuple(
        replace(s, param_home=N, grad_home=s.grad_home and N, state_homes=(N,) * len(s.state_homes))
        for s in floor.shards
    )
    planned = plan_within(replace(floor, shards=shards), planning.inputs, planning.policy)
    engine.homes.demote_homes(planned.plan)
    planning.use_plan(planned)
    engine.storage.place_gradients(planned.plan, engine.chunks)
    engine.target.homes_changed()
    engine.manager.homes_changed()
    engine.manager.release_all()


@pytest.fixture
def moved(monkeypatch):
    """Bytes that each move of parameters to files was given, and wrote."""
    found, take_in = [], ShardStorage.take_in

    def counted(storage, shards, step):
        before = storage.traffic().nvme_write
        take_in(storage, shards, step)
        if shards:
            found.append((shards, storage.traffic().nvme_write - before))

    monkeypatch.setattr(ShardStorage, "take_in", counted)
    return found


@pytest.mark.parametrize(("budgets", "options"), SIZES)
def test_they_go_where_the_host_is_full_and_rise_again_and_no_bit_changes(budgets, options, moved):
    """Only what goes is written."""
    loops = loop, _ = pair(budgets, **options)
    train(loops, S, S)
    assert not in_files(loop)
    train(loops, 10, L, L)
    assert in_files(loop) == {i for i, home in enumerate(homes(loop)) if home is Tier.NVME} != set()
    for shards, written in moved:
        sizes = [shard.nbytes for shard in shards.values()]
        assert sum(sizes) <= written < sum(sizes) + len(sizes) * 4 * PAGE_BYTES
    assert loop.model.engine.ledger.totals()[Tier.HOST] <= int(budgets[1][:-3]) * KIB
    train(loops, *[S] * 7)
    assert not in_files(loop)
    train(loops, L)
    assert in_files(loop)
    assert loop.peaks[-1] <= budgets[0] * KIB
    assert_same(*loops)
    assert moved


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO], ids=["ENOSPC", "EIO"])
@pytest.mark.parametrize("call", ["allocate", "pwritev", "fdatasync"])
def test_a_move_to_files_that_fails_anywhere_has_moved_nothing(call, error):
    """Each call fails in turn, those for gradients, for parameters and for state; an index counts
    without the disk (`nvme.store`): then all has moved, and the step that follows is refused."""
    loop, free = pair(FULL)
    train((loop, free), S, S)
    before, n = (homes(loop), loop.moves, loop.model.engine.ledger.totals()), 0
    while True:
        free.ids(L)
        with failing(call, error, after=n, times=1) as failed:
            try:
                loss = loop.forward(L)
            except nvme.NvmeError:
                assert failed and not in_files(loop)
                assert (homes(loop), loop.moves, loop.model.engine.ledger.totals()) == before
            else:
                assert in_files(loop) and loop.moves != before[1]
                if not failed:
                    break
                with pytest.raises(nvme.NvmeError, match=os.strerror(error)):
                    step(loop, loss)
                assert_same(loop, free)
                loop, free = pair(FULL)
                train((loop, free), S, S)
        n += 1
    assert n > 1
    train((loop, free), L, S)
    assert_same(loop, free)


def step(loop, loss):
    with loop.sim.running():
        loss.backward()
        loop.optimizer.step()


def test_a_rise_from_files_that_fails_anywhere_has_moved_nothing():
    """Shards come first, then state; an error in the middle of state takes the shards back."""
    loops = loop, _ = pair(FULL)
    train(loops, S, S, L, L)
    engine, num_failed = loop.model.engine, 0
    assert in_files(loop)
    while in_files(loop):
        before = homes(loop), in_files(loop), engine.ledger.totals()
        short = min(engine.sampler.traces("train"), key=lambda trace: trace.peak_non_model_bytes)
        higher = engine.planning.raised(short)
        with failing("preadv", errno.EIO, after=num_failed, times=1) as failed:
            try:
                engine.homes.promote_homes(higher.result, higher.inputs)
            except nvme.NvmeError:
                assert failed
                assert (homes(loop), in_files(loop), engine.ledger.totals()) == before
            else:
                assert not failed
        num_failed += len(failed)
        train(loops, S)
        assert_same(*loops)
    assert num_failed > 2
    train(loops, L, S)
    assert_same(*loops)


def on_ram(folder, ids, **budget):
    """A model whose device is RAM, and its optimizer. What an iteration asks for is given, so
    homes do not follow what else the process does."""

    def loss(logits):
        targets = torch.zeros(8 * len(ids), dtype=torch.int64)
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), targets)

    policy = AutoPlacement(**budget, nvme_dir=folder, warmup_non_model_data_ratio=0.0)
    given = trace(Tower(), (ids,), loss=loss)
    model = GeminiDDP(Tower(), "cpu", policy, max_norm=0.5, trace=given, **SMALL)
    return model, HybridAdam(model.parameters(), lr=1e-2, nvme=BLOCKS)


def test_where_ram_is_the_device_all_goes_to_files_and_rises_and_no_bit_changes(tmp_path):
    batches = [torch.randint(97, (S, 9), generator=torch.Generator().manual_seed(i))
               for i in range(6)]  # fmt: skip
    digests = []
    for budget in ({"device_budget": "240KiB"}, {}):
        model, optimizer = on_ram(str(tmp_path), batches[0], **budget)
        found, engine = [], model.engine
        for i, ids in enumerate(batches):
            if budget and i == 2:
                assert not engine.sharding.all_gathered and Tier.DEVICE in engine_homes(engine)
                engine.homes.demote_all()
                assert engine_homes(engine) == {N} and engine.planning.moves.num_down == 1
            if budget and i == 4:
                higher = engine.planning.raised(engine.planning.asked_by(engine.sampler.measured()))
                engine.homes.promote_homes(higher.result, higher.inputs)
                assert Tier.DEVICE in engine_homes(engine)
            token_loss(model, ids).backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(model.digest())
        digests.append(found)
        assert engine.planning.moves.num_down == bool(budget)
        optimizer.close()
    assert digests[0] == digests[1]


def engine_homes(engine):
    return {h for shard in engine.plan.shards for h in (shard.param_home, *shard.state_homes)}


def test_frozen_ones_go_too_and_are_unfrozen_there():
    def half():
        module = Tower()
        for param in module.layers[:2].parameters():
            param.requires_grad_(False)
        return module

    loops = loop, _ = [
        Loop(*budgets, module=half(), released=True) for budgets in ((300, "112KiB"), ALL)
    ]
    assert not loop.model.engine.sharding.all_gathered
    train(loops, S, S)
    lower_all(loop)
    frozen = {chunk.spec.id for chunk in loop.model.engine.chunks if not chunk.spec.trainable}
    assert frozen and frozen <= in_files(loop)
    train(loops, S)
    for one in loops:
        one.model.requires_grad_(True)
    train(loops, S, 10, S, S)
    assert_same(*loops)


def test_those_of_kept_versions_without_masters_go_to_the_host_at_most():
    """A file has the last version of a parameter; with masters all versions come back."""
    for options, may_go in (({"precision": "fp32"}, False), ({}, True)):
        nvme_config = NvmeConfig(block_numel=1024, keep_versions=2)
        loop, free = pair((800, "400KiB"), nvme=nvme_config, on_nvme=1.0, **options)
        train((loop, free), S, S)
        loop.model.engine.homes.demote_all()
        assert loop.moves[0] == 1
        assert may_go or not in_files(loop)
        digest = loop.model.digest()
        train((loop, free), S)
        loop.model.rewind(1)
        free.model.rewind(1)
        assert loop.model.digest() == digest
        train((loop, free), S)
        assert_same(loop, free)


def test_an_evaluation_that_leaves_training_no_room_moves_nothing(monkeypatch):
    """That is known before the first byte has moved."""

    def refused(*_, **__):
        raise BudgetError("no homes hold both", tier=Tier.DEVICE, missing_bytes=KIB)

    loops = loop, _ = pair(FULL)
    train(loops, S, S)
    before = homes(loop), loop.moves, loop.model.engine.ledger.totals()
    monkeypatch.setattr("gemini.runtime.schedule.iteration_plans.plan_beside", refused)
    train(loops, (-L, S))
    assert (homes(loop), loop.moves, loop.model.engine.ledger.totals()) == before
    assert_same(*loops)


@pytest.mark.ci  # kernels are interpreted
def test_buffers_of_a_device_are_taken_again_only_when_what_was_there_has_left():
    """Kernels update parameters whose homes are files, the host and the device, in turns."""
    steps = [15, 3, (-16, 16), 3, 16, 16, 3]
    loops = [
        Loop(*budgets, sim=SimBackend(107, updates_by_triton=True), released=True)
        for budgets in ((500, "110KiB"), ALL)
    ]
    train(loops, *steps)
    assert_same(*loops)
