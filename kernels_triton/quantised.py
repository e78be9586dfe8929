"""State planes of one or two bytes, decoded and encoded in a kernel's tile.

The formulas, and why values are rounded at random, are in `optim.rules.quantised`; the bits are the
same. Bytes per element of both moments of Adam, read and written: 4 of bf16, 2.125 of 8 bits with
an exponent for 8 elements.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl

from gemini.kernels_triton.rounding import round_bf16, store_stochastic

_GROUP = tl.constexpr(8)  # elements that share an exponent
# see `optim.rules.quantised`
NOISE_KEY = tl.constexpr(1 << 32)
_INF, _NAN = tl.constexpr(0x7F800000), tl.constexpr(0x7FC00000)
_RATIO_BASE, _LEAST_RATIO = tl.constexpr(1968), tl.constexpr(1969 << 19)


@dataclass(frozen=True, slots=True)
class Codec:
    """How a kernel reads and writes planes of a kind.

    load: of (codes, shared, i, mask, root, POSITIVE, UNDER_ROOT, MASKED), elements of a plane as
        fp32, 0 where masked. root: fp32, of the plane that an UNDER_ROOT one is under.
    store: of (codes, shared, i, values, random, mask, remaining, root, POSITIVE, UNDER_ROOT,
        MASKED, BLOCK), fp32 values to a plane. Returns the root of what a POSITIVE one is decoded
        to, if others are under it. random: int32 of 16 bits an element.
    """

    load: Any  # @triton.jit
    store: Any  # @triton.jit
    is_quantised: bool = True  # else masters keep their ties in the sign of a plane
    of_code: int = 1  # elements of one value of `codes`
    of_shared: int = 8


@triton.jit
def _load(plane, i, mask, MASKED: tl.constexpr):
    if MASKED:
        found = tl.load(plane + i, mask=mask, other=0)
    else:
        found = tl.load(plane + i)
    return found


@triton.jit
def _load_fp32(
    codes, shared, i, mask, root,
    POSITIVE: tl.constexpr, UNDER_ROOT: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    if MASKED:
        found = tl.load(codes + i, mask=mask, other=0)
    else:
        found = tl.load(codes + i)
    return found


@triton.jit
def _load_bf16(
    codes, shared, i, mask, root,
    POSITIVE: tl.constexpr, UNDER_ROOT: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    return (_load(codes, i, mask, MASKED).to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def _load_8bit(
    codes, shared, i, mask, root,
    POSITIVE: tl.constexpr, UNDER_ROOT: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    code = _load(codes, i, mask, MASKED).to(tl.int32)
    size = tl.abs(code)
    if UNDER_ROOT:
        ratio = ((size + _RATIO_BASE) << 19).to(tl.float32, bitcast=True) - 0.0625
        values = tl.where(code == 0, 0.0, tl.where(code < 0, -ratio, ratio) * root)
        bits = tl.where(code == -128, _NAN, values.to(tl.int32, bitcast=True))
    else:
        of_group = _load(shared, i // _GROUP, mask, MASKED).to(tl.int32)
        if POSITIVE:
            bits = _positive_bits(code, of_group)
        else:
            bits = tl.where(code == 0, 0, (size + (of_group << 3)) << 20)
            bits = tl.where(code == -128, _NAN, bits)
            value = bits.to(tl.float32, bitcast=True)
            bits = tl.where(code < 0, -value, value).to(tl.int32, bitcast=True)
    return bits.to(tl.float32, bitcast=True)


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
    """Codes of fp32 values that never are negative, by their bits, and what their groups share."""
    fine, coarse = (bits + (random << 4)) >> 20, (bits + (random << 5)) >> 21
    fine_base, below = _window(fine, live, 3, 30, 2, BLOCK)
    coarse_base, _ = _window(coarse, live, 2, 62, 2, BLOCK)
    is_fine = below > fine_base
    kept = tl.where(is_fine, 3, 2)
    base = tl.where(is_fine, fine_base, coarse_base)
    upper = tl.where(_wide(kept, BLOCK) == 3, fine, coarse)
    code = tl.minimum(tl.maximum(upper - _wide(base << kept, BLOCK), 1), 253)
    code = tl.where(bits == 0, 0, code)
    code = tl.where(bits < _INF, code, tl.where(bits == _INF, 255, 254))
    return code, tl.where(below == 255, 0, (base >> 1) + ((kept - 2) << 7))


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
def _store(plane, i, values, mask, MASKED: tl.constexpr):
    if MASKED:
        tl.store(plane + i, values, mask=mask)
    else:
        tl.store(plane + i, values)


@triton.jit
def _store_fp32(
    codes, shared, i, values, random, mask, remaining, root,
    POSITIVE: tl.constexpr, UNDER_ROOT: tl.constexpr, MASKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    if MASKED:
        tl.store(codes + i, values, mask=mask)
    else:
        tl.store(codes + i, values)
    return root


@triton.jit
def _store_bf16(
    codes, shared, i, values, random, mask, remaining, root,
    POSITIVE: tl.constexpr, UNDER_ROOT: tl.constexpr, MASKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    if POSITIVE:
        store_stochastic(codes, i, values, random, mask, MASKED)
    else:
        _store(codes, i, round_bf16(values), mask, MASKED)
    return root


@triton.jit
def _store_8bit(
    codes, shared, i, values, random, mask, remaining, root,
    POSITIVE: tl.constexpr, UNDER_ROOT: tl.constexpr, MASKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    bits = values.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    live = (bits > 0) & (bits < _INF)
    if MASKED:
        live = live & mask
    group = tl.arange(0, BLOCK // _GROUP)
    other = ((random & 0xFF) << 8) | (random >> 8)
    if POSITIVE:
        code, of_group = _positive(bits, random, live, BLOCK)
        out = code.to(tl.uint8)
        found = _positive_bits(code, _wide(of_group, BLOCK))
        root = tl.sqrt_rn(found.to(tl.float32, bitcast=True))
    else:
        if UNDER_ROOT:
            code, of_group = _ratio(values, other, root), group
        else:
            code, of_group = _signed(bits, other, live, BLOCK)
        out = tl.where(values < 0.0, -code, code).to(tl.int8)
    _store(codes, i, out, mask, MASKED)
    if not UNDER_ROOT:
        _store(shared, group, of_group.to(tl.uint8), group * _GROUP < remaining, MASKED)
    return root


CODECS = {
    "fp32": Codec(_load_fp32, _store_fp32, is_quantised=False),
    "bf16": Codec(_load_bf16, _store_bf16),
    "8bit": Codec(_load_8bit, _store_8bit),
}


@triton.jit
def untied(master):
    """Masters in fp32 without ties: one half-way that would be rounded down loses its last bit."""
    bits = master.to(tl.int32, bitcast=True)
    return (bits - ((bits & 0x1FFFF) == 0x8000).to(tl.int32)).to(tl.float32, bitcast=True)
