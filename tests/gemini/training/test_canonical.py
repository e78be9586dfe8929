"""`canonical=True`: one digest of weights and state at any number of ranks, in every home."""

import hashlib
import math
from fractions import Fraction
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import gemini
from bench.shared.models import seeded
from bench.shared.simulated import SimBackend
from bench.shared.workers import run_ranks
from gemini import GeminiDDP, StaticPlacement
from gemini.chunk.layout import ChunkSpec, Slot
from gemini.placement.sizes import UNLIMITED, Budgets, with_sums
from gemini.runtime.canonical.exact import LEAST_BIT, bins_of, integer_of
from gemini.runtime.canonical.order import CanonicalGradient
from gemini.tickets import Done
from gemini.units import ChunkId, ParamId
from optim import HybridAdam, HybridLamb, HybridMuon, NvmeConfig

MAX_NORM = 0.02  # gradients have norms of about 0.1
NUM_STEPS = 3
# by tier: the device, and the shares of the state in host memory and on NVMe
TIERS = {
    "resident": (lambda: "cpu", 0.0, 0.0),
    "host": (SimBackend, 1.0, 0.0),
    "stream": (lambda: SimBackend(updates_by_triton=True), 1.0, 0.0),
    "nvme": (lambda: "cpu", 0.0, 1.0),
}


class Small(nn.Module):
    """Layers of odd sizes in several chunks, one of which not every micro-batch uses."""

    def __init__(self):
        super().__init__()
        with seeded():
            self.first, self.last = nn.Linear(33, 77, bias=False), nn.Linear(77, 33)
            self.aside = nn.Linear(77, 33, bias=False)

    def forward(self, x, aside=True):
        inner = nn.functional.gelu(self.first(x))
        out = self.last(inner)
        return out + self.aside(inner) if aside else out


def numbered(steps, count):
    """By step, micro-batches in the order of their numbers."""
    generator = torch.Generator().manual_seed(1)
    return [[torch.randn(5, 33, generator=generator) for _ in range(count)] for _ in range(steps)]


def wrapped(precision="fp32", tier="resident", update="serial", *, folder=None, size=0.003,
            canonical=True, compiled=False, **options):  # fmt: skip
    device, host, disk = TIERS[tier]
    model = GeminiDDP(
        Small(), device(), options.pop("policy", StaticPlacement(offload_optim_frac=host)),
        precision=precision, min_chunk_size_m=size, update=update, canonical=canonical, **options,
    )  # fmt: skip
    paths = {"cpu_path": "compile"} if compiled and tier != "stream" else {}
    optimizer = HybridAdam(
        model.parameters(), lr=1e-2, eps=1e-3, weight_decay=0.01, nvme_offload_fraction=disk,
        nvme_offload_dir=None if folder is None else str(folder),
        nvme=NvmeConfig(block_numel=1024), **paths,
    )  # fmt: skip
    return model, optimizer


def loss_of(model, batch, aside=True):
    return model(batch, aside).float().square().mean()


def plainly(model, mine, aside):
    for batch in mine:
        (loss_of(model, batch, aside) / len(mine)).backward()


