"""A device whose memory is not the host's: wherever model data lives, the bits are the same.

The simulated device is hostile (`bench.shared.simulated`), and no operator may mix its memories.
"""

from functools import partial

import pytest
import torch
from torch import nn

from bench.shared.models import seeded, token_loss
from bench.shared.threads import run_threads
from gemini import AutoPlacement, GeminiDDP, StaticPlacement
from gemini.chunk.layout import specs_of
from gemini.memtracer.trace import sequential_trace
from gemini.placement.tiers import Tier
from gemini.runtime.memory.files import tensor_files
from optim import HybridAdam, NvmeConfig
from optim.update import launch_tables
from optim.update.launch_tables import LaunchTables
from tests.support.apart import Apart
from tests.support.device.placed import (
    Forked,
    SpareLayer,
    batch,
    device,
    place_gradients,
    wrapped,
)
from tests.support.loops.schedules import HOMES, Little, Narrow, Sometimes, same
from tests.support.loops.tails import PRECISIONS, batches, differences, everything, stepped
from tests.support.pairs import pairs

TINY = partial(Little, 1)
ALL = "kernels, all"  # model data in host memory


def clips_leaves_alone_and_skips(model, optimizer):
    """Of `Narrow` or `Sometimes`: a step without the norm, and one that counts for nothing."""
    draw = torch.Generator().manual_seed(0)
    for step in range(4):
        hook = None
        if step == 2:
            hook = model.module.last.weight.register_hook(lambda g: g * float("nan"))
        model(torch.randn(4, 5, generator=draw), 1 - step % 2).float().square().mean().backward()
        if hook is not None:
            hook.remove()
        else:
            assert float(optimizer.clip_grad_norm_(0.1)) > 0.1
        optimizer.step()
        assert optimizer.last_report.skipped == (step == 2)
        optimizer.zero_grad()
        yield


def widens(model, optimizer):
    """Two backwards add up in fp32, one has bf16."""
    data = iter(batches(6))
    for backwards in (2, 1, 2, 1):
        for _ in range(backwards):
            token_loss(model, next(data)).backward()
        optimizer.step()
        optimizer.zero_grad()
        yield


@pytest.mark.parametrize("home", ["kernels", "kernels, gradients"])
def test_gradients_that_are_wider_in_some_steps_have_the_bits_of_the_device(home):
    """Staging has them at the same address."""
    same(widens, "serial", home, apart=True, module=TINY)


@pytest.mark.ci  # the interpreter
def test_what_a_step_leaves_alone_keeps_its_bits_where_weights_are_in_files():
    torch.manual_seed(0)
    module = nn.Sequential(*[SpareLayer() for _ in range(6)])
    start = {n: p.detach().bfloat16() for n, p in module.named_parameters() if "spare" in n}
    trace = sequential_trace(specs_of(module, "bfloat16"))
    backend = device(by_triton=True)
    with Apart(backend):
        model = GeminiDDP(
            module, backend, AutoPlacement("90KiB", "100KiB"), trace=trace,
            min_chunk_size_m=0.004, gather_whole=lambda m: isinstance(m, SpareLayer),
        )  # fmt: skip
        optimizer = HybridAdam(model.parameters(), lr=1e-2, nvme=NvmeConfig(block_numel=1024))
        assert Tier.NVME in {s.param_home for s in model.engine.planning.plan.shards}
        for step in range(2):
            model(batch(step)).float().pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    with model.summon_full_params(writeback=False):
        for name, param in model.module.named_parameters():
            if "spare" in name:
                assert torch.equal(param, start[name]), name


def test_what_kernels_update_on_nvme_has_the_bits_of_the_device():
    """Blocks of 4096 elements are those whose weights leave with what their masters lack; those
    that were read before their step are saved first."""

    def run(**where):
        backend = device(by_triton=True)
        with Apart(backend):
            model = GeminiDDP(
                Forked(64, 64), backend, StaticPlacement(), precision="bf16",
                min_chunk_size_m=4160 / 2**20,
            )  # fmt: skip
            optimizer = HybridAdam(
                model.parameters(), lr=1e-2, nvme=NvmeConfig(block_numel=4096), **where
            )
            for step in range(3):
                model(torch.full((5, 64), 0.1 * step)).float().pow(2).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        return everything(model, optimizer)

    assert differences(run(nvme_offload_fraction=1.0), run()) == []


def test_what_the_user_writes_to_weights_in_host_memory_is_what_the_next_step_starts_from():
    model, optimizer = stepped("serial", 1, **HOMES[ALL]())
    with torch.no_grad(), model.summon_full_params():
        for param in model.module.parameters():
            param.fill_(0.5)
    state = model.state_dict()
    assert all(torch.equal(value, torch.full_like(value, 0.5)) for value in state.values())
    optimizer.close()


