"""Bits of what an update changes: of every path, exactly the elements whose stored bits differ."""

from dataclasses import replace

import pytest
import torch

from optim.adam import AdamRule
from optim.matrices.sites import DeviceSite
from optim.rules.split_master import remainder_of, tie_sign
from optim.state.memory import memory_of
from optim.state.pieces import Piece
from optim.update import cpu_update, kernel_specs
from optim.update.built_kernels import compiler
from optim.update.changed_bits import mark, packed, positions
from optim.update.compiled_update import CompiledUpdate
from optim.update.cpu_update import CpuWorkers, StepInputs
from optim.update.staging import DeviceStaging
from optim.update.triton_update import TritonUpdater

CPU = torch.device("cpu")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
GROUP = {
    "lr": 1e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0,
    "adamw_mode": True, "bias_correction": True, "amsgrad": False, "maximize": False,
}  # fmt: skip
INPUTS = StepInputs(0.5, 0.2, rounding_seed=3)
FORMS = {  # dtype of the weight, and what is kept of its master
    "master": (BF16, FP32), "split": (BF16, torch.int16), "fp16": (FP16, FP32),
    "stochastic": (BF16, None), "fp32": (FP32, None),
}  # fmt: skip


def piece_of(form, numel):
    dtype, kind = FORMS[form]
    generator = torch.Generator().manual_seed(numel)
    master = torch.randn(numel, generator=generator)
    planes = [torch.randn(numel, generator=generator) * 0.1, torch.rand(numel, generator=generator)]
    param = master.to(dtype)
    if kind == torch.int16:
        planes[1].view(torch.int32).bitwise_or_(tie_sign(master))
    kept = {None: None, FP32: master.clone(), torch.int16: remainder_of(master)}[kind]
    grad = torch.randn(numel, generator=generator).to(BF16)
    grad[::2], planes[0][::2] = 0, 0
    return Piece(param, grad, kept, tuple(planes), AdamRule().hyper(GROUP), 7, 0)


def with_bits(piece, ones=()):
    bits = torch.zeros(-(-piece.param.numel() // 8), dtype=torch.uint8)
    bits[list(ones)] = 255
    return replace(piece, changed=bits)


def eager(piece):
    workers = CpuWorkers(2)
    cpu_update.update(workers, AdamRule(), [piece], INPUTS)
    workers.close()


def compiled(piece):
    workers = CpuWorkers(2)
    CompiledUpdate(AdamRule(), []).update(workers, [piece], StepInputs(0.5, 0.2))
    workers.close()


def kernel(piece):
    stochastic = piece.master is None and piece.param.dtype == BF16
    updater = TritonUpdater(AdamRule(), [0], CPU, stochastic=stochastic)
    updater.begin([piece.hyper], with_norm=False)
    planes = piece.planes if piece.master is None else (piece.master, *piece.planes)
    updater.update([piece], {str(i): plane for i, plane in enumerate(planes)})


def operators(piece):
    memory = memory_of(CPU)
    site = DeviceSite(memory, DeviceStaging(memory), INPUTS)
    site.update(AdamRule(), [piece], INPUTS)


def check(update, form, numel):
    plain, marked = piece_of(form, numel), with_bits(piece_of(form, numel))
    before = plain.param.clone()
    update(plain)
    update(marked)
    assert torch.equal(plain.param, marked.param)
    kind = {2: torch.int16, 4: torch.int32}[before.element_size()]
    differs = before.view(kind) != plain.param.view(kind)
    assert numel < 64 or 0 < int(differs.sum()) < numel
    assert torch.equal(positions(marked.changed), differs.nonzero().view(-1))
    again = with_bits(piece_of(form, numel), ones=[0])
    update(again)  # sets bits, and clears none
    assert torch.equal(again.changed[1:], marked.changed[1:]) and again.changed[0] == 255


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("numel", [1, 70_001])
def test_kernels_mark_what_they_change(form, numel):
    check(kernel, form, numel)


@pytest.mark.parametrize("form", FORMS)
def test_the_eager_update_marks_what_it_changes(form):
    check(eager, form, 3 * cpu_update.TILE_NUMEL // 2 + 7)


@pytest.mark.parametrize("form", ["master", "stochastic", "fp32"])
def test_operators_mark_what_they_change(form):
    check(operators, form, 1001)


@pytest.mark.ci
@pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
@pytest.mark.parametrize("form", ["master", "split", "fp16", "fp32"])
@pytest.mark.parametrize("numel", [1, 17, kernel_specs.TILE_NUMEL + 100_003])
def test_compiled_loops_mark_what_they_change(form, numel):
    check(compiled, form, numel)


def test_neighbours_of_one_slab_have_bits_of_their_own():
    whole = with_bits(piece_of("master", 4096))
    cuts = [whole.cut(0, 1024), whole.cut(2048, 4096).belonging_to(whole.hyper, 7, 0, 5000)]
    before = whole.param.clone()
    updater = TritonUpdater(AdamRule(), [0], CPU)
    updater.begin([whole.hyper], with_norm=False)
    slabs = {str(i): plane for i, plane in enumerate((whole.master, *whole.planes))}
    updater.update(cuts, slabs)
    assert torch.equal(positions(whole.changed), (before != whole.param).nonzero().view(-1))
    tiles = [tile for cut in cuts for tile in cut.tiles(512)]
    assert [tile.changed.data_ptr() - whole.changed.data_ptr() for tile in tiles] == [
        0, 64, 256, 320, 384, 448
    ]  # fmt: skip


@pytest.mark.parametrize("numel", [0, 1, 8, 13, 1000])
def test_every_pattern_of_flags_comes_back(numel):
    flags = torch.rand(numel, generator=torch.Generator().manual_seed(numel)) < 0.5
    assert torch.equal(positions(packed(flags)), flags.nonzero().view(-1))
    every = torch.arange(256).view(-1, 1) >> torch.arange(8) & 1
    assert torch.equal(packed(every.bool().view(-1)), torch.arange(256).to(torch.uint8))
    bits = torch.zeros(-(-numel // 8), dtype=torch.uint8)
    mark(bits, torch.zeros(numel), torch.where(flags, -0.0, 0.0))  # other bits, equal values
    assert torch.equal(bits, packed(flags))
