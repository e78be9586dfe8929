import math
import threading
import weakref
from concurrent.futures import thread
from dataclasses import replace

import pytest
import torch

from optim.adam import AdamRule
from optim.state.pieces import Piece
from optim.update import cpu_update
from optim.update.cpu_update import TILE_NUMEL, CpuWorkers, StepInputs, grad_sum, update

SIZES = [1, 3, 17, 1023, 1025, TILE_NUMEL - 1, TILE_NUMEL + 1, 1_000_007]


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 2.5, math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sums_of_powers_are_those_of_fp64(workers, dtype, norm_type):
    grads = [torch.randn(n).to(dtype) for n in SIZES]
    wide = torch.cat(grads).double().abs()
    want = wide.max() if norm_type == math.inf else wide.pow(norm_type).sum()
    found = grad_sum(workers, grads, norm_type)
    assert found.power_sum == pytest.approx(float(want), rel=5e-7)
    assert found.first_nonfinite is None


def test_sum_of_squares_does_not_depend_on_the_number_of_workers():
    grads = [torch.randn(n) for n in SIZES]
    sums = set()
    for n in (1, 2, 3):
        workers = CpuWorkers(n)
        sums.add(grad_sum(workers, grads).power_sum)
        workers.close()
    assert len(sums) == 1


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 2.5, math.inf])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_first_tensor_that_is_not_finite_is_found(workers, dtype, value, norm_type):
    grads = [torch.randn(n).to(dtype) for n in SIZES]
    grads[6][TILE_NUMEL] = value
    grads[7][5] = value
    assert grad_sum(workers, grads, norm_type).first_nonfinite == 6


def test_a_square_that_overflows_fp32_is_no_overflow_of_the_gradient(workers):
    found = grad_sum(workers, [torch.tensor([1e30, 3.0]), torch.ones(5)])
    assert found.first_nonfinite is None
    assert found.power_sum == pytest.approx(1e60, rel=1e-6)


def test_workers_leave_the_main_threads_setting_alone():
    before = torch.get_num_threads()
    workers = CpuWorkers(2)
    assert set(workers.map(lambda _: torch.get_num_threads(), range(8))) == {1}
    assert torch.get_num_threads() == before
    workers.close()


def test_what_was_worked_on_is_freed_while_a_worker_has_yet_to_let_go(workers, monkeypatch):
    """A worker has an item for a moment after its result is there: here, until it is told."""
    let_go, run = threading.Event(), thread._WorkItem.run

    def lingering(item):
        run(item)
        let_go.wait(60)

    monkeypatch.setattr(thread._WorkItem, "run", lingering)
    grads = [torch.randn(n) for n in SIZES]
    watched = [weakref.ref(grad) for grad in grads]
    grad_sum(workers, grads)
    del grads
    there = [ref() is not None for ref in watched]
    let_go.set()
    assert there == [False] * len(SIZES)


def test_the_first_error_of_a_task_is_raised_when_all_have_ended(workers):
    ended = []

    def work(i):
        if i == 1:
            raise ValueError("task 1")
        ended.append(i)

    with pytest.raises(ValueError, match="task 1"):
        workers.map(work, range(6))
    assert sorted(ended) == [0, 2, 3, 4, 5]


HYPER = AdamRule().hyper(
    {
        "lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1,
        "adamw_mode": True, "bias_correction": True, "amsgrad": False, "maximize": False,
    }
)  # fmt: skip


def make_piece(numel, grad_dtype, has_master):
    generator = torch.Generator().manual_seed(numel)
    master = torch.randn(numel, generator=generator)
    grad = torch.randn(numel, generator=generator).to(grad_dtype)
    planes = (torch.randn(numel, generator=generator) * 0.1, torch.rand(numel, generator=generator))
    if has_master:
        return Piece(master.bfloat16(), grad, master, planes, HYPER, 7, 0)
    return Piece(master, grad, None, planes, HYPER, 7, 0)


@pytest.mark.parametrize("has_master", [True, False])
@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_update_is_the_formula_within_a_few_ulp(workers, grad_dtype, has_master):
    """torch's fused step contracts multiply-adds and divides where the formula multiplies.

    In units of the last place of the larger of old and new value: a sum that cancels keeps the
    error of its terms. 6 was measured.
    """
    for numel in (1, 17, 1025, 100_003):
        piece = make_piece(numel, grad_dtype, has_master)
        fp32 = piece.master if has_master else piece.param
        coefficients = torch.tensor(AdamRule().values(HYPER, 7), dtype=torch.float64)
        want = AdamRule().updated(
            fp32.double(), piece.grad.double() * 0.5, [p.double() for p in piece.planes],
            coefficients,
        )  # fmt: skip
        old = [t.clone() for t in (fp32, *piece.planes)]
        update(workers, AdamRule(), [piece], StepInputs(0.5))
        for got, exact, was in zip((fp32, *piece.planes), want, old, strict=True):
            ulp = torch.maximum(exact.abs(), was.abs()) * 2**-23
            assert float(((got - exact).abs() / ulp).max()) <= 8
        if has_master:
            assert torch.equal(piece.param, piece.master.bfloat16())


def test_random_bits_are_those_of_an_element_whatever_tile_it_is_in(workers, monkeypatch):
    whole, tiled = (make_piece(1024, torch.bfloat16, True) for _ in range(2))
    rounded = [
        replace(piece, param=piece.master.bfloat16(), master=None) for piece in (whole, tiled)
    ]
    inputs = StepInputs(0.3, rounding_seed=5)
    update(workers, AdamRule(), rounded[:1], inputs)
    monkeypatch.setattr(cpu_update, "TILE_NUMEL", 192)
    update(workers, AdamRule(), rounded[1:], inputs)
    assert torch.equal(rounded[0].param, rounded[1].param)


@pytest.mark.ci
@pytest.mark.parametrize("cut", [64, 4096, TILE_NUMEL, 3 * TILE_NUMEL + 192])
def test_cutting_a_piece_changes_no_bit(workers, cut):
    whole = make_piece(4 * TILE_NUMEL, torch.bfloat16, True)
    parts = make_piece(4 * TILE_NUMEL, torch.bfloat16, True)
    update(workers, AdamRule(), [whole], StepInputs(0.3))
    pieces = [parts.cut(a, a + cut) for a in range(0, 4 * TILE_NUMEL, cut)]
    update(workers, AdamRule(), pieces[::-1] if cut > 64 else pieces, StepInputs(0.3))
    for a, b in zip(
        (whole.master, whole.param, *whole.planes),
        (parts.master, parts.param, *parts.planes),
        strict=True,
    ):
        assert torch.equal(a, b)
