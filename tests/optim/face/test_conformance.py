"""HybridAdam as a torch optimizer: schedulers, GradScaler, state dicts of torch.optim, hooks."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from optim import HybridAdam, HybridLion, HybridSGD, NvmeConfig
from tests.support.plain_training import give_gradients, make_params, train, update_error

SMALL = NvmeConfig(block_numel=1 << 16)

SCHEDULERS = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [1, 3]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 1e-3, 1e-2, step_size_up=2),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 1e-2, total_steps=6),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.LinearLR(o), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.9)], [2]
    ),
}
NOT_A_SCHEDULE = {"LRScheduler"}  # the base class


def test_every_scheduler_of_torch_is_in_the_table():
    found = {
        name
        for name in lr_scheduler.__all__
        if isinstance(getattr(lr_scheduler, name), type) and name not in NOT_A_SCHEDULE
    }
    assert found == SCHEDULERS.keys()


@pytest.mark.filterwarnings("ignore:.*epoch parameter.*", "ignore:.*SequentialLR.*")
@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_drives_it_as_it_drives_torch(name):
    results, rates = [], []
    for cls in (HybridAdam, torch.optim.AdamW):
        params = make_params()[:5]
        optimizer = cls(params, lr=1e-2, weight_decay=0.1)
        schedule = SCHEDULERS[name](optimizer)
        seen = []
        for step in range(5):
            give_gradients(params, step)
            optimizer.step()
            schedule.step(*([1.0] if name == "ReduceLROnPlateau" else []))
            seen.append((optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["betas"]))
        rates.append(seen)
        results.append(params)
    assert rates[0] == rates[1] and len(set(rates[0])) > 1
    assert update_error(*results, make_params()[:5]) < 1e-6


def test_what_a_state_dict_asks_for_and_we_do_not_have_is_named():
    theirs = make_params()
    before = HybridAdam(make_params(), lr=0.3)
    others = {
        "nesterov": (HybridAdam, torch.optim.SGD(theirs, nesterov=True, momentum=0.9)),
        "dampening": (HybridLion, torch.optim.SGD(theirs, dampening=0.5, momentum=0.9)),
        "amsgrad": (HybridSGD, torch.optim.AdamW(theirs, amsgrad=True)),
        "maximize": (HybridLion, torch.optim.AdamW(theirs, maximize=True)),
    }
    for option, (cls, saved) in others.items():
        with pytest.raises(ValueError, match=f"has {option}=.* does not have"):
            cls(make_params()).load_state_dict(saved.state_dict())
    with pytest.raises(ValueError, match="6 parameters and"):
        before.load_state_dict(torch.optim.AdamW(theirs[:6]).state_dict())
    with pytest.raises(ValueError, match="2 param groups"):
        groups = [{"params": theirs[:3]}, {"params": theirs[3:]}]
        before.load_state_dict(torch.optim.AdamW(groups).state_dict())
    assert before.param_groups[0]["lr"] == 0.3


def test_moments_of_16_bit_parameters_stay_fp32_over_a_state_dict():
    params = make_params(torch.bfloat16)
    optimizer = HybridAdam(params, lr=1e-2)
    train(params, optimizer, 2)
    saved = copy.deepcopy(optimizer.state_dict())
    other = HybridAdam(make_params(torch.bfloat16))
    other.load_state_dict(saved)
    for mine, his in zip(optimizer.state.values(), other.state.values(), strict=True):
        assert his["exp_avg_sq"].dtype == torch.float32
        assert torch.equal(mine["exp_avg_sq"], his["exp_avg_sq"])


# -- torch.amp.GradScaler ------------------------------------------------------------------------


@pytest.mark.parametrize("fraction", [0.0, 0.6])
@pytest.mark.parametrize("unscales", [False, True])
def test_grad_scaler_on_a_plain_module(fraction, unscales, tmp_path):
    """The step in the middle overflows: it is skipped, and the scale goes down."""
    nvme = {"nvme_offload_fraction": fraction, "nvme_offload_dir": tmp_path, "nvme": SMALL}
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    start, ours, theirs = (make_params() for _ in range(3))
    optimizer = HybridAdam(ours, lr=1e-2, **nvme)
    plain = torch.optim.AdamW(theirs, lr=1e-2, weight_decay=0.0)
    for step in range(4):
        for params in (ours, theirs):
            give_gradients(params, step)
        for p in ours:
            p.grad.mul_(scaler.get_scale())
        if step == 2:
            ours[3].grad[7] = math.inf
            before = [p.detach().clone() for p in ours]
        scaler.scale(torch.ones(()))  # what makes the scaler's own tensors
        if unscales:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        if step == 2:
            assert optimizer.last_report.skipped
            assert optimizer.last_report.nonfinite == "parameter 3"
            assert all(torch.equal(a, b) for a, b in zip(before, ours, strict=True))
            assert all(state["step"] == 2 for state in optimizer.state.values())
        else:
            assert optimizer.last_report.loss_scale == (1.0 if unscales else 1024 >> (step > 2))
            plain.step()
    assert scaler.get_scale() == 512 and optimizer.skipped_steps == 1
    assert update_error(ours, theirs, start) < 1e-6


def test_grad_scaler_under_a_wrapped_module_is_told_what_to_do():
    from gemini import GeminiDDP

    model = GeminiDDP(nn.Linear(3, 3), precision="fp16")
    optimizer = HybridAdam(model.parameters())
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(torch.ones(1, 3)).sum()).backward()
    with pytest.raises(RuntimeError, match="loss scale of its own"):
        scaler.step(optimizer)


# -- the rest of torch.optim's interface ---------------------------------------------------------


def test_a_closed_optimizer_says_so():
    params = make_params()
    optimizer = HybridAdam(params)
    train(params, optimizer, 1)
    optimizer.close()
    give_gradients(params, 1)
    with pytest.raises(RuntimeError, match="was closed"):
        optimizer.step()
