"""Digest, a sum over words that shows any change: replicas of the same weights compare it.

    x = word * A + (first + i) * B + salt        64-bit integers that wrap
    x = x ^ (x >> 29);  x = x * C;  x = x ^ (x >> 32)
    digest = sum of x

Sums of parts add up to the sum of the whole, so shards of any size give one digest. 8 bytes read a
word. The reference is `digest_reference`, bit for bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import on

A, B, C = 0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9, 0x14D049BB133111EB
BLOCK = 4096  # words a program
REFERENCE_WORDS = 1 << 16  # in cache


@triton.jit
def _digest_kernel(
    words, sums, first, salt, numel,
    A: tl.constexpr, B: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    start = tl.program_id(0).to(tl.int64) * BLOCK
    at = start + tl.arange(0, BLOCK)
    inside = at < numel
    word = tl.load(words + at, mask=inside, other=0)
    x = word * A + (first + at) * B + salt
    x = x ^ (x >> 29)
    x = x * C
    x = x ^ (x >> 32)
    tl.store(sums + tl.program_id(0), tl.sum(tl.where(inside, x, 0), axis=0))


def digest_on_device(words: Tensor, first: int, salt: int) -> Tensor:
    """Digest, int64 0-d, of `words` int64 [n], which are words `first`, ... of their parameter."""
    assert words.dtype == torch.int64 and words.is_contiguous()
    programs = max(1, triton.cdiv(words.numel(), BLOCK))
    sums = torch.zeros(programs, dtype=torch.int64, device=words.device)
    if words.numel():
        with on(words.device):
            _digest_kernel[(programs,)](words, sums, first, salt, words.numel(), A, B, C, BLOCK)
    return sums.sum()


def digest_reference(words: Tensor, first: int, salt: int) -> Tensor:
    """Digest as `digest_on_device`, with torch's operators."""
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for start in range(0, words.numel(), REFERENCE_WORDS):
        part = words[start : start + REFERENCE_WORDS]
        at = torch.arange(first + start, first + start + part.numel(), device=words.device)
        x = part * A + at * B + salt
        x ^= x >> 29
        x *= C
        x ^= x >> 32
        total += x.sum()
    return total
