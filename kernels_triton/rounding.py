"""Loads and stores of all float types, with one rounding that is the same everywhere.

The interpreter's own cast from fp32 to bf16 truncates, and compilers may choose any NaN, so bf16 is
rounded to nearest even with integers, here and nowhere else.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def round_bf16(x):
    """fp32 to the bits of bf16 as int16: to nearest, ties to even; NaN is 0x7FC0."""
    bits = x.to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where(x != x, 0x7FC0, rounded).to(tl.int16)


@triton.jit
def pointer(address, offset, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """Element `offset` behind a raw int64 address, as a pointer to DTYPE; bf16 as int16.

    ALIGNED promises 16 bytes. It is set on a pointer of its own, made in the branch that knows it.
    """
    if DTYPE == tl.bfloat16:
        ptr = address.to(tl.pointer_type(tl.int16)) + offset
    else:
        ptr = address.to(tl.pointer_type(DTYPE)) + offset
    if ALIGNED:
        ptr = tl.multiple_of(ptr, 16)
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
    """fp32 values rounded once to DTYPE. `ptr` comes from `pointer`."""
    if DTYPE == tl.bfloat16:
        out = round_bf16(values)
    else:
        out = values.to(DTYPE)
    if MASKED:
        tl.store(ptr + offsets, out, mask=mask)
    else:
        tl.store(ptr + offsets, out)
