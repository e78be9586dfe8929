"""The ledger's running sums are what chunks hold, whatever was done to them."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.shared.models import token_batches, token_loss
from bench.shared.simulated import SimBackend
from gemini import AutoPlacement, StaticPlacement
from gemini.chunk.gradient import Account, ChunkGradient
from gemini.chunk.layout import ChunkLayout, ParamSpec
from gemini.placement.tiers import Tier
from gemini.runtime.memory.ledger import MemoryLedger
from gemini.tickets import Done
from tests.support.spilled import wrapped


def recounted(engine):
    """Bytes of chunks by tier and kind, from the chunks themselves."""
    host = Tier.HOST if engine.backend.has_host_tier else Tier.DEVICE
    found = {(Tier.DEVICE, "parameters"): 0, (Tier.DEVICE, "gradients"): 0, (host, "parameters"): 0}
    for chunk in engine.chunks:
        found[Tier.DEVICE, "parameters"] += chunk.payload.nbytes * chunk.gathered
        home = host if chunk.shard_on_host else Tier.DEVICE
        found[home, "parameters"] += chunk.memory_nbytes
        found[Tier.DEVICE, "gradients"] += chunk.gradient.nbytes
    found[Tier.DEVICE, "gradients"] += engine.storage.leaving_bytes
    return found


def check(engine):
    in_use = engine.manager.bytes_in_use()
    in_use[Tier.HOST, "gradients"] = 0  # of a store of their own
    for key, nbytes in recounted(engine).items():
        assert in_use.get(key, 0) == nbytes, key


@pytest.mark.parametrize(("device", "placement"), [
    (None, "cuda"), (None, AutoPlacement("130KiB")), (None, AutoPlacement("300KiB")),
    (1, "static"), (2, StaticPlacement(offload_param_frac=0.5)),
    (3, AutoPlacement("90KiB", "2MiB")), (4, AutoPlacement("90KiB", "200KiB")),
])  # fmt: skip
def test_what_is_in_use_is_what_chunks_hold(device, placement):
    model, optimizer = wrapped(placement, device=None if device is None else SimBackend(device))
    engine = model.engine

    def checked(method):
        def call(*args, **kwargs):
            method(*args, **kwargs)
            check(engine)

        return call

    for name in ("begins", "backward_begins", "gradient_arrived"):
        setattr(engine.calls, name, checked(getattr(engine.calls, name)))
    for step, (ids,) in enumerate(token_batches(2, 1)):
        for _ in range(1 + step):
            token_loss(model, ids).backward()
            check(engine)
        if step == 1:
            model.zero_grad(set_to_none=False)
        with torch.no_grad():
            token_loss(model, ids)
        optimizer.step()
        optimizer.zero_grad()
        check(engine)
    with model.summon_full_params():
        check(engine)
    model.state_dict()
    check(engine)


class TwoRanks:
    """A group of this rank and one that sends nothing."""

    rank, world_size, num_means, is_alone = 0, 2, 2, False
    tie = None
    sums = property(lambda self: self)

    def reduce_scatter(self, shard, payload, label):
        shard.copy_(payload[: shard.numel()])
        return Done(None)


class Kept:
    """A home of gradients in a dict."""

    def __init__(self):
        self.values = {}

    def write(self, chunk, values):
        self.values[chunk] = values.clone()

    def read(self, chunk, into):
        into.copy_(self.values[chunk])
        return Done(None)


class Memory:
    def allocate(self, numel, dtype):
        return torch.zeros(numel, dtype=dtype)


ACTIONS = ["add 0", "add 1", "begin", "end", "unreduced", "scale", "zero", "drop", "send", "fetch"]


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.sampled_from(ACTIONS), max_size=25),
    st.sampled_from([1, 2]),
    st.sampled_from([None, torch.bfloat16, torch.float32]),
)
def test_gradients_are_counted_in_any_order_of_calls(actions, world_size, travels_as):
    links = TwoRanks()
    links.world_size = links.num_means = world_size
    links.is_alone = world_size == 1
    specs = [ParamSpec("m.a", (300,), "bfloat16"), ParamSpec("m.b", (70,), "bfloat16")]
    (spec,) = ChunkLayout.build(specs, 1 << 10, world_size).chunks
    gradient = ChunkGradient(spec, Memory(), links, travels_as)
    gradient.account = account = Account()
    for action in actions:
        if action.startswith("add"):
            if gradient.exists and world_size == 1 and gradient.buffer is not None:
                continue  # the engine reduces first
            slot = int(action[-1])
            gradient.add(slot, torch.ones(spec.slots[slot].numel, dtype=torch.bfloat16))
        elif action == "begin":
            if not (world_size == 1 and gradient.exists):
                gradient.begin_reduce()
        elif action == "scale":
            gradient.scale(torch.tensor(2.0))
        elif action in ("send", "fetch"):
            gradient.send(Kept() if action == "send" else None)
        else:
            {"end": gradient.end_reduce, "unreduced": gradient.end_backward_unreduced,
             "zero": gradient.zero, "drop": gradient.drop}.get(action, lambda: None)()  # fmt: skip
        assert account.gradients == gradient.nbytes, action


def test_peaks_stay_when_less_is_held():
    accounts = []
    ledger = MemoryLedger([SimpleNamespace(count_in=accounts.append)])
    ledger.watched = True
    for nbytes in (3, 7, 5):
        accounts[0].payloads = nbytes
        ledger.note()
    assert ledger.peaks == {Tier.DEVICE: {"parameters": 7}}
