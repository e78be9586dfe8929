"""Saved tensors of a device: in host memory by its copies, and in the file where that is full.

On the simulated device, which fails where a copy's end is used before the copy allows it.
"""

import copy
import gc

import pytest
import torch
from torch import nn

from gemini import AutoPlacement, GeminiDDP
from gemini.activations.file import SavedFile
from gemini.activations.host import Buffers, HostTier
from gemini.activations.saved_tensors import SavedTensors
from gemini.optim.state.memory import CpuMemory
from optim import HybridAdam, NvmeConfig
from tests.support.apart import Apart
from tests.support.device.placed import device

KIB, MIB = 1 << 10, 1 << 20
ROW = 64 * KIB


def on_device(backend, folder, room, keep, ahead=4 * ROW):
    file = None if folder is None else SavedFile(folder, piece_bytes=ROW)
    tier = HostTier(backend, file, lambda: room, in_flight_bytes=2 * ROW)
    saved = SavedTensors(tier, backend.device, least_bytes=ROW, ahead_bytes=ahead)
    saved.keep_at_most(keep)
    return saved, tier, file


def tower(backend):
    """Layers, and an input, on the device."""
    torch.manual_seed(0)
    module = nn.Sequential(*[nn.Sequential(nn.Linear(128, 128), nn.GELU()) for _ in range(6)])
    x = torch.randn(128, 128, requires_grad=True)
    for tensor in (x, *module.parameters()):
        backend.put(tensor, "device")
    return module, x


def trained(backend, saved=None, retain=False):
    module, x = tower(backend)
    for _ in range(2):  # memory and room in the file are used again
        if saved is None:
            loss = module(x).square().mean()
        else:
            with saved.saving():
                loss = module(x).square().mean()
        loss.backward(retain_graph=retain)
        if retain:
            loss.backward()
    return [x.grad, *(param.grad for param in module.parameters())]


@pytest.mark.parametrize("retain", [False, True], ids=["once", "twice"])
@pytest.mark.parametrize("keep", [0, 5 * ROW], ids=["all", "half"])
@pytest.mark.parametrize("room", [None, 4 * ROW, 0], ids=["host", "both", "file"])
@pytest.mark.parametrize("by_triton", [False, True])
def test_bits_are_those_of_plain_autograd(room, keep, retain, by_triton, tmp_path):
    backend = device(by_triton)
    expected = trained(backend, retain=retain)
    saved, tier, file = on_device(backend, tmp_path, room, keep)
    with Apart(backend):
        found = trained(backend, saved, retain)
        backend.check()
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, expected, strict=True))
    moved = saved.traffic
    assert moved.host_out > 0 and (moved.nvme_out > 0) is (room is not None)
    assert moved.nvme_out <= moved.host_out
    del found
    gc.collect()
    assert (saved.live_bytes, saved.resident_bytes) == (0, 0)
    assert (tier.host_bytes, file.used_bytes) == (0, 0)
    saved.close()
    assert not list(tmp_path.iterdir())


def test_a_host_that_is_full_without_a_folder_keeps_the_rest_on_the_device():
    backend = device(False)
    saved, tier, _ = on_device(backend, None, 3 * ROW, 0)
    module, x = tower(backend)
    with Apart(backend):
        with saved.saving():
            loss = module(x).square().mean()
        assert tier.host_bytes == 3 * ROW
        assert saved.resident_bytes == saved.live_bytes - 3 * ROW
        loss.backward()
        backend.check()
    assert x.grad is not None and saved.live_bytes == tier.host_bytes == 0


def test_graphs_that_are_dropped_wait_for_their_copies():
    """Copies are under way, in both directions, when their ends are let go."""
    backend = device(True)
    saved, tier, _ = on_device(backend, None, None, 0)
    module, x = tower(backend)
    with Apart(backend):
        with saved.saving():
            loss = module(x).square().mean()
            del loss
            loss = module(x).square().mean()
        torch.autograd.grad(loss, module[-1][0].weight)  # reads ahead, and ends there
        del loss
        assert saved.live_bytes == 0 and tier.host_bytes == 0
        backend.check()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.a, self.b = nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x):
        return x + self.b(nn.functional.gelu(self.a(self.norm(x))))


def blocks():
    torch.manual_seed(0)
    return nn.Sequential(*[Block() for _ in range(4)])


def run_wrapped(policy, backend):
    with Apart(backend):
        model = GeminiDDP(
            copy.deepcopy(blocks()), backend, policy, precision="fp32", min_chunk_size_m=0.02
        )
        optimizer = HybridAdam(model.parameters(), lr=1e-2, nvme=NvmeConfig(block_numel=8192))
        peaks = []
        for step in range(3):
            backend.pages.peak_device_bytes = backend.device_bytes
            x = torch.randn(8, 64, 64, generator=torch.Generator().manual_seed(step))
            model(x).square().mean().backward()
            peaks.append(backend.peak_device_bytes)
            optimizer.step()
            optimizer.zero_grad()
            backend.check()
    return model, peaks


def test_a_wrapped_module_spills_to_the_host_and_holds_its_budget(tmp_path):
    """No folder is needed; with one, a host that has no room hands on to it."""
    budget = 4 * MIB
    plain, most = run_wrapped(AutoPlacement("60MiB", "60MiB"), device(False))
    assert max(most) > budget
    for options in ({}, {"nvme_dir": str(tmp_path), "host_budget": "3MiB"}):
        policy = AutoPlacement(budget, activations="spill", **{"host_budget": "60MiB", **options})
        model, peaks = run_wrapped(policy, device(False))
        saved = model.engine.saved_tensors
        assert model.digest() == plain.digest()
        assert saved.traffic.host_out > 0 and saved.live_bytes == 0
        assert max(peaks) <= budget
        assert bool(saved.traffic.nvme_out) is bool(options)


def test_host_memory_is_used_again_and_does_not_grow_with_other_lengths():
    buffers = Buffers(CpuMemory())
    first, behind = buffers.take(100 * KIB)
    assert not behind and first.nbytes >= 100 * KIB and first.data_ptr() % 4096 == 0
    buffers.give(first, None)
    again, _ = buffers.take(103 * KIB)  # within an eighth
    assert again.data_ptr() == first.data_ptr() and buffers.used_bytes == first.nbytes
    buffers.give(again, None)
    del first, again
    other, _ = buffers.take(300 * KIB)
    assert buffers.used_bytes == other.nbytes
    buffers.give(other, None)
    anew, _ = buffers.take(100 * KIB)  # the first was given back to the system for the other
    assert anew.nbytes < other.nbytes


def test_host_memory_comes_behind_the_copy_that_reads_it():
    backend = device(True)
    buffers = Buffers(backend)
    host, _ = buffers.take(ROW)
    ticket = backend.copy(backend.allocate(ROW, torch.uint8), host[:ROW])
    ticket.order()
    buffers.give(host, ticket)
    again, behind = buffers.take(ROW)
    assert again.data_ptr() == host.data_ptr() and behind == (ticket,)
