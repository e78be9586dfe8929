"""Fused norms and losses against fp64, in Triton's interpreter or on a GPU."""

import math

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy as torchs_loss
from torch.nn.functional import layer_norm as torchs_norm

from gemini.fused import cross_entropy, layer_norm, rms_norm
from kernels_triton import rows
from kernels_triton.launch import is_interpreted
from kernels_triton.rows import LOSS_BLOCK, NORM_WIDTH

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = [] if is_interpreted() else [pytest.mark.gpu, pytest.mark.values]
SUMMERS = 3
SHAPES = [(1, 1), (3, 33), (2, SUMMERS, 5), (SUMMERS * 2 + 1, 65), (2, 1000)]
BITS = {torch.float32: 17, torch.bfloat16: 7, torch.float16: 10}  # of what is compared


@pytest.fixture(autouse=True)
def few_programs(monkeypatch):
    monkeypatch.setattr(rows, "SUMMERS", SUMMERS)


def close(got, want, dtype):
    """Within one unit in the last of BITS places: of each value, or near 0 of the largest's share.

    What is small may be a difference of terms of the size of the largest, or of 1.
    """
    least = max(1.0, float(want.abs().max())) * (1.0 if dtype == torch.float32 else 2.0**-6)
    unit = want.abs().clamp(min=least).log2().floor().exp2() * 2.0 ** -BITS[dtype]
    assert got.dtype == dtype and got.shape == want.shape
    assert float(((got.double() - want).abs() / unit).max()) <= 1


def leaf(*shape, dtype, low=-2.0):
    values = torch.rand(*shape, generator=torch.Generator().manual_seed(len(shape))) * 3 + low
    return values.to(DEVICE, dtype).requires_grad_()


def rms64(x, weight, eps, offset):
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * (weight + offset)


def compared(function, reference, inputs, dtype):
    """Result and gradients of both, for the same gradient of the result."""
    exact = [None if one is None else one.detach().double().requires_grad_() for one in inputs]
    out, want = function(*inputs), reference(*exact)
    grad = torch.linspace(-1, 2, out.numel(), device=DEVICE).view(out.shape).to(out.dtype)
    out.backward(grad)
    want.backward(grad.double())
    close(out.detach(), want.detach(), dtype)
    for one, other in zip(inputs, exact, strict=True):
        if one is not None:
            close(one.grad, other.grad, dtype)


