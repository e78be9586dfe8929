"""Stochastic rounding of fp32 to bf16 on the CPU; `kernels_triton.rounding` makes the same bits.

16 random bits are added below the bits that are kept, and cut off: the mean of a rounded value is
the value, so that updates smaller than half a bf16 step are not lost. The bits are Philox4x64-10
(Salmon et al. 2011) with key (seed, parameter) and counter (1 + element // 16, step): they do not
depend on where an element lives.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

ELEMENTS_PER_BLOCK = 16  # four words of 64 bits


def noise(seed: int, param: int, step: int, first: int, numel: int) -> Tensor:
    """int32 [numel] in [0, 2**16) for elements [first, first + numel) of a parameter."""
    skip = first % ELEMENTS_PER_BLOCK
    generator = np.random.Philox(
        key=np.array([seed, param], dtype=np.uint64),
        # numpy counts up before it makes a block
        counter=np.array([first // ELEMENTS_PER_BLOCK, step, 0, 0], dtype=np.uint64),
    )
    words: np.ndarray = generator.random_raw(-(-(skip + numel) // 4))
    halves = torch.from_numpy(words.view(np.int16))[skip : skip + numel]
    return halves.to(torch.int32).bitwise_and_(0xFFFF)


def round_stochastic(values: Tensor, random: Tensor, out: Tensor) -> None:
    """fp32 [n] to bf16 [n] `out`, up or down by `random` (from `noise`); NaN stays NaN."""
    bits = random.add_(values.view(torch.int32)).bitwise_right_shift_(16).to(torch.int16)
    out.copy_(bits.view(torch.bfloat16))
    out.masked_fill_(values.isnan(), torch.nan)
