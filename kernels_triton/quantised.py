"""State planes of one or two bytes, decoded and encoded in a kernel's tile.

The formulas, and why second moments are rounded at random, are in `optim.rules.quantised`; the bits
are the same. Bytes per element of both moments, read and written: 4 of bf16, 2.125 of 8 bits with a
scale of 64 elements.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gemini.kernels_triton.rounding import round_bf16, store_stochastic

KIND_CODES = {"fp32": 0, "bf16": 1, "8bit": 2}
GROUP = 64  # elements of one scale
_BF16, _8BIT, _GROUP = tl.constexpr(1), tl.constexpr(2), tl.constexpr(GROUP)
# see `optim.rules.quantised`
NOISE_KEY = tl.constexpr(1 << 32)
_LEAST_SIGNED, _LEAST_ROOT = tl.constexpr(2.0**-100), tl.constexpr(2.0**-52)


@triton.jit
def load_plane(
    codes, scales, i, mask, KIND: tl.constexpr, POSITIVE: tl.constexpr, MASKED: tl.constexpr
):
    """Elements of a plane as fp32, 0 where masked. codes: fp32, bf16 as int16, int8 or uint8."""
    if MASKED:
        found = tl.load(codes + i, mask=mask, other=0)
    else:
        found = tl.load(codes + i)
    if KIND == _BF16:
        values = (found.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    elif KIND == _8BIT:
        if MASKED:
            scale = tl.load(scales + i // _GROUP, mask=mask, other=0.0)
        else:
            scale = tl.load(scales + i // _GROUP)
        x = found.to(tl.float32)
        if POSITIVE:
            root = tl.div_rn(x, 255.0) * scale
            values = root * root
        else:
            y = tl.div_rn(x, 127.0)
            values = tl.div_rn(y, 2.0 - tl.abs(y)) * scale
    else:
        values = found
    return values


@triton.jit
def store_plane(
    codes,
    scales,
    i,
    values,
    random,
    mask,
    remaining,
    KIND: tl.constexpr,
    POSITIVE: tl.constexpr,
    MASKED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Store fp32 values in a plane. random: int32 of 16 bits an element, for a POSITIVE plane."""
    if KIND == _BF16:
        if POSITIVE:
            store_stochastic(codes, i, values, random, mask, MASKED)
        elif MASKED:
            tl.store(codes + i, round_bf16(values), mask=mask)
        else:
            tl.store(codes + i, round_bf16(values))
    elif KIND == _8BIT:
        x = tl.sqrt_rn(values) if POSITIVE else values
        bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF  # NaN is the largest of all
        if MASKED:
            bits = tl.where(mask, bits, 0)
        largest = tl.max(tl.reshape(bits, (BLOCK // _GROUP, _GROUP)), axis=1)
        scale = largest.to(tl.float32, bitcast=True)
        scale = tl.where(scale < (_LEAST_ROOT if POSITIVE else _LEAST_SIGNED), 0.0, scale)
        wide = tl.broadcast_to(tl.expand_dims(scale, 1), (BLOCK // _GROUP, _GROUP))
        s = tl.reshape(wide, (BLOCK,))
        z = tl.where(s > 0.0, tl.div_rn(x, tl.where(s > 0.0, s, 1.0)), 0.0)
        if POSITIVE:
            code = tl.floor(255.0 * z + random.to(tl.float32) * (2.0**-16))
        else:
            code = tl.floor(127.0 * tl.div_rn(2.0 * z, 1.0 + tl.abs(z)) + 0.5)
        out = tl.where(code == code, code, 0.0).to(tl.int32)
        group = tl.arange(0, BLOCK // _GROUP)
        if POSITIVE:
            out = out.to(tl.uint8)
        else:
            out = out.to(tl.int8)
        if MASKED:
            tl.store(codes + i, out, mask=mask)
            tl.store(scales + group, scale, mask=group * _GROUP < remaining)
        else:
            tl.store(codes + i, out)
            tl.store(scales + group, scale)
    elif MASKED:
        tl.store(codes + i, values, mask=mask)
    else:
        tl.store(codes + i, values)


@triton.jit
def untied(master):
    """Masters in fp32 without ties: one half-way that would be rounded down loses its last bit."""
    bits = master.to(tl.int32, bitcast=True)
    return (bits - ((bits & 0x1FFFF) == 0x8000).to(tl.int32)).to(tl.float32, bitcast=True)
