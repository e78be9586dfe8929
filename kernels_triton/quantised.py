"""State planes of one or two bytes, decoded and encoded in a kernel's tile.

The formulas, and why values are rounded at random, are in `optim.rules.quantised`; the bits are the
same. Bytes per element of both moments of Adam, read and written: 4 of bf16, 2.125 of 8 bits with
an exponent for 8 elements.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from gemini.kernels_triton.rounding import round_bf16, store_stochastic

GROUP = 8  # elements that share an exponent


@dataclass(frozen=True, slots=True)
class Codec:
    """How a kernel has planes of a kind: the code by which it knows them, and of how many elements
    one value of theirs is, and one that groups share."""

    code: int  # 0: fp32, where masters keep their ties in the sign of a plane
    of_code: int = 1
    of_shared: int = GROUP


CODECS = {"fp32": Codec(0), "bf16": Codec(1), "8bit": Codec(2)}
_BF16, _8BIT, _GROUP = tl.constexpr(1), tl.constexpr(2), tl.constexpr(GROUP)
# see `optim.rules.quantised`
NOISE_KEY = tl.constexpr(1 << 32)
_INF, _NAN = tl.constexpr(0x7F800000), tl.constexpr(0x7FC00000)
_RATIO_BASE, _LEAST_RATIO = tl.constexpr(1968), tl.constexpr(1969 << 19)


@triton.jit
def load_plane(
    codes, shared, i, mask, root,
    KIND: tl.constexpr, POSITIVE: tl.constexpr, UNDER_ROOT: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Elements of a plane as fp32, 0 where masked. codes: fp32, bf16 as int16, int8 or uint8.
    root: fp32, of the plane that an UNDER_ROOT one is under."""
    if MASKED:
        found = tl.load(codes + i, mask=mask, other=0)
    else:
        found = tl.load(codes + i)
    if KIND == _BF16:
        values = (found.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    elif KIND == _8BIT:
        code = found.to(tl.int32)
        size = tl.abs(code)
        if UNDER_ROOT:
            ratio = ((size + _RATIO_BASE) << 19).to(tl.float32, bitcast=True) - 0.0625
            values = tl.where(code == 0, 0.0, tl.where(code < 0, -ratio, ratio) * root)
            bits = tl.where(code == -128, _NAN, values.to(tl.int32, bitcast=True))
        else:
            if MASKED:
                of_group = tl.load(shared + i // _GROUP, mask=mask, other=0).to(tl.int32)
            else:
                of_group = tl.load(shared + i // _GROUP).to(tl.int32)
            if POSITIVE:
                bits = _positive_bits(code, of_group)
            else:
                bits = tl.where(code == 0, 0, (size + (of_group << 3)) << 20)
                bits = tl.where(code == -128, _NAN, bits)
                value = bits.to(tl.float32, bitcast=True)
                bits = tl.where(code < 0, -value, value).to(tl.int32, bitcast=True)
        values = bits.to(tl.float32, bitcast=True)
    else:
        values = found
    return values


@triton.jit
def _positive_bits(code, of_group):
    """Bits of fp32 of codes that never are negative, and what their groups share."""
    kept = 2 + (of_group >> 7)
    bits = (code + (((of_group & 127) * 2) << kept)) << (23 - kept)
    return tl.where(code == 0, 0, tl.where(code == 255, _INF, tl.where(code == 254, _NAN, bits)))


@triton.jit
def _window(
    upper, live, KEPT: tl.constexpr, OCTAVES: tl.constexpr, LEAST: tl.constexpr, BLOCK: tl.constexpr
):
    """Exponent from which the codes of each group count, and the least exponent of what is live."""
    exponent = upper >> KEPT
    high = tl.reshape(tl.where(live, exponent, 0), (BLOCK // _GROUP, _GROUP))
    low = tl.reshape(tl.where(live, exponent, 255), (BLOCK // _GROUP, _GROUP))
    base = tl.maximum(tl.max(high, axis=1) - OCTAVES, LEAST)
    return (base + (LEAST - 1)) & -LEAST, tl.min(low, axis=1)


@triton.jit
def _wide(of_groups, BLOCK: tl.constexpr):
    found = tl.broadcast_to(tl.expand_dims(of_groups, 1), (BLOCK // _GROUP, _GROUP))
    return tl.reshape(found, (BLOCK,))


@triton.jit
def _positive(bits, random, live, BLOCK: tl.constexpr):
    """Codes of fp32 values that never are negative, by their bits; what their groups share; and the
    bits to which they are decoded."""
    fine, coarse = (bits + (random << 4)) >> 20, (bits + (random << 5)) >> 21
    fine_base, below = _window(fine, live, 3, 30, 2, BLOCK)
    coarse_base, _ = _window(coarse, live, 2, 62, 2, BLOCK)
    is_fine = below > fine_base
    kept = tl.where(is_fine, 3, 2)
    base = tl.where(is_fine, fine_base, coarse_base)
    upper = tl.where(_wide(kept, BLOCK) == 3, fine, coarse)
    first = _wide(base << kept, BLOCK)
    code = tl.minimum(tl.maximum(upper - first, 1), 253)
    # decoded here, as 0, inf and NaN are known by what they were and need not be told by codes
    found = (code + first) << _wide(23 - kept, BLOCK)
    code = tl.where(bits == 0, 0, code)
    code = tl.where(bits < _INF, code, tl.where(bits == _INF, 255, 254))
    found = tl.where(bits == 0, 0, found)
    found = tl.where(bits < _INF, found, tl.where(bits == _INF, _INF, _NAN))
    return code, tl.where(below == 255, 0, (base >> 1) + ((kept - 2) << 7)), found


@triton.jit
def _ratio(values, random, root):
    """Codes of fp32 values by their ratios to a root, but for their signs."""
    size = tl.abs(values)
    ratio = tl.where(root > 0.0, tl.div_rn(size, tl.where(root > 0.0, root, 1.0)), size * 0.0)
    bits = (ratio + 0.0625).to(tl.int32, bitcast=True) & 0x7FFFFFFF
    code = tl.minimum(((bits + (random << 3)) >> 19) - _RATIO_BASE, 127)
    code = tl.where(bits < _LEAST_RATIO, 0, code)
    return tl.where(bits < _INF, code, 128)


@triton.jit
def _signed(bits, random, live, BLOCK: tl.constexpr):
    """Codes of fp32 values, by their bits without signs, and what their groups share."""
    upper = (bits + (random << 4)) >> 20
    base, below = _window(upper, live, 3, 14, 1, BLOCK)
    code = tl.minimum(tl.maximum(upper - _wide(base << 3, BLOCK), 0), 127)
    code = tl.where(bits == 0, 0, code)
    return tl.where(bits < _INF, code, 128), tl.where(below == 255, 0, base)


@triton.jit
def store_plane(
    codes, shared, i, values, random, mask, remaining, root,
    KIND: tl.constexpr, POSITIVE: tl.constexpr, UNDER_ROOT: tl.constexpr, MASKED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Store fp32 values in a plane, and give the root of what a POSITIVE one of 8 bits is decoded
    to. random: int32 of 16 bits an element, for planes of 8 bits and POSITIVE ones of bf16."""
    if KIND == _BF16:
        if POSITIVE:
            store_stochastic(codes, i, values, random, mask, MASKED)
        elif MASKED:
            tl.store(codes + i, round_bf16(values), mask=mask)
        else:
            tl.store(codes + i, round_bf16(values))
    elif KIND == _8BIT:
        bits = values.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        live = (bits > 0) & (bits < _INF)
        if MASKED:
            live = live & mask
        group = tl.arange(0, BLOCK // _GROUP)
        other = ((random & 0xFF) << 8) | (random >> 8)
        if POSITIVE:
            code, of_group, found = _positive(bits, random, live, BLOCK)
            out = code.to(tl.uint8)
            root = tl.sqrt_rn(found.to(tl.float32, bitcast=True))
        else:
            if UNDER_ROOT:
                code, of_group = _ratio(values, other, root), group
            else:
                code, of_group = _signed(bits, other, live, BLOCK)
            out = tl.where(values < 0.0, -code, code).to(tl.int8)
        if MASKED:
            tl.store(codes + i, out, mask=mask)
            if not UNDER_ROOT:
                tl.store(shared + group, of_group.to(tl.uint8), mask=group * _GROUP < remaining)
        else:
            tl.store(codes + i, out)
            if not UNDER_ROOT:
                tl.store(shared + group, of_group.to(tl.uint8))
    elif MASKED:
        tl.store(codes + i, values, mask=mask)
    else:
        tl.store(codes + i, values)
    return root


@triton.jit
def untied(master):
    """Masters in fp32 without ties: one half-way that would be rounded down loses its last bit."""
    bits = master.to(tl.int32, bitcast=True)
    return (bits - ((bits & 0x1FFFF) == 0x8000).to(tl.int32)).to(tl.float32, bitcast=True)
