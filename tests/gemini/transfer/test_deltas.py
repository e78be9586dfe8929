"""Deltas that leave: a receiver has the sender's bits, whatever became of the steps between."""

import errno
from itertools import pairwise
from unittest import mock

import pytest
import torch

from bench.shared.models import Tower, token_batches, token_loss
from bench.shared.simulated import SimBackend
from bench.shared.workers import run_ranks
from gemini import AutoPlacement, GeminiDDP, StaticPlacement
from gemini.chunk.layout import specs_of
from gemini.memtracer.trace import sequential_trace
from gemini.placement.sizes import BudgetError
from gemini.placement.tiers import Tier
from gemini.runtime.memory.changed_weights import ChangedWeights
from gemini.transfer.deltas import Size, gaps_of, packs_of, positions_of
from gemini.transfer.outgoing import digest_of
from nvme import TransferError
from optim import HybridAdam, NvmeConfig
from tests.support.disks.faults import failing
from tests.support.spilled import SMALL
from tests.support.towers import weights_of

BUCKET = 3000  # bytes
STEPS = 20
KINDS = {2: "skipped", 6: "undone", 7: "written", 9: "rewound", 11: "skipped", 12: "undone",
         14: "loaded", 15: "read", 17: "rewound"}  # fmt: skip


def made(home, folder, update, rank, world_size, budget=152):
    on_disk = home in ("disk", "files", "replicated")
    nvme = NvmeConfig(block_numel=1024 if on_disk else 1 << 16, keep_versions=2 * on_disk)
    policy, device, trace = StaticPlacement(), None, None
    if home == "streamed":
        device = SimBackend(rank, updates_by_triton=True)
        policy = StaticPlacement(1.0, 1.0, 1.0)
    if home == "replicated":
        policy = StaticPlacement.zero(2)
    module = Tower()
    if home == "files":  # where activations take nothing
        policy = AutoPlacement(world_size * budget << 10, nvme_dir=folder)
        trace = sequential_trace(specs_of(module, "bfloat16"))
    model = GeminiDDP(module, device, policy, precision="bf16", trace=trace, update=update, **SMALL)
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
        """Bytes that came, and the deltas."""
        nbytes, found = 0, {}
        for bucket in self.model.weights(bytes=BUCKET, since=self.version, deltas=deltas):
            assert bucket.digest() == bucket.digest()
            assert bucket.nbytes <= max(BUCKET, self.largest)
            bucket.apply(self.have)
            nbytes += bucket.nbytes
            assert not found.keys() & bucket.deltas.keys()
            found |= {name: (d.numel, d.nbytes) for name, d in bucket.deltas.items()}
            version = bucket.version
        if nbytes:
            self.version = version
        return nbytes, found

    def check(self):
        want = weights_of(self.model)
        found, wanted = (digest_of(dict(sorted(d.items()))) for d in (self.have, want))
        assert found == wanted
        return found


def check_deltas(found, before, after):
    """Each has what differs and nothing else, in less than positions of 4 bytes would take."""
    assert found
    for name, (numel, nbytes) in found.items():
        differs = before[name].view(torch.int16) != after[name].view(torch.int16)
        assert numel == int(differs.sum()) > 0
        assert nbytes <= 3 * numel + differs.numel() // 255


def gone_through(rank, home, folder, update, world_size, steps=range(STEPS)):
    model, optimizer = made(home, folder, update, rank, world_size)
    receiver, sent, seen = Receiver(model), [], []
    can_fail = home in ("disk", "files", "replicated")
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    receiver.ask()
    total = sum(tensor.nbytes for tensor in receiver.have.values())
    batches = token_batches(STEPS, world_size)
    for i in steps:
        parts = batches[i]
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
        nbytes, found = receiver.ask()
        seen.append(receiver.check())
        if kind == "plain" and i > 5:
            sent.append(nbytes / total)
            check_deltas(found, before, receiver.have)
        is_early = update in ("speculate", "both")  # whose bits are set in backward
        if kind == "skipped" and not is_early:
            assert nbytes == 0
        if kind == "loaded":
            assert nbytes == total
    assert sent and max(sent) <= 0.06
    assert model.engine.storage.changed.nbytes * 16 >= total / world_size
    optimizer.close()
    return seen


