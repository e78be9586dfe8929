"""Wrapped modules whose activations leave the device: weights and state as if they had stayed."""

import copy
import errno
import os

import pytest
import torch
from torch import func, nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import nvme
from bench.shared.threads import run_threads
from gemini import AutoPlacement, GeminiDDP
from gemini.placement.predict import KINDS
from gemini.placement.tiers import Tier
from optim import HybridAdam, NvmeConfig
from tests.support.disks.faults import failing

MIB = 1 << 20


class Block(nn.Module):
    def __init__(self, recomputes=False, p=0.1):
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(64), nn.Dropout(p)
        self.a, self.b = nn.Linear(64, 256), nn.Linear(256, 64)
        self.recomputes = recomputes

    def inner(self, x):
        return self.drop(self.b(nn.functional.gelu(self.a(self.norm(x)))))

    def forward(self, x):
        if self.recomputes:
            return x + checkpoint(self.inner, x, use_reentrant=False)
        return x + self.inner(x)


def blocks(**options):
    torch.manual_seed(0)
    return nn.Sequential(*[Block(**options) for _ in range(4)])


PLAIN, RECOMPUTED = blocks(), blocks(recomputes=True)
NO_DRAWS = blocks(p=0.0)  # threads have one random generator


def wrapped(policy, module=PLAIN, write_budget=None, **options):
    model = GeminiDDP(
        copy.deepcopy(module), None, policy, precision="fp32", min_chunk_size_m=0.02, **options
    )
    nvme = NvmeConfig(block_numel=8192, write_budget=write_budget)
    return model, HybridAdam(model.parameters(), lr=1e-2, nvme=nvme)


def batch(step):
    return torch.randn(8, 64, 64, generator=torch.Generator().manual_seed(step))


def keeps(saved, nbytes):
    """Keep so many bytes, whatever plans say."""
    saved.keep_at_most(nbytes)
    saved.keep_at_most = saved.keep_what_fits = lambda *_: None


def steps(model, optimizer, keep=None, num=3, first=0):
    """Train; bytes that were saved, that stayed, and that went to the file, by step."""
    seen, saved = [], model.engine.saved_tensors
    if keep is not None:  # whatever plans say
        keeps(saved, keep)
    for step in range(num):
        if model.engine.comm.world_size == 1:
            torch.manual_seed(step)
        loss = model(batch(first + step)).square().mean()
        if saved is not None:
            seen.append((saved.live_bytes, saved.resident_bytes, saved.traffic.nvme_out))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if saved is not None:
            assert (saved.live_bytes, saved.resident_bytes) == (0, 0)
    return seen


def spill(folder, device="60MiB", **options):
    return AutoPlacement(device, nvme_dir=str(folder), activations="spill", **options)


@pytest.mark.parametrize("update", ["serial", "tail"])
@pytest.mark.parametrize("module", [PLAIN, RECOMPUTED], ids=["plain", "recomputed"])
def test_bits_are_those_of_activations_that_stay(module, update, tmp_path):
    """Chunks are released and state is in files; a tail runs beside the forward that spills."""
    model, optimizer = wrapped("cuda", module)
    steps(model, optimizer)
    small = spill(tmp_path, "6MiB", host_budget="6MiB", block_numel=8192)
    other, its = wrapped(small, module, update=update)
    assert not other.engine.sharding.all_gathered
    state_homes = {home for shard in other.engine.plan.shards for home in shard.state_homes}
    assert Tier.NVME in state_homes
    seen = steps(other, its, keep=0 if module is RECOMPUTED else 1 * MIB)
    assert all(out > 0 for _, _, out in seen)
    assert other.digest() == model.digest()
    its.close()
    other.unwrap()
    assert not list(tmp_path.iterdir())


@pytest.mark.ci
def test_ranks_spill_each_for_itself(tmp_path):
    """One keeps all, the other spills all: nothing of it is agreed on."""

    def train(policy, keeps):
        def run(rank):
            model, optimizer = wrapped(policy, NO_DRAWS)
            seen = steps(model, optimizer, keep=keeps and keeps[rank], first=10 * rank)
            return model.digest(), seen

        return run_threads(run, 2)

    expected = train("zero3", None)
    (mine, kept), (theirs, left) = train(spill(tmp_path), (None, 0))
    assert mine == theirs == expected[0][0] == expected[1][0]
    assert all(resident == live > 0 == out for live, resident, out in kept)
    assert all(out == live > 0 == resident for live, resident, out in left)


