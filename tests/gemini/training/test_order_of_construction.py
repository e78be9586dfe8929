"""Optimizer, wrapper, scheduler, clip and state dicts, in any order before the first step."""

import copy
import gc
import itertools

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

from bench.shared.simulated import SimBackend
from gemini import GeminiAdamOptimizer, GeminiDDP, GeminiOptimizer
from optim import HybridAdam
from tests.support.loops.sides import ADAM, SMALL, Net, loss_of, updates

STEPS = 3


def torch_updates(clips):
    module = Net()
    optimizer = torch.optim.AdamW(module.parameters(), foreach=False, **ADAM)
    scheduler = StepLR(optimizer, 1, 0.5)
    for seed in range(STEPS):
        loss_of(module, seed).backward()
        if clips:
            nn.utils.clip_grad_norm_(module.parameters(), 0.2)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return updates(module)


@pytest.mark.parametrize("who_clips", ["torch", "model", "optimizer"])
@pytest.mark.parametrize("order", list(itertools.permutations(["optimizer", "wrap", "schedule"])))
@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_any_order_of_construction_trains_as_torch(order, who_clips, device):
    if order.index("schedule") < order.index("optimizer"):
        return  # there is nothing to schedule
    module = model = Net()
    for part in order:
        if part == "optimizer":
            optimizer = HybridAdam(module.parameters(), **ADAM)
        elif part == "wrap":
            backend = "cpu" if device == "cpu" else SimBackend()
            model = GeminiDDP(module, backend, precision="fp32", **SMALL)
        else:
            scheduler = StepLR(optimizer, 1, 0.5)
    clip = {
        "torch": lambda: nn.utils.clip_grad_norm_(model.parameters(), 0.2),
        "model": lambda: model.clip_grad_norm_(0.2),
        "optimizer": lambda: optimizer.clip_grad_norm_(0.2),
    }[who_clips]
    for seed in range(STEPS):
        loss_of(model, seed).backward()
        clip()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    got, want = updates(model), torch_updates(True)
    assert float((got - want).norm() / want.norm()) < 1e-6  # fp32, summed in another order


def test_a_scheduler_made_before_goes_on_driving_the_optimizer_behind_a_gemini_optimizer():
    module = Net()
    optimizer = HybridAdam(module.parameters(), **ADAM)
    model = GeminiDDP(module, precision="fp32", **SMALL)
    StepLR(optimizer, 1, 0.5)  # dropped: the next one patches what this one patched
    optimizer = GeminiOptimizer(optimizer, model, initial_scale=2**16)
    gc.collect()
    scheduler = StepLR(optimizer, 1, 0.5)
    called = []
    optimizer.optim.register_step_post_hook(lambda *_: called.append(1))
    for seed in range(STEPS):
        loss_of(model, seed).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    got, want = updates(model), torch_updates(False)
    assert float((got - want).norm() / want.norm()) < 1e-6
    assert len(called) == STEPS and optimizer.optim.param_groups is optimizer.param_groups


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_the_defaults_of_the_loss_scale_are_taken_in_every_precision(precision):
    model = GeminiDDP(Net(), precision=precision)
    GeminiAdamOptimizer(model, initial_scale=2.0**16, growth_interval=1000, hysteresis=2)
    if precision == "fp16":
        GeminiDDP(Net(), precision=precision)
    else:
        with pytest.raises(ValueError, match="loss_scale is for precision"):
            GeminiAdamOptimizer(GeminiDDP(Net(), precision=precision), initial_scale=2.0**5)


def test_an_optimizer_that_stepped_before_wrapping_is_refused_with_the_remedy():
    module = Net()
    optimizer = HybridAdam(module.parameters(), **ADAM)
    loss_of(module, 0).backward()
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    model = GeminiDDP(module, precision="fp32", **SMALL)
    for use in (optimizer.step, optimizer.state_dict):
        with pytest.raises(RuntimeError, match="wrapped after it had stepped"):
            use()
    again = HybridAdam(model.parameters(), **ADAM)
    again.load_state_dict(saved)
    model.zero_grad()
    loss_of(model, 1).backward()
    again.step()
    plain = Net()
    torch_optimizer = torch.optim.AdamW(plain.parameters(), foreach=False, **ADAM)
    for seed in range(2):
        torch_optimizer.zero_grad()
        loss_of(plain, seed).backward()
        torch_optimizer.step()
    got, want = updates(model), updates(plain)
    assert float((got - want).norm() / want.norm()) < 1e-6


@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_gradients_that_a_module_comes_with_count(device):
    module, plain = Net(), Net()
    for each in (module, plain):
        loss_of(each, 0).backward()
    backend = "cpu" if device == "cpu" else SimBackend()
    model = GeminiDDP(module, backend, precision="fp32", **SMALL)
    optimizers = (
        HybridAdam(model.parameters(), **ADAM),
        torch.optim.AdamW(plain.parameters(), foreach=False, **ADAM),
    )
    for each, optimizer in zip((model, plain), optimizers, strict=True):
        loss_of(each, 1).backward()
        optimizer.step()
    got, want = updates(model), updates(plain)
    assert float((got - want).norm() / want.norm()) < 1e-6