CASES = [
    pytest.param("disk", "tail", 1),
    pytest.param("files", "tail", 2),
    *(
        pytest.param(home, update, world_size, marks=pytest.mark.ci)
        for home, update, world_size in (
            ("disk", "tail", 2), ("disk", "tail", 4), ("disk", "serial", 2), ("files", "serial", 1),
            ("files", "serial", 2), ("files", "tail", 1), ("files", "tail", 4),
            ("replicated", "serial", 2), ("resident", "serial", 2),
        )
    ),
]  # fmt: skip


@pytest.mark.parametrize(("home", "update", "world_size"), CASES)
def test_a_receiver_has_the_senders_digest_over_20_steps(home, update, world_size, tmp_path):
    results = run_ranks(gone_through, world_size, home, str(tmp_path), update, world_size)
    assert len(results[0]) == STEPS and all(found == results[0] for found in results)


@pytest.mark.ci
@pytest.mark.parametrize("update", ["serial", "speculate", "tail", "both"])
def test_a_receiver_has_the_senders_digest_where_kernels_stream(update, tmp_path):
    """Fewer steps: kernels are interpreted."""
    run_ranks(gone_through, 1, "streamed", str(tmp_path), update, 1, (0, 2, 6, 7, 8, 14, 16))


def early_and_sent(rank):
    """Weights leave between a backward, in which spans were updated early, and their step."""
    model, optimizer = made("streamed", None, "speculate", 0, 1)
    receiver = Receiver(model)
    receiver.ask()
    for (ids,) in token_batches(4, 1):
        token_loss(model, ids).backward()
        receiver.ask()
        receiver.check()
        optimizer.step()
        optimizer.zero_grad()
        receiver.ask()
        receiver.check()
    optimizer.close()


@pytest.mark.ci
def test_what_is_updated_early_is_changed_with_its_step():
    run_ranks(early_and_sent, 1)


def test_marks_are_counted_and_parked_with_the_rest(tmp_path):
    run_ranks(counted, 1, str(tmp_path))


def counted(rank, folder):
    model, optimizer = made("disk", folder, "serial", 0, 1)
    before = sum(model.engine.ledger.totals().values())
    receiver = Receiver(model)
    receiver.ask(deltas=False)
    assert model.engine.storage.changed is None  # nobody else pays
    receiver.ask()
    kept = model.engine.storage.changed
    elements = sum(chunk.spec.shard_numel for chunk in model.engine.chunks)
    assert kept.nbytes * 8 == elements
    assert sum(model.engine.ledger.totals().values()) == before + kept.nbytes
    assert dict(model.engine.planning.inputs.average) == {Tier.DEVICE: kept.nbytes}
    step(model, optimizer)
    model.park("nvme")
    assert all(bits.untyped_storage().nbytes() == 0 for bits in kept.bits.values())
    model.resume()
    receiver.ask()
    receiver.check()
    optimizer.close()


def refused(rank, folder):
    model, optimizer = made("files", folder, "serial", rank, 2, budget=150)
    with pytest.raises(BudgetError, match="too small"):
        Receiver(model).ask()
    assert model.engine.storage.changed is None
    step(model, optimizer)
    receiver = Receiver(model)
    receiver.ask(deltas=False)
    receiver.check()
    optimizer.close()


def test_marks_above_a_budget_are_refused_and_whole_weights_leave_still(tmp_path):
    run_ranks(refused, 2, str(tmp_path))


def step(model, optimizer):
    (ids,) = token_batches(1, 1)[0]
    token_loss(model, ids).backward()
    optimizer.step()
    optimizer.zero_grad()