def test_a_digest_is_that_of_the_same_weights_on_the_device():
    digests = set()
    for home in ("kernels, resident", "kernels, parameters alone"):
        placed = HOMES[home]()
        model, optimizer = stepped("serial", 1, **placed)
        with Apart(placed["device"]):
            digests.add(model.digest())
        optimizer.close()
    assert len(digests) == 1


def test_state_in_host_memory_needs_no_disk(monkeypatch):
    """Neither for itself nor for the fp32 originals that its masters start from."""

    def refuse(*args, **kwargs):
        raise AssertionError("a file is made")

    monkeypatch.setattr(tensor_files, "TensorFiles", refuse)
    start = {name: p.detach().clone() for name, p in Little().named_parameters()}
    model, _ = stepped("serial", 0, **HOMES[ALL]())
    state = model.state_dict()
    assert all(torch.equal(state[name], value) for name, value in start.items())


def test_what_is_pinned_is_a_line_of_its_own():
    model, _ = stepped("serial", 2, **HOMES[ALL]())
    rows = {(row.tier, row.kind): row for row in model.memory_report().rows}
    total, pinned = rows["host", "total"], rows["host", "of it pinned"]
    assert pinned.predicted_bytes == total.predicted_bytes > 0
    assert pinned.measured_bytes == total.measured_bytes


def test_the_tables_of_launches_are_made_once(monkeypatch):
    """As long as the same parameters have gradients: blocks are given the same staging again."""
    made = []

    class Counted(LaunchTables):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            made.append(self)

    monkeypatch.setattr(launch_tables, "LaunchTables", Counted)
    model, optimizer = wrapped(Forked(), device(by_triton=True), (True, True, True))
    counts = []
    for step, uses_spare in enumerate((True, True, True, False, True)):
        model(batch(step), uses_spare).float().pow(2).mean().backward()
        made.clear()
        optimizer.step()
        optimizer.zero_grad()
        counts.append(len(made))
    assert counts[0] > 3 and counts[1:3] == [0, 0] and counts[3] > 0


def test_an_asynchronous_save_shows_state_that_is_in_host_memory():
    model, optimizer = stepped("serial", 1, **HOMES["kernels"]())
    target = optimizer.targets[0]
    seen = []
    (stream,) = target.streams(target.names)
    stream.visit_memory(lambda run: seen.append((run.name, run.plane)))
    assert {name for name, _ in seen} == {name for name, _ in model.module.named_parameters()}


def check(where, grads, precision, who="kernels"):
    """grads: where they wait, whatever the plan says."""
    module = {"kernels": Narrow, "host": Sometimes}[who]

    def placed(model, optimizer):
        place_gradients(model, grads)
        yield from clips_leaves_alone_and_skips(model, optimizer)

    same(
        placed, "serial", f"{who}{where}", serially=clips_leaves_alone_and_skips,
        apart=who == "kernels", module=module, **PRECISIONS[precision],
    )  # fmt: skip


@pytest.mark.ci
@pytest.mark.parametrize("where", [", parameters", ", parameters alone"])
def test_wherever_model_data_lives_the_bits_are_those_of_the_resident_run(where):
    check(where, Tier.HOST, "bf16")


@pytest.mark.ci
@pytest.mark.parametrize(
    ("where", "grads", "precision", "who"),
    pairs(
        ["", ", parameters", ", parameters alone", ", resident"],
        [Tier.HOST, Tier.DEVICE],
        ["bf16", "fp32", "rounded"],
        ["kernels", "host"],
    ),
)
def test_on_both_paths_and_in_every_precision(where, grads, precision, who):
    check(where, grads, precision, who)


@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.ci)])
def test_gradients_that_leave_stall_no_backward_and_travel_once_each_way(world_size):
    """They are measured as they leave, so the norm brings nothing back."""

    def train(rank):
        backend = device(by_triton=True)
        with Apart(backend):
            with seeded():
                layers = nn.Sequential(*[nn.Linear(33, 33) for _ in range(6)])
            model, optimizer = wrapped(
                layers, backend, (False, True, False), max_norm=0.1, precision="bf16"
            )
            gradients = sum(chunk.shard.nbytes for chunk in model.engine.chunks)
            assert len(model.engine.chunks) > 3
            for step in range(3):
                loss = model(batch(step)).float().pow(2).mean()
                seen = [backend.host_waits, backend.stalls, backend.to_host_bytes]
                loss.backward()
                now = [backend.host_waits, backend.stalls, backend.to_host_bytes]
                assert now == [seen[0], seen[1], seen[2] + gradients]
                optimizer.step()
                # the end of the last rank's shard may belong to no parameter
                assert 0 < backend.to_device_bytes <= (step + 1) * gradients
                assert world_size > 1 or backend.to_device_bytes == (step + 1) * gradients
                assert [backend.host_waits, backend.to_host_bytes] == [seen[0], now[2]]
                optimizer.zero_grad()

    run_threads(train, world_size)