@pytest.mark.parametrize("dtype", list(BITS))
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_rms_norm_and_its_gradients_are_those_of_fp64(shape, dtype, offset):
    inputs = leaf(*shape, dtype=dtype), leaf(shape[-1], dtype=dtype, low=-1.0)
    compared(
        lambda x, w: rms_norm(x, w, 1e-5, offset),
        lambda x, w: rms64(x, w, 1e-5, offset), inputs, dtype,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", list(BITS))
@pytest.mark.parametrize("shape", SHAPES[1:])
@pytest.mark.parametrize("has_bias", [True, False])
def test_layer_norm_and_its_gradients_are_those_of_fp64(shape, dtype, has_bias):
    bias = leaf(shape[-1], dtype=dtype, low=0.0) if has_bias else None
    inputs = leaf(*shape, dtype=dtype), leaf(shape[-1], dtype=dtype, low=-1.0), bias
    compared(
        lambda x, w, b: layer_norm(x, w, b, 1e-5),
        lambda x, w, b: torchs_norm(x, w.shape, w, b, 1e-5), inputs, dtype,
    )  # fmt: skip


def test_what_lies_otherwise_in_memory_is_the_same():
    x, weight = leaf(8, 6, dtype=torch.float32), leaf(8, dtype=torch.float32)
    out = rms_norm(x.T, weight, 1e-6)
    (out * 2).T.sum().backward()
    other = x.detach().T.contiguous().requires_grad_()
    assert torch.equal(out, rms_norm(other, weight, 1e-6))
    rms_norm(other, weight, 1e-6).backward(torch.full_like(out, 2.0))
    assert torch.equal(x.grad, other.grad.T)


def losses(logits, targets, **options):
    mine, exact = logits.detach().requires_grad_(), logits.detach().double().requires_grad_()
    got = cross_entropy(mine, targets, **options)
    want = torchs_loss(exact, targets, **options)
    (got * 3).backward()
    (want * 3).backward()
    return got.detach(), want.detach(), mine.grad, exact.grad


@pytest.mark.parametrize("dtype", list(BITS))
@pytest.mark.parametrize("num_classes", [1, 7, LOSS_BLOCK, LOSS_BLOCK + 1])
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.2}, {"reduction": "sum"}])
def test_losses_and_gradients_of_logits_are_those_of_fp64(dtype, num_classes, options):
    logits = leaf(5, num_classes, dtype=dtype)
    targets = torch.tensor([0, num_classes - 1, -100, num_classes // 2, 0], device=DEVICE)
    got, want, grad, exact = losses(logits, targets, **options)
    assert got.dtype == torch.float32 and float(got) == pytest.approx(
        float(want), rel=1e-5, abs=1e-6
    )
    close(grad, exact, dtype)
    assert not grad[2].any()


def test_classes_that_are_ruled_out_have_no_gradient_and_large_logits_no_overflow():
    logits = torch.tensor([[-math.inf, 300.0, -math.inf, 299.0], [3e38, 0.0, 0.0, 0.0]])
    targets = torch.tensor([3, 0])
    got, want, grad, exact = losses(logits.to(DEVICE), targets.to(DEVICE))
    assert float(got) == pytest.approx(float(want), rel=1e-6)
    assert torch.allclose(grad.double(), exact, atol=1e-7) and not grad[0, [0, 2]].any()
    beyond = torch.full((2, LOSS_BLOCK + 4), -math.inf, device=DEVICE)
    beyond[:, -1] = 1.0  # of the first block nothing is left
    got, want, _, _ = losses(beyond, torch.full((2,), LOSS_BLOCK + 3, device=DEVICE))
    assert float(got) == float(want) == 0.0


def test_no_row_that_counts_and_a_target_that_is_no_class_give_nan():
    logits = leaf(2, 4, dtype=torch.float32)
    for targets in ([-100, -100], [4, 0], [-1, 0]):
        assert cross_entropy(logits, torch.tensor(targets, device=DEVICE)).isnan()


def test_another_index_is_ignored():
    logits, targets = leaf(3, 4, dtype=torch.float32), torch.tensor([1, 2, 1], device=DEVICE)
    got, want, grad, exact = losses(logits, targets, ignore_index=1)
    assert float(got) == pytest.approx(float(want), rel=1e-6)
    assert torch.allclose(grad.double(), exact, atol=1e-7)


def test_a_second_derivative_is_refused_and_not_wrong():
    x, weight = leaf(2, 4, dtype=torch.float32), leaf(4, dtype=torch.float32)
    losses = rms_norm(x, weight, 1e-6).sum(), cross_entropy(x, torch.tensor([0, 3], device=DEVICE))
    for loss in losses:
        with pytest.raises(RuntimeError, match="have no second derivative"):
            torch.autograd.grad(loss, x, create_graph=True)


ROWS, ZEROS = torch.ones(2, 4), torch.zeros(2, dtype=torch.int64)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: rms_norm(ROWS, torch.ones(4).half(), 1e-6), "expected one float type"),
        (lambda: rms_norm(ROWS, torch.ones(3), 1e-6), r"weights of another shape than \[4\]"),
        (lambda: rms_norm(ROWS.long(), torch.ones(4).long(), 1e-6), "expected one float type"),
        (lambda: layer_norm(ROWS[:0], torch.ones(4), None, 1e-6), "there are no elements"),
        (
            lambda: rms_norm(torch.ones(1, NORM_WIDTH + 1), torch.ones(NORM_WIDTH + 1), 1e-6),
            "expected at most 16384",
        ),
        (lambda: cross_entropy(ROWS, torch.zeros(3).long()), r"expected \[n, classes\] with int64"),
        (lambda: cross_entropy(ROWS, torch.zeros(2).int()), "int32 targets"),
        (lambda: cross_entropy(ROWS, torch.zeros(2).long(), reduction="none"), "reduction='none'"),
        (
            lambda: cross_entropy(ROWS, torch.zeros(2).long(), label_smoothing=2),
            "label_smoothing=2",
        ),
    ],
)
def test_what_kernels_do_not_know_is_refused(call, said):
    with pytest.raises(ValueError, match=said):
        call()


def test_gradients_of_weights_are_summed_in_one_order():
    x = leaf(SUMMERS * 3 + 1, 16, dtype=torch.float32)
    weight = nn.Parameter(torch.ones(16, device=DEVICE))
    found = []
    for _ in range(2):
        weight.grad = None
        rms_norm(x, weight, 1e-6).square().sum().backward()
        found.append(weight.grad.clone())
    assert torch.equal(*found)
