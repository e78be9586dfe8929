"""The simulated device finds an engine that is broken in one place: each of these is."""

import functools

import pytest
import torch

from gemini.chunk.storage import Chunk
from gemini.runtime.memory.gradient_homes import HostGradients
from optim.update.staging import DeviceStaging
from tests.support.apart import Apart
from tests.support.device.placed import Forked, batch, device, wrapped

ALL_ON_HOST = (True, True, True)


def train(homes=ALL_ON_HOST, steps=2, **options):
    backend = device(by_triton=True)
    with Apart(backend):
        model, optimizer = wrapped(Forked(), backend, homes, max_norm=0.1, **options)
        for step in range(steps):
            model(batch(step)).float().pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            backend.check()
    return model


def keep_no_ticket(self):
    """A gradient's memory is given away under the copy that reads it."""
    first = self._leaving.popleft()
    self._arrivals.pop(first.chunk)
    self.leaving_nbytes -= first.values.nbytes


def use_under_its_copy(self):
    self.pending = None


def fill_what_was_freed(self):
    self.gathered = True
    self.pending = self._memory.copy(self.payload, self.shard_memory)


def remember_no_copy(self, pairs):
    """Blocks share their staging, and none waits for the copies of the one before."""
    return self._memory.copy_all(pairs)


BREAKS = {
    "nobody waits for a gradient that leaves": (
        HostGradients, "_let_go", keep_no_ticket, "tickets were dropped",
    ),
    "a payload is used under its copy": (
        Chunk, "wait_gathered", use_under_its_copy, "freed under a copy",
    ),
    "a payload is filled that was not made": (
        Chunk, "gather", fill_what_was_freed, "a copy is given freed memory",
    ),
    "parameters leave and nothing is ordered behind them": (
        Chunk, "is_copied", lambda self, ticket: None, "another of its ends was ordered",
    ),
    "blocks share their staging": (
        DeviceStaging, "take_back", remember_no_copy, "another of its ends was ordered",
    ),
}  # fmt: skip


@functools.cache
def train_unbroken():
    train()


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.ci] * (i % 3 > 0)) for i, name in enumerate(BREAKS)],
)
def test_what_is_broken_is_found(name, monkeypatch):
    owner, attribute, broken, message = BREAKS[name]
    train_unbroken()
    monkeypatch.setattr(owner, attribute, broken)
    with pytest.raises(AssertionError, match=message):
        train()


@pytest.mark.ci  # the interpreter
def test_a_shard_that_is_written_while_it_is_sent_is_found(monkeypatch):
    """By the user, behind a forward that gathers it."""

    def edit(model):
        model.engine.manager.prepare(tuple(chunk.spec.id for chunk in model.engine.chunks))
        for chunk in model.engine.chunks:
            chunk.wait_gathered()
            chunk.shard.fill_(0.5)
        model.engine.manager.release_all()
        model.engine.backend.synchronize()

    edit(train())
    monkeypatch.setattr(Chunk, "settle_copies", lambda self: None)
    with pytest.raises(AssertionError, match="written while the copy reads it"):
        edit(train())


def test_an_operator_that_is_given_both_memories_is_found():
    backend = device(by_triton=True)
    there, here = backend.allocate(8, torch.float32), backend.allocate_host(8, torch.float32)
    with Apart(backend) as apart:
        there.add_(1.0)
        here.copy_(there)  # as torch's own copies do
        with pytest.raises(AssertionError, match="is given memory of the device and of the host"):
            there.add_(here)
        with pytest.raises(AssertionError, match="of the device and of the host"):
            (there * 2).add_(here)  # what an operator made is where its operands are
    assert apart.operators == 5
