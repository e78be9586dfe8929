"""Rates of every step are the closed forms, and go on from a state dict."""

import math

import pytest
import torch

from gemini.integrations import schedules

T, W, BASES = 23, 5, (0.3, 0.01)


def warmed(after):
    return lambda t, base: base * (t + 1) / W if t < W else after(t - W, T - W, base)


def cosine(t, total, base, least=0.0):
    return least + (base - least) * (1 + math.cos(math.pi * t / total)) / 2


def flat(t, total, base):
    start = int(0.72 * total)
    return base if t < start else cosine(t - start, total - start, base)


def steps_of(t, milestones, base):
    return base * 0.1 ** sum(m <= t for m in milestones)


CASES = {
    "LinearWarmupLR": (
        {"warmup_steps": W},
        lambda t, b: b * (t + 1) / (W + 1) if t < W else b * (T - t) / (T - W),
    ),
    "CosineAnnealingLR": ({"eta_min": 0.001}, lambda t, b: cosine(t, T, b, 0.001)),
    "CosineAnnealingWarmupLR": ({"warmup_steps": W}, warmed(cosine)),
    "FlatAnnealingLR": ({}, lambda t, b: flat(t, T, b)),
    "FlatAnnealingWarmupLR": ({"warmup_steps": W}, warmed(flat)),
    "MultiStepLR": ({"milestones": [4, 11]}, lambda t, b: steps_of(t, [4, 11], b)),
    "MultiStepWarmupLR": (
        {"warmup_steps": W, "milestones": [9, 15]},
        warmed(lambda t, total, b: steps_of(t + W, [9, 15], b)),
    ),
    "PolynomialLR": (
        {"power": 2.0}, lambda t, b: 1e-4 + (b - 1e-4) * (1 - t / T) ** 2,
    ),
    "PolynomialWarmupLR": (
        {"warmup_steps": W}, warmed(lambda t, total, b: 1e-4 + (b - 1e-4) * (1 - t / total)),
    ),
    "StepLR": ({"step_size": 4, "gamma": 0.5}, lambda t, b: b * 0.5 ** (t // 4)),
    "ExponentialLR": ({"gamma": 0.9}, lambda t, b: b * 0.9**t),
    "LambdaLR": ({"lr_lambda": lambda t: 1 / (t + 1)}, lambda t, b: b / (t + 1)),
}  # fmt: skip


def made(name):
    params = [torch.nn.Parameter(torch.zeros(1)) for _ in BASES]
    groups = [{"params": [p], "lr": base} for p, base in zip(params, BASES, strict=True)]
    optimizer = torch.optim.SGD(groups, momentum=0.9)
    options = CASES[name][0] if name in CASES else {}
    return optimizer, getattr(schedules, name)(optimizer, T, **options)


def rates(optimizer, schedule, steps):
    found = []
    for _ in range(steps):
        found.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        schedule.step()
    return found


@pytest.mark.parametrize("name", CASES)
def test_every_rate_is_the_closed_form(name):
    formula = CASES[name][1]
    for t, found in enumerate(rates(*made(name), T)):
        # torch's own multiply step by step, in fp64
        assert found == pytest.approx([formula(t, base) for base in BASES], rel=1e-12, abs=1e-15)


@pytest.mark.parametrize("name", [*CASES, "OneCycleLR"])
def test_a_state_dict_goes_on_where_it_was(name):
    wanted = rates(*made(name), T)
    optimizer, schedule = made(name)
    rates(optimizer, schedule, 9)
    again, resumed = made(name)
    again.load_state_dict(optimizer.state_dict())
    resumed.load_state_dict(schedule.state_dict())
    assert rates(again, resumed, T - 9) == wanted[9:]


def test_behind_the_last_step_the_rate_stays():
    optimizer, schedule = made("LinearWarmupLR")
    found = rates(optimizer, schedule, T + 3)
    assert found[T] == found[T + 2] == [0.0, 0.0]


@pytest.mark.parametrize("warmup", [2, 50])
def test_a_warm_up_of_all_steps_goes_on_to_the_end(warmup):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=warmup + 1.0)
    schedule = schedules.LinearWarmupLR(optimizer, warmup_steps=warmup, total_steps=2)
    found = []
    for _ in range(3):
        found += schedule.get_last_lr()
        optimizer.step()
        schedule.step()
    assert found == [1.0, 2.0, 3.0]
