"""Stochastic rounding: the same bits on both paths, wherever an element lives, and unbiased."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from kernels_triton.rounding import noise as noise_kernel
from kernels_triton.rounding import store_stochastic
from optim.rules.formulas import noise, round_stochastic


@triton.jit
def _round(values, out, random, seed, param, step, first, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    bits = noise_kernel(tl.load(seed), tl.load(param), tl.load(step), tl.load(first), BLOCK)
    tl.store(random + i, bits)
    store_stochastic(out, i, tl.load(values + i), bits, i < BLOCK, False)


def on_device(values, seed, param, step, first):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    out = torch.empty(values.numel(), dtype=torch.int16, device=device)
    random = torch.empty(values.numel(), dtype=torch.int32, device=device)
    numbers = [
        torch.tensor(n, dtype=torch.int64, device=device) for n in (seed, param, step, first)
    ]
    _round[(1,)](values.to(device), out, random, *numbers, values.numel())
    return out.view(torch.bfloat16).cpu(), random.cpu()


@pytest.mark.parametrize(
    ("seed", "param", "step", "first"),
    [(0, 0, 1, 0), (7, 3, 20, 64), (2**53 - 1, 40_000, 2**31 - 1, 2**40)],
)
def test_both_paths_round_to_the_same_bits(seed, param, step, first):
    values = torch.randn(1024) * 10 ** torch.randn(1024)
    values[:4] = torch.tensor([0.0, float("inf"), float("-inf"), float("nan")])
    random = noise(seed, param, step, first, 1024)
    got, got_random = on_device(values, seed, param, step, first)
    assert torch.equal(got_random, random)
    out = torch.empty(1024, dtype=torch.bfloat16)
    round_stochastic(values, random, out)
    assert torch.equal(got[4:], out[4:]) and torch.equal(got[:3], out[:3])
    assert out[3].isnan() and got[3].isnan() and out[1] == float("inf")


def test_noise_is_that_of_an_element_and_not_of_how_it_is_cut():
    whole = noise(5, 2, 9, 0, 1000)
    for start, end in ((0, 64), (64, 512), (17, 999), (999, 1000)):
        assert torch.equal(noise(5, 2, 9, start, end - start), whole[start:end])


def test_noise_differs_between_seeds_parameters_and_steps_and_is_uniform():
    keys = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)]
    found = [noise(*key, 0, 1 << 16).numpy() for key in keys]
    for i, mine in enumerate(found):
        # 16 bits over 65536 draws: mean 32767.5 +- 74, and 16 equal bins of 4096 +- 62
        assert abs(mine.mean() - 32767.5) < 5 * 74
        assert np.abs(np.bincount(mine >> 12, minlength=16) - 4096).max() < 5 * 62
        for other in found[:i]:
            assert abs(np.corrcoef(mine, other)[0, 1]) < 5 / 256


def test_the_mean_of_a_rounded_value_is_the_value():
    """A quarter of the way from one bf16 number to the next: rounds up one time in four."""
    below = torch.tensor(1.0)
    value = below + 0.25 * 2**-7
    out = torch.empty(1 << 16, dtype=torch.bfloat16)
    round_stochastic(value.expand(1 << 16).contiguous(), noise(0, 0, 1, 0, 1 << 16), out)
    up = (out > 1).double().mean()
    assert set(out.tolist()) == {1.0, 1.0 + 2**-7}
    assert abs(up - 0.25) < 5 * (0.25 * 0.75 / 65536) ** 0.5
    exact = torch.tensor([1.5, -2.0]).repeat(32)
    rounded = torch.empty(64, dtype=torch.bfloat16)
    round_stochastic(exact, noise(0, 0, 1, 0, 64), rounded)
    assert torch.equal(rounded.float(), exact)