def train(model, optimizer, steps, count, *, first=0, passes=plainly, clip=None):
    """Steps of `count` micro-batches, dealt to ranks in turn; one layer rests in the second."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if dist.is_initialized() else 0
    for step, batches in enumerate(numbered(first + steps, count)[first:], first):
        passes(model, batches[rank::ranks], step != 1)
        if clip is not None:
            clip(model)
        else:
            assert float(model.clip_grad_norm_(MAX_NORM)) > MAX_NORM
        optimizer.step()
        optimizer.zero_grad()


def digest(model, optimizer):
    """Of weights, planes of state and step counts, by parameter; of rank 0, others have none."""
    weights, state = model.state_dict(), optimizer.state_dict()["state"]
    optimizer.close()
    if dist.is_initialized() and dist.get_rank():
        return ""
    found = hashlib.sha256()
    for name, _ in Small().named_parameters():
        planes = {**state[name], "step": torch.as_tensor(float(state[name]["step"]))}
        for tensor in (weights[name], *(planes[plane] for plane in sorted(planes))):
            found.update(tensor.float().contiguous().numpy().tobytes())
    return found.hexdigest()


def trained(rank, count, precision="fp32", tier="resident", update="serial", folder=None, **given):
    """Digest of a run."""
    how = {key: given.pop(key) for key in ("passes", "clip") if key in given}
    model, optimizer = wrapped(precision, tier, update, folder=folder, **given)
    train(model, optimizer, NUM_STEPS, count, **how)
    return digest(model, optimizer)


def at(ranks, *args, processes=False, **given):
    if ranks == 1:
        return trained(0, *args, **given)
    return run_ranks(_given, ranks, args, given, processes=processes)[0]


def _given(rank, args, given):
    return trained(rank, *args, **given)


# -- one digest --


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_product_of_ranks_and_micro_batches_has_one_digest(precision):
    one = at(1, 4, precision)
    assert [at(ranks, 4, precision) for ranks in (2, 4)] == [one, one]
    # without it the same runs differ: of these sums there is something to see
    assert at(2, 4, precision, canonical=False) != one


@pytest.mark.ci  # 36 runs, half of them by ranks
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_digest_is_that_of_every_home_and_mode(precision, tmp_path):
    found = {}
    for tier, update, ranks in product(("resident", "host", "nvme"), ("serial", "tail"), (1, 2, 4)):
        folder = tmp_path / f"{tier}-{update}-{ranks}"
        folder.mkdir()
        found[tier, update, ranks] = at(ranks, 4, precision, tier, update, folder)
    assert len(found) == 18 and len(set(found.values())) == 1, found


@pytest.mark.ci  # kernels in the interpreter, and a compiler
def test_state_that_streams_to_a_device_has_the_digest_of_what_is_compiled(tmp_path):
    one = at(1, 4, "bf16", "nvme", folder=tmp_path, compiled=True)
    for ranks in (1, 2):
        for update in ("serial", "tail"):
            assert at(ranks, 4, "bf16", "stream", update) == one
    assert at(1, 4, "bf16", "stream", "speculate") == one


@pytest.mark.ci  # processes
def test_ranks_that_are_processes_have_it_too(tmp_path):
    given = (4, "bf16", "nvme", "tail")
    (tmp_path / "1").mkdir(), (tmp_path / "2").mkdir()
    assert at(2, *given, tmp_path / "2", processes=True) == at(1, *given, tmp_path / "1")


def _from(rank, saved, first, to):
    model, optimizer = wrapped("bf16")
    if saved is not None:
        gemini.load_checkpoint(saved, model, optimizer)
    train(model, optimizer, 2, 4, first=first)
    gemini.save_checkpoint(to, model, optimizer)
    return digest(model, optimizer)


def test_ranks_may_change_at_a_checkpoint(tmp_path):
    """2 -> 1 -> 2."""
    model, optimizer = wrapped("bf16")
    train(model, optimizer, 6, 4)
    run_ranks(_from, 2, None, 0, tmp_path / "a")
    _from(0, tmp_path / "a", 2, tmp_path / "b")
    assert run_ranks(_from, 2, tmp_path / "b", 4, tmp_path / "c")[0] == digest(model, optimizer)


def test_a_product_need_not_be_a_power_of_two():
    assert at(2, 6) == at(1, 6)


def test_chunks_and_zero_stages_change_nothing():
    one = at(1, 4, "bf16")
    assert at(1, 4, "bf16", size=0.02) == one
    for shares in (StaticPlacement(0.0), StaticPlacement(0.0, shard_grads=False)):
        assert at(2, 4, "bf16", policy=shares) == one


def _held_back(model, mine, aside):
    """All but the last without a reduction, as loops for torch have it."""
    with model.no_sync():
        for batch in mine[:-1]:
            (loss_of(model, batch, aside) / len(mine)).backward()
    (loss_of(model, mine[-1], aside) / len(mine)).backward()


def _accumulated(model, mine, aside):
    parts = [(batch, aside) for batch in mine]
    gemini.accumulate(model, parts, lambda out, _: out.float().square().mean() / len(mine))


@pytest.mark.parametrize("passes", [_held_back, _accumulated])
def test_loops_of_every_kind_have_it(passes):
    one = at(1, 4)
    assert at(2, 4, passes=passes) == at(1, 4, passes=passes) == one


def _torchs(model):
    assert torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM) > MAX_NORM


def _largest(model):
    assert model.clip_grad_norm_(1e-3, math.inf) > 1e-3


@pytest.mark.parametrize("clip", [_torchs, _largest])
def test_other_clips_have_no_order_either(clip):
    assert len({at(ranks, 4, "bf16", clip=clip) for ranks in (1, 2, 4)}) == 1


class Zeros(nn.Module):
    """Gradients are negative zeros of some micro-batches, and absent of others."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(300))
        self.aside = nn.Parameter(torch.ones(300))

    def forward(self, x, aside):
        return (self.weight * x).sum() + ((self.aside * -0.0).sum() if aside else 0.0)