def test_what_the_budget_leaves_decides_until_a_plan_does(tmp_path):
    """Where all fits nothing moves; else what is over goes, and the device holds its budget."""
    model, optimizer = wrapped(spill(tmp_path))
    (live, resident, out), *_ = steps(model, optimizer, num=1)
    assert live == resident > 4 * MIB and out == 0
    model, optimizer = wrapped(spill(tmp_path, "4MiB"))
    engine = model.engine
    saved = engine.saved_tensors
    loss = model(batch(0)).square().mean()
    rows = engine.planning.result.profile.rows
    kinds = [rows[Tier.DEVICE, kind] for kind in KINDS if kind != "non-model"]
    model_bytes = max(engine.ledger.device_bytes(), *map(sum, zip(*kinds, strict=True)))
    room = 4 * MIB - model_bytes - 2 * saved.largest_bytes - saved.in_flight_bytes
    assert room - saved.largest_bytes < saved.resident_bytes <= room
    loss.backward()
    assert 0 < saved.traffic.nvme_out < live
    optimizer.step()
    (peak,) = engine.sampler.device_peaks.values()
    assert peak <= 4 * MIB


def test_where_nothing_leaves_the_ledger_has_no_buffers(tmp_path):
    """No plan in which all stays counts them, nor one of evaluation, however much left before."""
    model, optimizer = wrapped(spill(tmp_path))
    saved, ledger = model.engine.saved_tensors, model.engine.ledger
    found, keep_at_most = [], saved.keep_at_most
    for keep, trains in [(None, True), (0, True), (None, True), (0, True), (0, False), (0, True)]:
        saved.keep_at_most = saved.keep_what_fits = lambda *_, keep=keep: keep_at_most(keep)
        with torch.set_grad_enabled(trains):
            loss = model(batch(0)).square().mean()
        kinds = ledger.bytes_in_use()
        found.append((saved.staging_bytes, kinds.get((Tier.DEVICE, "staging"), 0)))
        if trains:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    buffers = saved.in_flight_bytes
    assert [mine for mine, _ in found] == [0, buffers, 0, buffers, 0, buffers]
    assert [all_ - mine for mine, all_ in found] == [found[0][1]] * len(found)


def test_files_count_in_the_budget_of_writes(tmp_path):
    """Those of the first forward too, which is before there is state. A forward that would pass it
    raises before it writes, and the weights are those of the last step."""
    seen = [out for _, _, out in steps(*wrapped(spill(tmp_path)), keep=0)]
    assert len(seen) == 3 and min(seen) > 1 * MIB
    enough = sum(seen)  # no state is on disk
    steps(*wrapped(spill(tmp_path), write_budget=enough), keep=0)
    model, optimizer = wrapped(spill(tmp_path), write_budget=enough - 1)
    saved = model.engine.saved_tensors
    keeps(saved, 0)
    steps(model, optimizer, num=2)
    before = model.digest()
    with pytest.raises(nvme.WriteBudgetError, match="what this forward saves for backward"):
        model(batch(2))
    assert 0 < saved.traffic.nvme_out < seen[2]
    assert model.digest() == before and saved.live_bytes == saved.resident_bytes == 0
    with torch.no_grad():  # nothing is saved, so nothing is written
        model(batch(2))


def failed_writing(rank, folder):
    """Error of a forward that rank 1's budget of writes refuses."""
    ((_, _, a_step),) = steps(*wrapped(spill(folder), NO_DRAWS), keep=0, num=1)
    budget = a_step if rank == 1 else None
    model, optimizer = wrapped(spill(folder), NO_DRAWS, budget)
    model.engine.comm.deadline_seconds = 0.05  # then ranks compare what they do
    keeps(model.engine.saved_tensors, 0)
    loss = model(batch(rank)).square().mean()
    loss.backward()
    optimizer.step()
    with pytest.raises(RuntimeError if rank == 0 else nvme.WriteBudgetError) as error:
        model(batch(rank)).square().mean().backward()
    return str(error.value)


@pytest.mark.ci
def test_a_rank_that_may_write_no_more_is_an_error_on_all(tmp_path):
    other, mine = run_threads(lambda rank: failed_writing(rank, tmp_path), 2, backend="gloo")
    assert "nvme_write_budget" in mine
    assert "rank 1 failed" in other and "nvme_write_budget" in other


def failed_reading(rank, folder):
    """Error of a backward whose saved tensors rank 1's disk does not give back."""
    own = folder / f"of-rank-{rank}"
    own.mkdir()
    model, _ = wrapped(spill(own), NO_DRAWS)
    model.engine.comm.deadline_seconds = 0.05  # then ranks compare what they do
    keeps(model.engine.saved_tensors, 0)
    loss = model(batch(rank)).square().mean()
    with pytest.raises(RuntimeError if rank == 0 else nvme.TransferError) as error:
        loss.backward()
    return str(error.value)


def test_a_saved_tensor_that_cannot_be_read_is_an_error_on_all(tmp_path):
    with failing("preadv", errno.EIO, "of-rank-1/") as failed:  # once, for both threads
        other, mine = run_threads(lambda rank: failed_reading(rank, tmp_path), 2, backend="gloo")
    assert failed and all("saved-" in path for path in failed)
    assert os.strerror(errno.EIO) in mine
    assert "rank 1 failed" in other and os.strerror(errno.EIO) in other


def in_forward_mode(model, x):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(model(forward_ad.make_dual(x, torch.ones_like(x)))).tangent


