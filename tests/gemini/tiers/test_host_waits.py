"""Copies and waits that a device is spared: what is read of its weights, and what goes back."""

from types import SimpleNamespace

import torch

from gemini import EMA
from gemini.chunk.storage import Chunk
from gemini.runtime.step.state.shard_blocks import Shards
from optim.state.tiered_state import TieredState
from tests.support.apart import Apart
from tests.support.device.placed import Forked, batch, device, wrapped


def test_an_average_of_masters_reads_no_weight_of_a_device(monkeypatch):
    backend = device(by_triton=True)
    with Apart(backend):
        model, optimizer = wrapped(Forked(), backend, (False, False, True))
        ema = EMA(model, decay=0.5)
        ema.update()
        model(batch(0)).float().pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        masters = [model.engine.target.read_master(chunk) for chunk in model.engine.chunks]
        for chunk, master in zip(model.engine.chunks, masters, strict=True):
            assert torch.equal(master.to(chunk.dtype), chunk.load_shard())
        monkeypatch.setattr(Chunk, "load_shard", None)
        ema.update()
        ema.close()
        optimizer.close()


def test_one_wait_is_for_all_copies_to_host_memory():
    class InOrder:
        """A copy on a stream: those before it have ended when it has."""

        ended = waits = 0

        def __init__(self, number):
            self.number = number

        def ready(self):
            return InOrder.ended >= self.number

        def settle(self):
            InOrder.waits += 1
            InOrder.ended = max(InOrder.ended, self.number)

    state = SimpleNamespace(_leaving=[InOrder(number) for number in range(1, 31)])
    TieredState.settle(state)
    assert (InOrder.ended, InOrder.waits) == (30, 1)
    TieredState.settle(state)
    assert InOrder.waits == 1


def test_weights_that_follow_masters_travel_from_pinned_memory_a_block_at_a_time():
    backend = device(by_triton=True)
    with Apart(backend):
        shard = backend.allocate(40, torch.bfloat16)
        chunk = SimpleNamespace(files=None, shard_on_host=False, shard=shard)
        shards = Shards([chunk], backend)
        masters = torch.linspace(-3, 3, 40)
        for start, end in ((0, 16), (16, 32), (32, 40)):
            block = SimpleNamespace(shard=0, numel=end - start, elements=slice(start, end))
            values = backend.allocate_host(end - start, torch.float32).copy_(masters[start:end])
            shards.store(block, values)
        shards.end()
        backend.check()
    assert torch.equal(shard, masters.to(torch.bfloat16))
    assert backend.to_device_bytes == 80  # as bf16