def _zeros(rank, ranks):
    model = GeminiDDP(Zeros(), placement_policy="zero2", precision="fp32", canonical=True,
                      min_chunk_size_m=0.0003)  # fmt: skip
    for number in range(rank, 4, ranks):
        model(torch.ones(300), number > 1).backward()
    return {name: grad.signbit().any().item() for name, grad in model.named_gradients()}


def test_a_negative_zero_is_none_at_any_number_of_ranks():
    assert _zeros(0, 1) == run_ranks(_zeros, 2, 2)[0] == {"weight": False, "aside": False}


class Repeated(nn.Module):
    """A layer whose gradient arrives as often as it is called: each call is a checkpoint."""

    def __init__(self):
        super().__init__()
        with seeded():
            self.other = nn.Linear(64, 64, bias=False)
            self.layer = nn.Linear(64, 64, bias=False)

    def forward(self, x, times):
        x = self.other(x)
        for _ in range(times):
            x = checkpoint(self.layer, x, use_reentrant=True)
        return x


def _repeated(rank, ranks, times=2):
    model = GeminiDDP(Repeated(), placement_policy="zero2", precision="bf16", canonical=True,
                      min_chunk_size_m=0.001)  # fmt: skip
    optimizer = HybridAdam(model.parameters(), lr=1e-2, eps=1e-3)
    for step in range(2):
        for number in range(rank, 4, ranks):
            x = torch.full((3, 64), 1.0 + number + step)
            (model(x, times if step else 2).float().square().mean() * ranks / 4).backward()
        optimizer.step()
        optimizer.zero_grad()
    found = model.digest()
    optimizer.close()
    return found


def test_what_arrives_in_parts_is_whole_before_it_is_added():
    one = _repeated(0, 1)
    assert [run_ranks(_repeated, ranks, ranks)[0] for ranks in (2, 4)] == [one, one]


def _late(rank, ranks):
    with pytest.raises(RuntimeError, match="came after the others of its micro-batch"):
        _repeated(rank, ranks, times=3)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_behind_zero_grad_a_gradient_that_came_late_is_forgotten(set_to_none):
    model = GeminiDDP(Repeated(), placement_policy="zero2", precision="fp32", canonical=True,
                      min_chunk_size_m=0.001)  # fmt: skip
    optimizer = HybridAdam(model.parameters())
    for times in (1, 2):
        model(torch.ones(3, 64), times).sum().backward()
    with pytest.raises(RuntimeError, match="came after the others of its micro-batch"):
        optimizer.step()
    optimizer.zero_grad(set_to_none)
    model(torch.ones(3, 64), 2).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_gradient_that_comes_late_is_an_error_on_all_ranks(ranks):
    _late(0, 1) if ranks == 1 else run_ranks(_late, 2, 2)


# -- its cost --


def _bytes(rank, canonical):
    model, optimizer = wrapped("bf16", canonical=canonical)
    train(model, optimizer, NUM_STEPS, 4)
    counted = model.engine.comm.chunk_bytes
    optimizer.close()
    return counted


def test_as_many_bytes_travel_as_without():
    (one, _), (other, _) = run_ranks(_bytes, 2, True), run_ranks(_bytes, 2, False)
    assert one == other > 0


def test_budgets_are_planned_without_what_sums_take():
    model, optimizer = wrapped("bf16")
    layout = model.engine.layout
    optimizer.close()
    whole = sum(chunk.shard_numel for chunk in layout.chunks)
    largest = max(chunk.payload_bytes for chunk in layout.chunks)
    given = Budgets.parse("1MiB", "1MiB")
    left = with_sums(given, layout, 2)
    assert given.device - left.device == 2 * whole + 3 * largest  # fp32 beside bf16
    assert given.host - left.host == 2 * whole and left.nvme == UNLIMITED


class Memory:
    def allocate(self, numel, dtype):
        return torch.full((numel,), math.nan, dtype=dtype)


