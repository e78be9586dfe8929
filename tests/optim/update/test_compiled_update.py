"""The compiled CPU path. Its kernels are built once for this machine, in the user's own cache."""

import math
import multiprocessing
import os

import numpy as np
import pytest
import torch

import gemini
from bench.shared.models import Tower, token_batches, token_loss
from bench.shared.workers import run_ranks
from gemini import GeminiDDP
from optim import HybridAdam, NvmeConfig
from optim.adam import AdamRule
from optim.rules import config
from optim.state.pieces import Piece
from optim.update import cpu_update
from optim.update.built_kernels import compiler
from optim.update.compiled_update import CompiledUpdate
from optim.update.cpu_update import NORM_TILE_NUMEL, CpuWorkers, StepInputs, summed
from optim.update.kernel_specs import TILE_NUMEL

pytestmark = [
    pytest.mark.ci,
    pytest.mark.skipif(compiler() is None, reason="no C++ compiler"),
]

BF16 = torch.bfloat16
GROUP = {
    "lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1,
    "adamw_mode": True, "bias_correction": True, "amsgrad": False, "maximize": False,
}  # fmt: skip
SIZES = [0, 1, 17, 1023, 1024, 1025, NORM_TILE_NUMEL, 3 * NORM_TILE_NUMEL + 1024 * 5 + 7]


@pytest.fixture(scope="module")
def compiled():
    return CompiledUpdate(AdamRule(), [(BF16, BF16, True), (BF16, torch.float32, True)])


def make_piece(numel, grad_dtype=BF16, first=0):
    """Tensors that begin `first` elements into their memory."""
    generator = torch.Generator().manual_seed(numel)

    def random(scale=1.0):
        return torch.randn(numel + first, generator=generator)[first:] * scale

    master = random()
    visible = torch.zeros(numel + first, dtype=BF16)[first:].copy_(master)
    planes = (random(0.1), random().abs())
    return Piece(visible, random().to(grad_dtype), master, planes, AdamRule().hyper(GROUP), 7, 0)


def tensors(piece):
    return (piece.master, piece.param, *piece.planes)


def adam_by_numpy(piece, grad):
    """`formulas.adam`; torch's eager square root is not correctly rounded, numpy's is."""
    values = np.array(AdamRule().values(piece.hyper, 7)).astype(np.float32)
    w1, beta2, w2, step_size, inv_sqrt_bc2, eps, decay, l2, *_ = values
    p, g, m, v = (t.numpy().copy() for t in (piece.master, grad, *piece.planes))
    g = g + l2 * p
    m = m + w1 * (g - m)
    v = v * beta2 + w2 * g * g
    p = p * decay - step_size * (m / (np.sqrt(v) * inv_sqrt_bc2 + eps))
    return tuple(map(torch.from_numpy, (p, m, v)))


@pytest.mark.parametrize("grad_dtype", [BF16, torch.float32])
@pytest.mark.parametrize("numel", [0, 1, 15, 17, 1025, 100_003])
def test_an_update_is_the_formula_bit_for_bit(compiled, workers, numel, grad_dtype):
    piece = make_piece(numel, grad_dtype, first=1)
    grad = (piece.grad.float() * 0.5).clamp(-0.25, 0.25)
    param, exp_avg, exp_avg_sq = adam_by_numpy(piece, grad)
    compiled.update(workers, [piece], StepInputs(0.5, 0.25))
    for got, exact in zip((piece.master, *piece.planes), (param, exp_avg, exp_avg_sq), strict=True):
        assert torch.equal(got, exact)
    assert torch.equal(piece.param, param.to(BF16))


@pytest.mark.parametrize("cut", [64, 4096, 3 * TILE_NUMEL + 64])
def test_cutting_a_piece_changes_no_bit_nor_do_threads(compiled, workers, cut):
    numel = 1 << 16 if cut == 64 else 5 * TILE_NUMEL + 77
    whole, parts = make_piece(numel), make_piece(numel)
    compiled.update(workers, [whole], StepInputs(0.3))
    pieces = [parts.cut(a, min(a + cut, numel)) for a in range(0, numel, cut)]
    one = CpuWorkers(1)
    compiled.update(one, pieces[::-1], StepInputs(0.3))
    one.close()
    for a, b in zip(tensors(whole), tensors(parts), strict=True):
        assert torch.equal(a, b)


def test_what_is_written_counts_as_changed_in_place(compiled, workers):
    piece = make_piece(64)
    before = [tensor._version for tensor in tensors(piece)]
    compiled.update(workers, [piece], StepInputs())
    assert all(t._version > b for t, b in zip(tensors(piece), before, strict=True))


# -- the norm --------------------------------------------------------------------------------


def test_squares_are_summed_to_1e_7_of_fp64_and_do_not_depend_on_threads(compiled, workers):
    grads = [torch.randn(n).to(BF16) for n in SIZES]
    want = float(torch.cat(grads).double().square().sum())
    found = compiled.tile_sums(workers, grads, 2.0)
    assert summed(found, 2.0).power_sum == pytest.approx(want, rel=1e-7)
    one = CpuWorkers(1)
    assert compiled.tile_sums(one, grads, 2.0) == found
    one.close()


