"""Loads and stores of all float types, with one rounding that is the same everywhere.

The interpreter's own cast from fp32 to bf16 truncates, and compilers may choose any NaN, so bf16 is
rounded to nearest even with integers, here and nowhere else.

Stochastic rounding adds 16 random bits below the bits that are kept and cuts them off, so that the
mean of a rounded value is the value. The bits are Philox4x64-10 (Salmon et al. 2011), 16 elements
a block, with key (seed, parameter) and counter (1 + element // 16, step): where an element lives
changes none of them. `optim.rules.formulas` makes the same bits on the CPU.

fp32 masters of bf16 weights are joined from weight and remainder; the reference, and why it is
exact, is `optim.rules.split_master`. Bytes per element: the remainder, 2 read and 2 written in a
master's place, and 2 to read the weight, which is written anyway. Ties are in the sign of a plane
that is read and written anyway.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.random import philox_impl


@triton.jit
def round_bf16(x):
    """Round fp32 to the bits of bf16 as int16: to nearest, ties to even; NaN is 0x7FC0."""
    bits = x.to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where(x != x, 0x7FC0, rounded).to(tl.int16)


@triton.jit
def pointer(address, offset, DTYPE: tl.constexpr, ALIGNMENT: tl.constexpr):
    """Pointer to DTYPE at element `offset` from a raw int64 address; bf16 as int16.

    ALIGNMENT: bytes that are promised, 0 for none. It is set on a pointer of its own, made in the
    branch that knows it.
    """
    if DTYPE == tl.bfloat16:
        ptr = address.to(tl.pointer_type(tl.int16)) + offset
    else:
        ptr = address.to(tl.pointer_type(DTYPE)) + offset
    if ALIGNMENT > 0:
        ptr = tl.multiple_of(ptr, ALIGNMENT)
    return ptr


@triton.jit
def load(ptr, offsets, mask, DTYPE: tl.constexpr, MASKED: tl.constexpr):
    """Elements as fp32, 0 where masked. `ptr` comes from `pointer`."""
    if MASKED:
        values = tl.load(ptr + offsets, mask=mask, other=0)
    else:
        values = tl.load(ptr + offsets)
    if DTYPE == tl.bfloat16:
        return (values.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return values.to(tl.float32)


@triton.jit
def store(ptr, offsets, values, mask, DTYPE: tl.constexpr, MASKED: tl.constexpr):
    """Store fp32 values, rounded once to DTYPE. `ptr` comes from `pointer`."""
    if DTYPE == tl.bfloat16:
        out = round_bf16(values)
    else:
        out = values.to(DTYPE)
    if MASKED:
        tl.store(ptr + offsets, out, mask=mask)
    else:
        tl.store(ptr + offsets, out)


@triton.jit
def stored_bits(values, DTYPE: tl.constexpr):
    """Bits of fp32 values as `store` leaves them, as int32."""
    if DTYPE == tl.bfloat16:
        return round_bf16(values).to(tl.int32)
    if DTYPE == tl.float16:
        return values.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32)
    return values.to(tl.int32, bitcast=True)


@triton.jit
def mark(address, start, changed, remaining, BLOCK: tl.constexpr):
    """Set a bit for each of `changed` [BLOCK], from bit `start` on, a multiple of 8."""
    byte = tl.arange(0, BLOCK // 8)
    inside = byte * 8 < remaining
    flags = tl.reshape(changed.to(tl.int32), (BLOCK // 8, 8))
    bits = tl.sum(flags << tl.arange(0, 8)[None, :], axis=1)
    at = address.to(tl.pointer_type(tl.uint8)) + start // 8 + byte
    before = tl.load(at, mask=inside, other=0).to(tl.int32)
    tl.store(at, (before | bits).to(tl.uint8), mask=inside)


@triton.jit
def noise(seed, param, step, first, BLOCK: tl.constexpr):
    """Noise int32 [BLOCK]: 16 random bits for each element; `first` is a multiple of 16."""
    group = (first // 16 + 1 + tl.arange(0, BLOCK // 16)).to(tl.uint64)
    zero = group * 0
    key0, key1 = zero + seed.to(tl.uint64), zero + param.to(tl.uint64)
    w0, w1, w2, w3 = philox_impl(group, zero + step.to(tl.uint64), zero, zero, key0, key1)
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3))  # [.., 2, 2], in the order of the words
    words = tl.reshape(words, (BLOCK // 16, 4, 1))
    shifts = tl.reshape(tl.arange(0, 4) * 16, (1, 1, 4)).to(tl.uint64)
    return tl.reshape(((words >> shifts) & 0xFFFF).to(tl.int32), (BLOCK,))


@triton.jit
def round_stochastic(values, random):
    """Round fp32 to the bits of bf16 as int16, up or down at random by `noise`; NaN is 0x7FC0."""
    bits = values.to(tl.int32, bitcast=True)
    return tl.where(values != values, 0x7FC0, (bits + random) >> 16).to(tl.int16)


@triton.jit
def store_stochastic(ptr, offsets, values, random, mask, MASKED: tl.constexpr):
    """Store fp32 values as bf16, rounded as `round_stochastic` does."""
    out = round_stochastic(values, random)
    if MASKED:
        tl.store(ptr + offsets, out, mask=mask)
    else:
        tl.store(ptr + offsets, out)


@triton.jit
def load_bits(ptr, offsets, mask, MASKED: tl.constexpr):
    """Elements of int16 as int32, 0 where masked."""
    if MASKED:
        values = tl.load(ptr + offsets, mask=mask, other=0)
    else:
        values = tl.load(ptr + offsets)
    return values.to(tl.int32)


@triton.jit
def join_master(high, low, keeper):
    """Join fp32 masters from int32 bits of bf16 weights, int32 remainders and fp32 tie keeper."""
    ties = keeper.to(tl.int32, bitcast=True) >> 31  # -1 where the weight was rounded down half-way
    return (((high - ties) << 16) + low).to(tl.float32, bitcast=True)


@triton.jit
def with_tie(keeper, master):
    """Keeper in fp32, not negative, with the sign that tells how fp32 `master` is rounded."""
    is_tie = (master.to(tl.int32, bitcast=True) & 0x1FFFF) == 0x8000
    bits = keeper.to(tl.int32, bitcast=True)
    return (bits | (is_tie.to(tl.int32) << 31)).to(tl.float32, bitcast=True)


@triton.jit
def store_low(ptr, offsets, master, mask, MASKED: tl.constexpr):
    """Store the low 16 bits of fp32 masters, as int16."""
    low = master.to(tl.int32, bitcast=True).to(tl.int16)
    if MASKED:
        tl.store(ptr + offsets, low, mask=mask)
    else:
        tl.store(ptr + offsets, low)
