"""Tails of a device whose kernels update, with model data in files beside it: the bits of serial
steps, and disks that fail."""

import errno
import gc
import threading
import weakref
from collections import Counter
from contextlib import contextmanager, nullcontext
from unittest import mock

import pytest
import torch
from torch import nn

import nvme
from gemini import AutoPlacement, GeminiDDP, StaticPlacement
from gemini.chunk.layout import specs_of
from gemini.chunk.storage import Chunk
from gemini.memtracer.trace import sequential_trace
from gemini.optim import HybridAdafactor, HybridMuon
from gemini.placement.tiers import Tier
from optim import HybridAdam, NvmeConfig
from optim.update.staging import SETS
from tests.support.apart import Apart
from tests.support.device.placed import SpareLayer, batch, device, place_gradients
from tests.support.disks.faults import failing
from tests.support.disks.waiting import ending
from tests.support.loops.tails import differences, everything, has_tail

ROOM = AutoPlacement("120KiB", "150KiB", warmup_non_model_data_ratio=0.0)
LESS = AutoPlacement("90KiB", "100KiB", warmup_non_model_data_ratio=0.0)


def wrapped(update, backend, policy=ROOM, kind=HybridAdam, given=None, **options):
    torch.manual_seed(0)
    module = nn.Sequential(*[SpareLayer() for _ in range(6)])
    model = GeminiDDP(
        module, backend, policy, trace=sequential_trace(specs_of(module, "bfloat16")),
        min_chunk_size_m=0.004, update=update, **options,
    )  # fmt: skip
    params = model if kind is HybridMuon else model.parameters()
    optimizer = kind(params, lr=1e-2, nvme=NvmeConfig(block_numel=1024), **given or {})
    return model, optimizer


def step(model, optimizer, number):
    model(batch(number)).float().pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def known_copies(home):
    """By chunk, how often a shard in host memory was told of a copy in a step whose gradients are
    there."""
    backend, copies, known = device(by_triton=True), Counter(), Chunk.is_copied

    def is_copied(chunk, ticket):
        copies[chunk.spec.id] += 1
        known(chunk, ticket)

    with mock.patch.object(Chunk, "is_copied", is_copied), Apart(backend):
        policy = StaticPlacement(1.0, 1.0, 1.0)
        given = {"nvme_offload_fraction": 1.0}
        model, optimizer = wrapped("serial", backend, policy, given=given)
        place_gradients(model, home)
        step(model, optimizer, 0)
        assert homes_of(model, "param_home") == {Tier.HOST}
        optimizer.close()
        backend.check()
    return copies


def test_shards_in_host_memory_know_the_copies_of_their_blocks_wherever_gradients_are():
    found = [known_copies(home) for home in (Tier.DEVICE, Tier.HOST, Tier.NVME)]
    assert found[0] == found[1] == found[2]
    assert min(found[0].values()) > 1  # to the device, and back


def homes_of(model, kind):
    return {getattr(shard, kind) for shard in model.engine.planning.plan.shards}


@pytest.mark.ci
@pytest.mark.parametrize("options", [{}, {"max_norm": 0.1}])
def test_parameters_and_gradients_in_files_beside_a_device_have_the_bits_of_serial_steps(options):
    found = []
    for update in ("serial", "tail"):
        backend = device(by_triton=True)
        with Apart(backend):
            model, optimizer = wrapped(update, backend, **options)
            tails = []
            for number in range(3):
                step(model, optimizer, number)
                tails.append(has_tail(optimizer))
            found.append(everything(model, optimizer))
            if update == "tail":
                assert all(tails) and Tier.NVME in homes_of(model, "param_home")
                assert Tier.NVME in homes_of(model, "grad_home")
            optimizer.close()
            backend.check()
    assert differences(*found) == []


@pytest.mark.ci
@pytest.mark.parametrize(("kind", "options"), [(HybridMuon, {"adamw_lr": 1e-3}),
                                               (HybridAdafactor, {})])  # fmt: skip
def test_rules_of_whole_matrices_take_parameters_from_files_beside_a_device(kind, options):
    """Blocks of a bucket are put out together, and a buffer of a file is there for one or two; the
    homes that one order of filling the device finds for Adafactor do not hold its gradients."""
    found = []
    more = AutoPlacement("140KiB", "180KiB", warmup_non_model_data_ratio=0.0)
    for policy in (ROOM if kind is HybridMuon else LESS, AutoPlacement("4MiB", "4MiB"), more):
        backend = device(by_triton=True)
        with Apart(backend):
            model, optimizer = wrapped("tail", backend, policy, kind, options)
            for number in range(2):
                step(model, optimizer, number)
            if not found:
                assert Tier.NVME in homes_of(model, "param_home")
        found.append(everything(model, optimizer))
        optimizer.close()
        backend.check()
    assert differences(*found[:2]) == differences(*found[1:]) == []


@pytest.mark.ci
@pytest.mark.parametrize("call, at", [("preadv", 3), ("preadv", 20), ("pwritev", 2),
                                      ("pwritev", 17)])  # fmt: skip
