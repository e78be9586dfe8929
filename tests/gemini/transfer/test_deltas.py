"""Deltas that leave: a receiver has the sender's bits, whatever became of the steps between."""

import errno

import pytest
import torch

from bench.shared.models import Tower, token_batches, token_loss
from bench.shared.simulated import SimBackend
from bench.shared.workers import run_ranks
from gemini import AutoPlacement, GeminiDDP, StaticPlacement
from gemini.chunk.layout import specs_of
from gemini.memtracer.trace import sequential_trace
from gemini.transfer.deltas import Size, gaps_of, packs_of, positions_of
from gemini.transfer.outgoing import digest_of
from nvme import TransferError
from optim import HybridAdam, NvmeConfig
from tests.support.disks.faults import failing
from tests.support.spilled import SMALL

BUCKET = 3000  # bytes
STEPS = 20
KINDS = {2: "skipped", 6: "undone", 7: "written", 9: "rewound", 11: "skipped", 12: "undone",
         14: "loaded", 15: "read", 17: "rewound"}  # fmt: skip


def made(home, folder, update, rank, world_size):
    nvme = NvmeConfig(block_numel=1024, keep_versions=2)
    policy, device, trace = StaticPlacement(), None, None
    if home == "streamed":
        device = SimBackend(rank, updates_by_triton=True)
        policy = StaticPlacement(1.0, 1.0, 1.0)
    if home == "replicated":
        policy = StaticPlacement.zero(2)
    module = Tower()
    if home == "files":  # where activations take nothing
        policy = AutoPlacement(world_size * 150 << 10, nvme_dir=folder)
        trace = sequential_trace(specs_of(module, "bfloat16"))
    model = GeminiDDP(module, device, policy, precision="bf16", trace=trace, update=update, **SMALL)
    on_disk = home in ("disk", "replicated")
    optimizer = HybridAdam(
        model.parameters(), lr=1e-3, nvme_offload_fraction=1.0 * on_disk,
        nvme_offload_dir=folder if on_disk else None, nvme=nvme,
    )  # fmt: skip
    return model, optimizer


class Receiver:
    """Weights of another process, which asks for what has changed since it asked."""

    def __init__(self, model):
        self.model, self.have, self.version = model, {}, None
        self.largest = max(param.nbytes for param in weights_of(model).values())

    def ask(self, deltas=True):
        """Bytes that came, of all that there are, and changed elements that deltas said."""
        nbytes, numel = 0, 0
        for bucket in self.model.weights(bytes=BUCKET, since=self.version, deltas=deltas):
            assert bucket.digest() == bucket.digest()
            assert bucket.nbytes <= max(BUCKET, self.largest)
            bucket.apply(self.have)
            nbytes += bucket.nbytes
            numel += sum(delta.numel for delta in bucket.deltas.values())
            version = bucket.version
        if nbytes:
            self.version = version
        return nbytes, numel

    def check(self):
        want = weights_of(self.model)
        found, wanted = (digest_of(dict(sorted(d.items()))) for d in (self.have, want))
        assert found == wanted
        return found


def weights_of(model):
    """Weights as modules see them."""
    with model.summon_full_params(writeback=False):
        return {name: param.detach().clone() for name, param in model.module.named_parameters()}


def differing(before, after):
    return sum(
        int((before[name].view(torch.int16) != value.view(torch.int16)).sum())
        for name, value in after.items()
    )


def gone_through(rank, home, folder, update, world_size):
    model, optimizer = made(home, folder, update, rank, world_size)
    receiver, sent, seen = Receiver(model), [], []
    can_fail = home in ("disk", "files")
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    receiver.ask()
    total = sum(tensor.nbytes for tensor in receiver.have.values())
    for i, parts in enumerate(token_batches(STEPS, world_size)):
        kind = KINDS.get(i, "plain")
        optimizer.param_groups[0]["lr"] = 1e-3 if i < 5 else 1e-6
        before = {name: value.clone() for name, value in receiver.have.items()}
        token_loss(model, parts[rank]).backward()
        if kind == "skipped":
            model.module.layers[0][0].weight.grad.fill_(float("inf"))
        if kind == "undone" and can_fail:
            name = optimizer.targets[0].tiered_state.nvme.store.paths[0].name
            with (
                failing("pwritev", errno.EIO, name, after=3, times=1),
                pytest.raises((TransferError, RuntimeError)),
            ):
                optimizer.step()
                model.state_dict()  # of a tail it is whoever reads that is told
        else:
            optimizer.step()
        optimizer.zero_grad()
        if kind == "rewound" and can_fail:
            receiver.ask()
            model.rewind(1)
        if kind == "written":
            with torch.no_grad(), model.summon_full_params():
                model.module.layers[1][1].bias.fill_(0.25)
        if kind == "loaded":
            model.load_state_dict(saved)
        if kind == "read":
            model.module.layers[0][1].bias.data  # noqa: B018
        nbytes, numel = receiver.ask()
        seen.append(receiver.check())
        if kind == "plain" and i > 5:
            sent.append(nbytes / total)
            assert numel == differing(before, receiver.have) > 0
            assert nbytes <= 4 * numel
        if kind == "skipped":
            assert nbytes == 0
        if kind == "loaded":
            assert nbytes == total
    assert sent and max(sent) <= 0.06
    assert model.engine.storage.changed.nbytes * 16 >= total / world_size
    optimizer.close()
    return seen


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize(
    ("home", "update"), [("disk", "tail"), ("files", "serial"), ("files", "tail")]
)
def test_a_receiver_has_the_senders_digest_over_20_steps(home, update, world_size, tmp_path):
    results = run_ranks(gone_through, world_size, home, str(tmp_path), update, world_size)
    assert all(found == results[0] for found in results)


@pytest.mark.parametrize(("home", "update"), [
    ("resident", "serial"), ("replicated", "serial"), ("streamed", "serial"),
    ("streamed", "speculate"), ("streamed", "tail"),
])  # fmt: skip
def test_and_so_it_has_where_no_disk_is(home, update, tmp_path):
    results = run_ranks(gone_through, 2, home, str(tmp_path), update, 2)
    assert results[0] == results[1]
