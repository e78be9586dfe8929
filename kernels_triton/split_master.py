"""fp32 masters from bf16 weights and what they lack of them; the reference, and why it is exact, is
`optim.rules.split_master`.

Bytes per element: 2 of the remainder in a master's place, read and written, and the weight, which
is written anyway, is read too. Ties are in the sign of a plane that is read and written anyway.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_bits(ptr, offsets, mask, MASKED: tl.constexpr):
    """int16 elements as int32, 0 where masked."""
    if MASKED:
        values = tl.load(ptr + offsets, mask=mask, other=0)
    else:
        values = tl.load(ptr + offsets)
    return values.to(tl.int32)


@triton.jit
def join_master(high, low, keeper):
    """int32 bits of bf16 weights, int32 remainders, fp32 keeper of ties, to fp32 masters."""
    ties = keeper.to(tl.int32, bitcast=True) >> 31  # -1 where the weight was rounded down half-way
    return (((high - ties) << 16) + low).to(tl.float32, bitcast=True)


@triton.jit
def with_tie(keeper, master):
    """fp32 keeper, not negative, with the sign that tells how fp32 `master` is rounded."""
    is_tie = (master.to(tl.int32, bitcast=True) & 0x1FFFF) == 0x8000
    bits = keeper.to(tl.int32, bitcast=True)
    return (bits | (is_tie.to(tl.int32) << 31)).to(tl.float32, bitcast=True)


@triton.jit
def store_low(ptr, offsets, master, mask, MASKED: tl.constexpr):
    """The low 16 bits of fp32 masters, as int16."""
    low = master.to(tl.int32, bitcast=True).to(tl.int16)
    if MASKED:
        tl.store(ptr + offsets, low, mask=mask)
    else:
        tl.store(ptr + offsets, low)