class Twins:
    """Links of two ranks of which both have found the same."""

    rank, world_size, num_means, is_alone, tie = 0, 2, 2, False, None

    @property
    def shards(self):
        return self

    def exchange(self, received, payload, label):
        mine = payload[: len(payload) // 2]
        received.copy_(torch.cat([mine, mine]))
        return Done(None)


def test_what_a_reduction_has_received_is_counted():
    slot = Slot(ParamId(0), 0, 300)
    spec = ChunkSpec(ChunkId(0), "bfloat16", True, (slot,), 256, 2)
    gradient = CanonicalGradient(spec, Memory(), Twins())
    values = torch.arange(300.0)
    for number in range(1, 3):
        gradient.add(0, values.bfloat16())
        before = 1024 * (number > 1)  # an fp32 sum of 256
        assert gradient.nbytes == gradient.account.gradients == before + 1024
        gradient.begin_reduce()
        assert gradient.nbytes == gradient.account.gradients == before + 2 * 1024
        gradient.end_reduce()
        assert gradient.nbytes == gradient.account.gradients == 1024
        assert torch.equal(gradient.shard, number * values[:256].bfloat16().float())


# -- what is refused --


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"precision": "fp16"}, "round by the number of ranks"),
        ({"communication_dtype": "bf16"}, "round by the number of ranks"),
        ({"fp8_communication": True}, "round by the number of ranks"),
        ({"norm_type": 3.0, "max_norm": 1.0}, "expected 2 or inf"),
    ],
)
def test_what_rounds_by_the_number_of_ranks_is_refused(options, says):
    with pytest.raises(ValueError, match=says):
        GeminiDDP(Small(), **{"precision": "fp32", "canonical": True, **options})


def _three(rank):
    with pytest.raises(ValueError, match=r"on 3 ranks.*expected a power of two"):
        GeminiDDP(Small(), precision="fp32", canonical=True)


def test_a_number_of_ranks_that_is_no_power_of_two_is_refused_before_anything_changes():
    run_ranks(_three, 3)


def _replicated(rank):
    mesh = dist.device_mesh.init_device_mesh(
        "cpu", (2, 1), mesh_dim_names=("dp_replicate", "shard")
    )
    with pytest.raises(ValueError, match="canonical=True on a mesh"):
        GeminiDDP(Small(), precision="fp32", canonical=True, mesh=mesh)


def test_replicas_are_refused():
    run_ranks(_replicated, 2)


def test_other_norms_rules_orders_and_hooks_are_refused():
    model, optimizer = wrapped()
    loss_of(model, torch.ones(5, 33)).backward()
    with pytest.raises(ValueError, match="norm_type=3"):
        model.clip_grad_norm_(1.0, 3.0)
    with pytest.raises(ValueError, match='wrapped with canonical=True; expected order="batches"'):
        gemini.accumulate(model, [torch.ones(5, 33)], order="layers")
    with pytest.raises(ValueError, match="canonical=True does not know"):
        model.set_all_reduce_hook(lambda shard: None)
    optimizer.close()
    model = GeminiDDP(Small(), precision="fp32", canonical=True)
    with pytest.raises(ValueError, match=r"LambRule.*order of their cuts"):
        HybridLamb(model.parameters())
    optimizer = HybridMuon(model)
    loss_of(model, torch.ones(5, 33)).backward()
    optimizer.step()


def test_a_gradient_that_is_not_finite_is_named():
    def broken(rank=0):
        model, optimizer = wrapped()
        handle = model.module.last.weight.register_hook(
            lambda grad: grad * (math.nan if rank == 0 else 1)
        )
        plainly(model, [torch.ones(5, 33)], True)
        handle.remove()
        optimizer.step()
        said = optimizer.last_report.skipped, optimizer.last_report.nonfinite
        optimizer.close()
        return said

    assert broken() == run_ranks(broken, 2)[1] == (True, "last.weight on rank 0")


# -- exact sums --


def _exactly(values):
    return sum(Fraction(v) ** 2 for v in values.double().tolist())


@pytest.mark.parametrize("seed", range(8))
def test_sums_of_rows_are_exact_integers(seed):
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-149, 127, (256,), generator=generator)
    values = torch.ldexp(torch.randn(256, generator=generator), exponents).float()
    one_a_row = torch.zeros(256, 64)
    one_a_row[:, seed] = values  # so that no sum of a row rounds
    flat = one_a_row.view(-1)
    assert Fraction(integer_of([bins_of(flat)])) * Fraction(2) ** LEAST_BIT == _exactly(values)
    order = torch.randperm(256, generator=generator)
    cuts = one_a_row[order].view(-1).split([64 * n for n in (1, 100, 155)])
    assert integer_of([bins_of(cut) for cut in cuts]) == integer_of([bins_of(flat)])


def test_a_row_that_is_not_finite_shows_and_zeros_are_nothing():
    values = torch.zeros(128)
    assert integer_of([bins_of(values)]) == 0
    for broken in (math.nan, math.inf):
        values[100] = broken
        assert integer_of([bins_of(values)]) is None


def test_dense_rows_are_within_fp64_of_the_norm():
    values = torch.randn(64 * 5000, generator=torch.Generator().manual_seed(0))
    found = integer_of([bins_of(values)]) * 2.0**LEAST_BIT
    assert abs(found / float(values.double().square().sum()) - 1) < 1e-14