def test_a_transfer_that_fails_beside_a_device_undoes_the_step(call, at):
    """What was on its way between host and device then is nobody's, and the step is taken again."""
    backend = device(by_triton=True)
    model, optimizer = wrapped("tail", backend)
    step(model, optimizer, 0)
    before = everything(model, optimizer)
    name = optimizer.targets[0].tiered_state.nvme.store.paths[0].name
    model(batch(1)).float().pow(2).mean().backward()
    with failing(call, errno.EIO, name, after=at, times=1), pytest.raises(nvme.TransferError):
        optimizer.step()
        model.state_dict()
    assert differences(everything(model, optimizer), before) == []
    backend.check()
    optimizer.step()
    optimizer.zero_grad()
    again = everything(model, optimizer)
    optimizer.close()
    model, optimizer = wrapped("serial", device(by_triton=True))
    for number in range(2):
        step(model, optimizer, number)
    assert differences(again, everything(model, optimizer)) == []
    optimizer.close()


@pytest.mark.parametrize("share", [0.0, 1.0], ids=["resident", "nvme"])
@pytest.mark.parametrize("update", ["serial", "tail"])
def test_gradients_die_when_their_step_has_ended_and_the_loop_drops_them(update, share):
    """No flow, hook or view of a step keeps them into the next backward."""
    model, optimizer = wrapped(
        update, device(by_triton=True), AutoPlacement("1MiB"), precision="fp32",
        given={"nvme_offload_fraction": share},
    )  # fmt: skip
    assert (optimizer.targets[0].tiered_state.nvme is not None) == bool(share)
    step(model, optimizer, 0)
    model(batch(1)).float().pow(2).mean().backward()
    grads = [weakref.ref(c.grad) for c in model.engine.chunks if c.grad is not None]
    assert grads
    gc.disable()  # none waits for a pass of the collector
    try:
        optimizer.step()
        optimizer.zero_grad()
        optimizer.last_report.behind.wait()
        model(batch(2))
        assert [grad() for grad in grads] == [None] * len(grads)
    finally:
        gc.enable()
    optimizer.close()


def test_a_tail_launches_beside_the_trainer_who_comes_behind_an_update_before_its_gate_opens():
    backend, threads, opened = device(by_triton=True), [], []

    @contextmanager
    def beside():
        threads.append(threading.current_thread().name)
        yield

    backend.beside = beside
    backend.join = lambda: opened.append([gate.ready() for gate in gates()])
    model, optimizer = wrapped("tail", backend, StaticPlacement(1.0, 1.0))

    def gates():
        return [chunk.updating for chunk in model.engine.chunks if chunk.updating is not None]

    step(model, optimizer, 0)
    model(batch(1)).float().pow(2).mean().backward()
    opened.clear()
    optimizer.step()
    optimizer.last_report.behind.wait()
    assert threads == ["optim-tail"] * 2
    assert [ready.count(True) for ready in opened] == list(range(len(model.engine.chunks)))
    assert (
        model.engine.target.executor.staging.waits
    )  # for a set to be free: no queue of all blocks
    optimizer.close()


@pytest.mark.parametrize(
    ("likely", "reaches"),
    [(1.0, 0.0), *(pytest.param(*one, marks=pytest.mark.ci) for one in ((0.0, 1.0), (0.5, 0.5)))],
)
def test_copies_and_transfers_that_end_in_any_order_leave_the_same_bits(likely, reaches):
    """Nobody writes what a copy reads: with a disk that is faster than the link, a slower one, and
    both in a drawn order."""
    found = []
    for fast, ends in ((None, 0.0), (likely, reaches)):
        backend = device(by_triton=True, reaches=ends)
        with nullcontext() if fast is None else ending(fast, seed=3), Apart(backend):
            policy, given = StaticPlacement(1.0, 1.0, 1.0), {"nvme_offload_fraction": 1.0}
            model, optimizer = wrapped("serial", backend, policy, given=given)
            for number in range(2):
                step(model, optimizer, number)
            assert optimizer.targets[0].tiered_state.nvme.flow.window > SETS
            backend.synchronize()
            backend.check()
        found.append(everything(model, optimizer))
        optimizer.close()
    assert differences(*found) == []


def test_a_host_waits_four_times_for_thirty_spans_that_leave_together():
    """Behind a disk that is faster than the link, in `step()`: once for a window of them."""
    backend = device(by_triton=True)
    module = nn.Sequential(*[nn.Linear(32, 32, bias=False) for _ in range(30)])
    policy = StaticPlacement(1.0, 0.0, 0.0)
    model = GeminiDDP(module, backend, policy, min_chunk_size_m=1 / 1024)
    optimizer = HybridAdam(
        model.parameters(), nvme=NvmeConfig(block_numel=1024), nvme_offload_fraction=1.0
    )
    with ending(1.0):
        for _ in range(2):
            model(torch.ones(2, 32)).float().sum().backward()
            before = backend.host_waits
            optimizer.step()
            waited = backend.host_waits - before
            optimizer.zero_grad()
    nvme_state = optimizer.targets[0].tiered_state.nvme
    staging = model.engine.planning.plan.host_staging
    assert len(nvme_state.flow.spans) == 30 and waited <= 4
    assert staging.count == len(nvme_state.flow.free) + nvme_state.num_in_use
    optimizer.close()
