"""Clipping by norm and by value, over everything a step updates; several ranks in tests/dist."""

import math

import pytest
import torch
from torch import nn

from bench.shared.models import Tower, token_batches, token_loss
from bench.shared.reference import flat, relative_error
from bench.shared.simulated import SimBackend
from gemini import GeminiDDP
from optim import HybridAdam, HybridSGD
from tests.support import towers
from tests.support.counting import allocated
from tests.support.towers import weights

SMALL = {"min_chunk_size_m": 0.004}


def wrapped(precision="fp32", device="cpu", folder=None, fraction=0.0, **options):
    return towers.wrapped(
        precision, device, folder, fraction, kind=HybridSGD, rule={"lr": 0.1}, **options
    )


def backward(model, times=1, seed=1):
    for (part,) in token_batches(times, 1, seed):
        token_loss(model, part).backward()


def fp64_norm(gradients, norm_type):
    return float(torch.linalg.vector_norm(flat(list(gradients)), norm_type))


@pytest.mark.parametrize("norm_type", [1, 2, 2.5, math.inf])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("on_host", [False, True])
def test_the_norm_is_that_of_fp64_and_the_update_is_clipped_by_it(
    norm_type, precision, on_host, tmp_path
):
    model, optimizer = wrapped(
        precision, SimBackend() if on_host else "cpu", tmp_path, fraction=0.4 * on_host
    )
    start = weights(model)
    backward(model, times=2)
    before = dict(model.named_gradients())
    norm = fp64_norm(before.values(), norm_type)
    max_norm = norm / 3
    got = optimizer.clip_grad_norm_(max_norm, norm_type)
    assert abs(float(got) / norm - 1) < 1e-6
    clipped = dict(model.named_gradients())
    want = flat([before[name] for name in clipped]) / 3
    assert relative_error(flat(list(clipped.values())), want) < 1e-5  # norm + 1e-6, as torch has
    optimizer.step()
    assert optimizer.last_report.grad_norm == float(got)
    update = weights(model) - start
    shown = flat([clipped[name] for name, _ in Tower().named_parameters() if name in clipped])
    assert relative_error(update, -0.1 * shown) < 1e-5


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_clipping_by_value_clips_every_element(precision):
    model, optimizer = wrapped(precision)
    start = weights(model)
    backward(model)
    before = dict(model.named_gradients())
    limit = 0.05
    assert max(float(g.abs().max()) for g in before.values()) > limit
    optimizer.clip_grad_by_value(limit)
    want = flat([before[name].clamp(-limit, limit) for name, _ in Tower().named_parameters()])
    optimizer.step()
    assert relative_error(weights(model) - start, -0.1 * want) < 1e-5


@pytest.mark.ci  # the interpreter
@pytest.mark.parametrize("norm_type", [1, 2, 2.5, math.inf])
def test_the_device_clips_as_the_cpu_does(norm_type):
    results = []
    for device in ("cpu", SimBackend(updates_by_triton=True)):
        model, optimizer = wrapped("fp16", device)
        start = weights(model)
        backward(model)
        norm = optimizer.clip_grad_norm_(0.5, norm_type)
        optimizer.step()
        results.append((float(norm), weights(model) - start, optimizer.last_report))
        backward(model, seed=2)
        optimizer.clip_grad_by_value(0.01)
        optimizer.step()
        results[-1] = (*results[-1], weights(model) - start)
    (norm, update, report, later), (other_norm, other, other_report, other_later) = results
    assert abs(other_norm / norm - 1) < 1e-6
    # fp32 weights round: a norm of order 1 clips to updates of which that is much
    assert relative_error(other, update) < 1e-5 + float(2**-24 * start.norm() / update.norm())
    assert relative_error(other_later, later) < 1e-5 + float(2**-24 * start.norm() / later.norm())
    assert abs(other_report.grad_norm / report.grad_norm - 1) < 1e-6