def test_tiles_of_a_norm_do_not_depend_on_neighbours(compiled, workers):
    grad = torch.randn(5 * NORM_TILE_NUMEL + 64).to(BF16)
    ones = torch.ones(70, dtype=BF16)
    together = compiled.tile_sums(workers, [torch.rand(9), grad, ones], 2.0).sums
    tiles = [compiled.tile_sums(workers, [tile], 2.0).sums for tile in grad.split(NORM_TILE_NUMEL)]
    assert together[1:] == [*(s for (s,) in tiles), 70.0]


@pytest.mark.parametrize("norm_type", [1.0, math.inf])
def test_other_norms_are_those_of_the_eager_path(compiled, workers, norm_type):
    grads = [torch.randn(n).to(BF16) for n in SIZES]
    found = compiled.tile_sums(workers, grads, norm_type)
    assert found == cpu_update.tile_sums(workers, grads, norm_type)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, -1])
def test_the_first_tensor_that_is_not_finite_is_found(compiled, workers, value, place):
    grads = [torch.randn(n).to(BF16) for n in SIZES]
    grads[5][place] = value
    grads[7][5] = value
    assert compiled.tile_sums(workers, grads, 2.0).first_nonfinite == 5


def test_a_square_that_overflows_fp32_is_no_overflow_of_the_gradient(compiled, workers):
    found = compiled.tile_sums(workers, [torch.full((2000,), 1e30, dtype=BF16)], 2.0)
    value = float(torch.tensor(1e30, dtype=BF16))
    assert found.first_nonfinite is None
    assert sum(found.sums) == pytest.approx(2000 * value**2, rel=1e-6)


# -- in training -----------------------------------------------------------------------------


def make(monkeypatch, seed=0, **options):
    monkeypatch.setattr(config, "COMPILED_FROM_NUMEL", 1)
    model = GeminiDDP(Tower(seed), device="cpu", max_norm=0.5, min_chunk_size_m=0.004)
    return model, HybridAdam(model.parameters(), lr=1e-2, **options)


def train(model, optimizer, batches):
    for parts in batches:
        token_loss(model, parts[0]).backward()
        optimizer.step()
        assert optimizer.last_report.update_path == "cpu-compiled"
        optimizer.zero_grad()
    return optimizer.last_report.grad_norm, [v.float() for v in whole(model)]


def whole(model):
    with model.summon_full_params(writeback=False):
        return [param.detach().clone() for param in model.parameters()]


def test_a_large_model_on_disk_and_one_that_is_resumed_have_the_bits_of_one_in_memory(
    monkeypatch, tmp_path
):
    batches = token_batches(4, 1)
    norm, want = train(*make(monkeypatch), batches)
    on_disk = make(
        monkeypatch, nvme_offload_fraction=1.0, nvme_offload_dir=tmp_path,
        nvme=NvmeConfig(block_numel=1024, allow_ram=True),
    )  # fmt: skip
    model, optimizer = make(monkeypatch)
    train(model, optimizer, batches[:2])
    gemini.save_checkpoint(tmp_path / "k", model, optimizer)
    resumed = make(monkeypatch, seed=5)
    gemini.load_checkpoint(tmp_path / "k", *resumed)
    for found in (train(*on_disk, batches), train(*resumed, batches[2:])):
        assert found[0] == norm
        assert all(torch.equal(a, b) for a, b in zip(found[1], want, strict=True))


def train_on_a_rank(rank):
    config.COMPILED_FROM_NUMEL = 1
    model = GeminiDDP(Tower(), device="cpu", max_norm=0.5, min_chunk_size_m=0.004)
    optimizer = HybridAdam(model.parameters(), lr=1e-2)
    return train(model, optimizer, [parts[rank:] for parts in token_batches(2, 2)])


@pytest.mark.ci
def test_ranks_share_one_library_and_agree():
    (norm, weights), (its_norm, its_weights) = run_ranks(train_on_a_rank, 2, processes=True)
    assert norm == its_norm
    assert all(torch.equal(a, b) for a, b in zip(weights, its_weights, strict=True))


def update_once(pipe):
    piece = make_piece(100_003)
    compiled = CompiledUpdate(AdamRule(), [(BF16, BF16, True)])
    compiled.update(CpuWorkers(), [piece], StepInputs())
    pipe.send(float(piece.master.double().sum()))


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_process_updates_too(compiled, workers, method):
    """A forked one with one thread of torch's, as torch needs it there."""
    piece = make_piece(100_003)
    compiled.update(workers, [piece], StepInputs())
    context = multiprocessing.get_context(method)
    receiver, sender = context.Pipe(duplex=False)
    if method == "fork":
        child = os.fork()
        if child == 0:
            torch.set_num_threads(1)
            update_once(sender)
            os._exit(0)
    else:
        process = context.Process(target=update_once, args=(sender,))
        process.start()
    assert receiver.poll(60)
    assert receiver.recv() == float(piece.master.double().sum())
    if method == "fork":
        os.waitpid(child, 0)
    else:
        process.join()