def batched_backward(model, x):
    x = x.clone().requires_grad_()
    out = model(x)
    rows = torch.stack([torch.ones_like(out), 2 * torch.ones_like(out)])
    return torch.autograd.grad(out, x, rows, is_grads_batched=True)[0]


DERIVED = {
    "jvp": lambda model, x: func.jvp(model, (x,), (torch.ones_like(x),))[1],
    "vmap": lambda model, x: func.vmap(model)(x),
    "vmapped jvp": lambda model, x: func.vmap(
        lambda row: func.jvp(model, (row,), (torch.ones_like(row),))[1]
    )(x),
    "forward mode": in_forward_mode,
    "batched backward": batched_backward,
}


@pytest.mark.parametrize("name", DERIVED)
def test_other_derivatives_have_the_bits_of_plain(name, tmp_path):
    """Tangents that are zero have no memory that could leave. What has a graph is differentiated
    again."""
    plain = DERIVED[name](copy.deepcopy(NO_DRAWS), batch(0))
    digests = []
    for policy in ("cuda", spill(tmp_path)):
        model, optimizer = wrapped(policy, NO_DRAWS)
        saved, begun = model.engine.saved_tensors, model.digest()
        if saved is not None:
            keeps(saved, 0)
        found = DERIVED[name](model, batch(0))
        assert torch.equal(found, plain) and (saved is None or saved.traffic.nvme_out > 0)
        if found.requires_grad:
            found.square().mean().backward()
            optimizer.step()
            assert model.digest() != begun
        del found
        assert saved is None or saved.live_bytes == 0
        digests.append(model.digest())
    assert digests[0] == digests[1]


@pytest.mark.parametrize("transform", [func.grad, func.vjp, func.jacrev])
def test_transforms_that_go_backward_are_refused_by_name(transform, tmp_path):
    """Nothing is left behind, and training goes on."""
    model, optimizer = wrapped(spill(tmp_path), NO_DRAWS)
    loss = lambda x: model(x).square().mean()  # noqa: E731
    with pytest.raises(RuntimeError, match="create_graph=True cannot go through a wrapped module"):
        if transform is func.vjp:
            func.vjp(loss, batch(0))[1](torch.ones(()))
        else:
            transform(loss)(batch(0))
    assert model.engine.saved_tensors.live_bytes == 0
    other, its = wrapped(spill(tmp_path), NO_DRAWS)
    steps(model, optimizer), steps(other, its)
    assert model.digest() == other.digest()


def test_transforms_around_parameters_in_files_are_refused_by_name(tmp_path):
    small = spill(tmp_path, "6MiB", host_budget="6MiB", block_numel=8192)
    model, optimizer = wrapped(small, NO_DRAWS)
    before = model.digest()
    for name in ("jvp", "vmap"):
        with pytest.raises(RuntimeError, match="whose parameters are in RAM or files"):
            DERIVED[name](model, batch(0))
    assert model.digest() == before
    other, its = wrapped(small, NO_DRAWS)
    steps(model, optimizer), steps(other, its)
    assert model.digest() == other.digest()


def test_evaluation_and_unwrapping_leave_nothing(tmp_path):
    model, _ = wrapped(spill(tmp_path))
    saved = model.engine.saved_tensors
    keeps(saved, 0)
    with torch.no_grad():
        model(batch(0))
    assert saved.live_bytes == saved.traffic.nvme_out == 0
    output = model(batch(0))
    assert saved.live_bytes > 0
    del output
    assert saved.live_bytes == 0
    assert model.engine.ledger.totals()[Tier.DEVICE] >= saved.staging_bytes > 0
    model.unwrap()
    assert saved.staging_bytes == 0 and not list(tmp_path.iterdir())


def test_hooks_around_the_model_are_used_instead(tmp_path):
    model, _ = wrapped(spill(tmp_path))
    keeps(model.engine.saved_tensors, 0)
    with torch.autograd.graph.save_on_cpu():
        output = model(batch(0))
    assert model.engine.saved_tensors.live_bytes == 0
    output.sum().backward()


def test_activations_that_stay_cost_nothing():
    model, _ = wrapped(AutoPlacement("60MiB"))
    assert model.engine.saved_tensors is None
    output = model(batch(0))
    assert output.grad_fn is not None


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"activations": "all"}, r"activations='all'; expected one of \('keep', 'spill', 'auto'\)"),
        ({"activations": "spill"}, r"on the CPU.*AutoPlacement\(nvme_dir=\.\.\.\)"),
    ],
)
def test_an_option_without_a_meaning_is_refused_by_name(options, says):
    with pytest.raises(ValueError, match=says):
        wrapped(AutoPlacement("60MiB", **options))


def test_a_folder_that_is_none_is_refused_before_anything_is_changed(tmp_path):
    module = blocks()
    with pytest.raises(nvme.FolderError):
        GeminiDDP(module, None, spill(tmp_path / "none"))
    assert all(type(param) is nn.Parameter for param in module.parameters())
