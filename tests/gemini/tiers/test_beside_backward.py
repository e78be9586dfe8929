"""What travels beside forward and backward: gradients that leave under a budget, and shards in host
memory that several ranks gather ahead of their use."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

from bench.shared.reference import everything, same
from bench.shared.threads import run_threads
from gemini import AutoPlacement, GeminiDDP, trace
from gemini.placement.tiers import Tier
from gemini.runtime.memory.backend import CpuBackend
from gemini.runtime.memory.gradient_homes import HostGradients
from gemini.runtime.memory.ledger import MemoryLedger
from gemini.units import ChunkId
from optim import HybridAdam, NvmeConfig
from tests.support.apart import Apart
from tests.support.device.late import end_late
from tests.support.device.placed import batch, device, wrapped

D, H = Tier.DEVICE, Tier.HOST


class Layer(nn.Module):
    """One with parameters of its own around another: calls in calls."""

    def __init__(self):
        super().__init__()
        self.inner, self.gain = nn.Linear(33, 33), nn.Parameter(torch.ones(33))

    def forward(self, x):
        return x + self.gain * torch.tanh(self.inner(x))


def layers(num=8):
    torch.manual_seed(0)
    return nn.Sequential(*[Layer() for _ in range(num)])


START = layers()  # threads have one generator of random numbers


# -- gradients --


@pytest.fixture
def at_every_note(monkeypatch):
    """Calls that are made with a ledger whenever it looks at what is in use."""
    looks = []
    note = MemoryLedger.note

    def noted(self, where="in an iteration"):
        for look in looks:
            look(self)
        note(self, where)

    monkeypatch.setattr(MemoryLedger, "note", noted)
    return looks


def under_budget(kib, backend):
    """Of model data alone: the calls are traced, and activations take nothing."""
    module = copy.deepcopy(START)
    traced = trace(module, (batch(0),))
    moments = tuple(replace(moment, non_model_bytes=0) for moment in traced.moments)
    model = GeminiDDP(
        module, backend, AutoPlacement(kib << 10, "4MiB"), precision="bf16",
        trace=replace(traced, moments=moments),
        max_norm=0.1, min_chunk_size_m=1000 / 2**20,
    )  # fmt: skip
    model.engine.planning.keep_homes()  # which activations would move
    return model, HybridAdam(model.parameters(), lr=1e-2, nvme=NvmeConfig(block_numel=1024))


@pytest.mark.ci
@pytest.mark.parametrize(
    ("kib", "steps"), [(60, 2), pytest.param(70, 4, marks=pytest.mark.ci)], ids=["60", "70"]
)
def test_gradients_leave_in_the_room_of_the_plan_and_stall_no_backward(kib, steps, at_every_note):
    backend = device(by_triton=True)
    leaving, stalls = [], []

    def look(ledger):
        leaving.append(ledger.storage.leaving_bytes)
        assert backend.pages.asked_bytes <= ledger.device_bytes() <= kib << 10

    with Apart(backend):
        model, optimizer = under_budget(kib, backend)
        homes = {shard.grad_home for shard in model.engine.planning.plan.shards}
        assert H in homes
        at_every_note.append(look)
        for step in range(steps):
            loss = model(batch(step)).float().pow(2).mean()
            before = backend.stalls
            loss.backward()
            stalls.append(backend.stalls - before)
            optimizer.step()
            optimizer.zero_grad()
            backend.check()
    assert stalls == [0] * steps and max(leaving) > 0


# -- shards of several ranks --


def of_two_ranks(homes, backends):
    def train(rank):
        backend = backends[rank]
        with Apart(backend):
            model, optimizer = wrapped(copy.deepcopy(START), backend, homes, precision="bf16")
            engine, asked = model.engine, []
            for step in range(4):
                before = backend.starved, engine.manager.gathers_of.total()
                model(batch(10 * step + rank)).float().pow(2).mean().backward()
                asked.append(
                    (backend.starved - before[0], engine.manager.gathers_of.total() - before[1])
                )
                optimizer.step()
                optimizer.zero_grad()
                backend.check()
        return everything(model, optimizer), asked, len(engine.chunks)

    return run_threads(train, 2)


class Asked(int):
    """Number of a chunk; the gradient of another is written while somebody looks for it."""

    def __eq__(self, other):
        is_same = int(self) == other
        if not is_same and self.writes:
            self.writes.pop()()
        return is_same

    __hash__ = int.__hash__


def test_a_tail_finds_a_gradient_while_others_are_written():
    home, values = HostGradients(CpuBackend()), torch.arange(33.0)
    home.rooms = dict.fromkeys(range(4), 1 << 20)
    home.write(ChunkId(0), values)
    home.all_leave()
    home.write(ChunkId(1), values + 1)
    asked = Asked(0)
    asked.writes = [lambda: home.write(ChunkId(2), values + 2)]
    shard, _ = home.arrived(asked)
    assert torch.equal(shard, values) and not asked.writes
    for chunk in (1, 2):
        assert torch.equal(home.arrived(ChunkId(chunk))[0], values + chunk)
    assert home.leaving_nbytes == 0


@pytest.mark.parametrize(
    "by_triton",
    [pytest.param(False, marks=pytest.mark.ci), pytest.param(True, marks=pytest.mark.deep)],
    ids=["cpu", "triton"],
)
def test_shards_in_host_memory_are_on_their_way_before_their_chunk_is_used(by_triton, monkeypatch):
    """No collective ends before it is waited for, and the device waits for no copy that it could
    have begun behind the call before; the bits are those of shards on the device."""
    end_late(monkeypatch)
    (want, *_), _ = of_two_ranks(
        (False, False, True), [device(by_triton, rank) for rank in range(2)]
    )
    found = of_two_ranks((True, False, True), [device(by_triton, 7 + rank) for rank in range(2)])
    assert same(found[0][0], want)
    for _, asked, num_chunks in found:
        assert num_chunks > 4
        for starved, gathers in asked[2:]:  # what the first iterations needed is known by then
            assert gathers > num_chunks
            assert starved <= 1  # what the first call of all uses