@pytest.mark.parametrize(
    "by_kernels",
    [False, pytest.param(True, marks=pytest.mark.ci)],  # the interpreter
)
def test_a_norm_below_the_limit_changes_nothing(by_kernels):
    results = []
    for limit in (None, 1e9, math.inf):
        device = SimBackend(updates_by_triton=True) if by_kernels else "cpu"
        model, optimizer = wrapped(device=device)
        backward(model)
        if limit:
            optimizer.clip_grad_by_norm(limit)
        optimizer.step()
        results.append(weights(model))
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def test_bad_calls_are_refused_and_change_nothing():
    model, optimizer = wrapped()
    with pytest.raises(RuntimeError, match="without a gradient"):
        optimizer.clip_grad_norm_(1.0)
    backward(model)
    for bad in (-1.0, 0.0, math.nan):
        with pytest.raises(ValueError, match="max_norm="):
            optimizer.clip_grad_norm_(bad)
        with pytest.raises(ValueError, match="clip_value="):
            optimizer.clip_grad_by_value(bad)
    with pytest.raises(ValueError, match="norm_type=0"):
        optimizer.clip_grad_norm_(1.0, 0)
    optimizer.clip_grad_norm_(0.5)
    optimizer.step()

    other, other_optimizer = wrapped()
    backward(other)
    other_optimizer.clip_grad_norm_(0.5)
    other_optimizer.step()
    assert torch.equal(weights(model), weights(other))

    both, both_optimizer = wrapped(max_norm=0.5)
    backward(both)
    with pytest.raises(RuntimeError, match=r"GeminiDDP\(max_norm=0\.5\) clips in every step"):
        both_optimizer.clip_grad_norm_(0.5)
    both_optimizer.step()
    assert torch.equal(weights(both), weights(other))


def test_a_model_without_optimizer_says_so():
    model = GeminiDDP(Tower(), **SMALL)
    backward(model)
    with pytest.raises(RuntimeError, match="no optimizer yet"):
        model.clip_grad_norm_(1.0)
    HybridAdam(model.parameters()).clip_grad_norm_(1.0)


def test_a_norm_that_is_not_finite_can_be_an_error():
    model, optimizer = wrapped()
    handle = model.layers[0][1].weight.register_hook(lambda grad: grad * math.inf)
    backward(model)
    handle.remove()
    with pytest.raises(RuntimeError, match="not finite"):
        optimizer.clip_grad_norm_(1.0, error_if_nonfinite=True)
    optimizer.step()
    assert optimizer.last_report.skipped


# -- plain modules -------------------------------------------------------------------------------


@pytest.mark.parametrize("norm_type", [1, 2, 2.5, math.inf])
def test_a_plain_module_is_clipped_in_place(norm_type):
    module = Tower()
    optimizer = HybridAdam(module.parameters())
    backward(module)
    before = [p.grad.clone() for p in module.parameters()]
    norm = optimizer.clip_grad_norm_(0.5, norm_type)
    assert abs(float(norm) / fp64_norm(before, norm_type) - 1) < 1e-6
    after = flat([p.grad for p in module.parameters()])
    assert relative_error(after, flat(before) * 0.5 / float(norm)) < 1e-5
    optimizer.clip_grad_by_value(1e-3)
    assert max(float(p.grad.abs().max()) for p in module.parameters()) <= torch.tensor(1e-3)


@pytest.mark.parametrize("order", [2.0, 3.0, math.inf, 0.0, -1.0, -math.inf])
def test_torchs_norm_of_a_large_gradient_is_that_of_its_elements(order):
    """It is taken strip by strip: 2^18 elements, here five strips of which one is short."""
    model = GeminiDDP(nn.Linear(1027, 1024, bias=False), "cpu", precision="fp32")
    HybridAdam(model.parameters())
    model(torch.randn(3, 1027)).square().sum().backward()
    grad = model.module.weight.grad.clone().double()
    norm = torch.linalg.vector_norm(model.module.weight.grad, order)
    assert float(norm) == pytest.approx(
        float(torch.linalg.vector_norm(grad, order)), rel=1e-6 if order else 0
    )


def test_torchs_clipping_takes_no_wide_copy_of_a_large_gradient():
    """torch widens all that it takes a norm of: 8 bytes an element, twice the gradient here."""
    model = GeminiDDP(nn.Linear(2048, 1024, bias=False), "cpu", precision="fp32")
    HybridAdam(model.parameters())
    model(torch.randn(3, 2048)).square().sum().backward()
    taken = allocated(lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
    assert taken.peak < 2 * 2048 * 1024  # bytes: half of the gradient
