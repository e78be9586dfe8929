"""Kernels of float8 against torch's own conversions, bit for bit."""

import math

import pytest
import torch

from gemini.chunk.float8 import GAP
from kernels_triton.float8 import Float8Runs
from kernels_triton.launch import is_interpreted

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
FLOAT8 = torch.float8_e4m3fn

pytestmark = [] if is_interpreted() else [pytest.mark.gpu, pytest.mark.values]


def runs_of(numels):
    """Runs one behind another, of parameters 0, 1, ...; the last is a gap."""
    firsts = [sum(numels[:i]) for i in range(len(numels))]
    params = [*range(len(numels) - 1), GAP]
    return list(zip(firsts, numels, params, strict=True))


def there_and_back(values, runs):
    most = torch.zeros(len(runs), device=DEVICE)
    own = Float8Runs([run for run in runs if run[2] != GAP], DEVICE)
    own.largest(values, most)
    sent = torch.zeros(len(values), dtype=torch.uint8, device=DEVICE)
    own.pack(values, most, sent)
    back = torch.full_like(values, 7)
    Float8Runs(runs, DEVICE).unpack(sent, most, back)
    return most, sent, back


def by_torch(values, runs):
    most, sent, back = [], [], []
    for first, numel, param in runs:
        run = values[first : first + numel]
        if param == GAP:
            most.append(torch.zeros((), device=DEVICE))
            sent.append(torch.zeros(numel, dtype=torch.uint8, device=DEVICE))
            back.append(torch.zeros_like(run))
            continue
        most.append(run.abs().amax().float())
        scale = (most[-1] / 448).clamp(min=torch.finfo(torch.float32).tiny)
        packed = (run.float() / scale).to(FLOAT8)
        sent.append(packed.view(torch.uint8))
        back.append((packed.float() * scale).to(values.dtype))
    return torch.stack(most), torch.cat(sent), torch.cat(back)


def check(values, runs):
    for got, want in zip(there_and_back(values, runs), by_torch(values, runs), strict=True):
        assert torch.equal(got.isnan(), want.isnan())
        assert torch.equal(got.nan_to_num(3.0), want.nan_to_num(3.0))


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_parameters_of_odd_sizes_come_to_what_torch_makes_of_them(dtype):
    runs = runs_of([1, 3, 4096, 70001, 64, 2048, 5, 33])
    values = torch.randn(sum(numel for _, numel, _ in runs), device=DEVICE)
    values[4:4100] *= 1e-6
    values[4100:74101] *= torch.logspace(-9, 3, 70001, device=DEVICE)
    values[74101:74165] = 0
    check(values.to(dtype), runs)


def test_every_bf16_value_is_rounded_as_torch_rounds_it():
    """With a scale of 1: 448 is among the finite ones; ties, halves of the least, both signs."""
    values = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)
    values = values.view(torch.bfloat16).to(DEVICE)
    values = values[values.float().abs() <= 448]
    check(values, runs_of([len(values), 0]))


def test_ties_between_all_neighbours_go_to_even():
    codes = torch.arange(0x7E, dtype=torch.uint8)
    low, high = codes.view(FLOAT8).float(), (codes + 1).view(FLOAT8).float()
    ties = (low + high) / 2
    near = [torch.nextafter(ties, side) for side in (low, high)]
    values = torch.cat([torch.tensor([448.0]), ties, *near, -ties]).to(DEVICE)
    check(values, runs_of([len(values), 0]))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_of_its_own_parameter(value):
    runs = runs_of([70, 70, 6])
    values = torch.randn(146, device=DEVICE)
    values[75] = value
    check(values, runs)
    _, _, back = there_and_back(values, runs)
    assert back[:70].isfinite().all() and not back[70:140].isfinite().any()


def test_magnitudes_are_raised_and_never_lowered():
    most = torch.tensor([5.0, 0.5], device=DEVICE)
    Float8Runs([(0, 4, 0), (4, 4, 1)], DEVICE).largest(torch.ones(8, device=DEVICE), most)
    assert most.tolist() == [5.0, 1.0]