def test_a_receiver_that_stopped_half_way_asks_again(tmp_path):
    run_ranks(stopped, 1, str(tmp_path))


def stopped(rank, folder):
    model, optimizer = made("disk", folder, "serial", 0, 1)
    receiver = Receiver(model)
    receiver.ask()
    step(model, optimizer)
    sent = model.weights(bytes=BUCKET, since=receiver.version, deltas=True)
    next(sent).apply(receiver.have)
    sent.close()
    step(model, optimizer)
    receiver.ask()
    receiver.check()
    step(model, optimizer)
    (bucket,) = (b for b in model.weights(since=receiver.version, deltas=True) if b.deltas)
    with pytest.raises(ValueError, match="is not here"):
        bucket.apply({})
    name, delta = next(iter(bucket.deltas.items()))
    for other in (receiver.have[name].float(), receiver.have[name].view(-1)[1:]):
        with pytest.raises(ValueError, match="the parameter that it is of"):
            delta.apply(other)
    optimizer.close()


def test_a_step_behind_the_last_bucket_keeps_its_bits():
    """A receiver that knows how many buckets come asks for no more."""
    model = GeminiDDP(Tower(), precision="bf16", **SMALL)
    optimizer = HybridAdam(model.parameters(), lr=1e-6)
    receiver = Receiver(model)
    receiver.ask()
    step(model, optimizer)
    with mock.patch.object(ChangedWeights, "restart"):
        count = len([*model.weights(since=receiver.version, deltas=True)])
    sent = model.weights(since=receiver.version, deltas=True)
    for _ in range(count):
        bucket = next(sent)
        bucket.apply(receiver.have)
    step(model, optimizer)
    assert next(sent, None) is None
    receiver.version = bucket.version
    _, found = receiver.ask()
    assert found  # and not whole parameters, of which nothing is known
    receiver.check()
    optimizer.close()


def test_an_old_version_gets_whole_parameters():
    model = GeminiDDP(Tower(), precision="bf16", **SMALL)
    optimizer = HybridAdam(model.parameters(), lr=1e-6)
    slow, fast = Receiver(model), Receiver(model)
    for receiver in (slow, fast):
        receiver.ask()
    for _ in range(2):
        step(model, optimizer)
        fast.ask()
        fast.check()
    nbytes, found = slow.ask()
    assert found == {} and nbytes > 0
    slow.check()
    optimizer.close()


def test_gaps_are_positions_again_and_packs_have_every_run_once():
    generator = torch.Generator().manual_seed(0)
    for density in (0.0, 0.0005, 0.02, 0.5, 1.0):
        flags = torch.rand(20_000, generator=generator) < density
        positions = flags.nonzero().view(-1)
        gaps = gaps_of(positions)
        assert torch.equal(positions_of(gaps), positions)
        assert len(gaps) <= len(positions) + 20_000 // 255
    sizes = [
        {0: [Size(0, 3, 3), Size(9, 1, 1)], 2: [Size(0, 100, 101)]},
        {2: [Size(500, 7, 9)], 3: [Size(0, 1, 1)]},
    ]
    for nbytes in (1, 40, 400, 4000):
        packs = [*packs_of({0: 2, 1: 2, 2: 2, 3: 4}, sizes, nbytes)]
        assert [param for pack in packs for param in pack.params] == [0, 2, 3]
        assert all(pack.nbytes <= nbytes or len(pack.params) == 1 for pack in packs)
        for pack in packs:
            taken = [place for of_rank in pack.parts for part in of_rank
                     for place in (part.values, part.gaps)]  # fmt: skip
            assert all(a.stop <= b.start for a, b in pairwise(taken))
            assert all(part.first % part.itemsize == 0 for parts in pack.parts for part in parts)
            assert taken[-1].stop <= pack.nbytes
        found = [part.size for pack in packs for of_rank in pack.parts for part in of_rank]
        assert len(found) == 5
