"""Parameters as float8 (e4m3fn), one scale each: their magnitudes, and the way there and back.

    scale = max(largest |x| / 448, 2^-126)      sent = e4m3fn(x / scale)      back = sent * scale

Bytes an element: 2 or 4 read for magnitudes, as much read and 1 written to pack, 1 read and 2 or 4
written to unpack. e4m3fn is made of integers, since compilers have it from sm_89 on alone: rounded
to nearest, ties to even, as torch does; what is beyond 464 and NaN are NaN.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import is_interpreted, on
from .rounding import load, store
from .tiles import TRITON_DTYPES, tile_table

FIRST, NUMEL, PARAM = range(3)  # columns of the table of runs
T_FIRST, T_NUMEL, T_PARAM = tl.constexpr(FIRST), tl.constexpr(NUMEL), tl.constexpr(PARAM)
T_COLUMNS = tl.constexpr(3)
FLOAT8_BLOCK = 2048  # 16 elements a thread: 128 bits of float8
WARPS = 4
_EXACT = {"enable_fp_fusion": False}


@triton.jit
def to_float8(x):
    """Bits of e4m3fn, uint8, of fp32."""
    bits = x.to(tl.int32, bitcast=True)
    sign, magnitude = (bits >> 24) & 0x80, bits & 0x7FFFFFFF
    # below 2^-6: an fp32 sum with 2^14 rounds to multiples of 2^-9
    small = magnitude.to(tl.float32, bitcast=True) + 16384.0
    low = small.to(tl.int32, bitcast=True) - 0x46800000
    high = (magnitude - (120 << 23) + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20
    rounded = tl.where(magnitude < (121 << 23), low, high)
    rounded = tl.where(magnitude >= 0x43F00000, 0x7F, rounded)  # 480, Inf, NaN
    return (rounded | sign).to(tl.uint8)


@triton.jit
def from_float8(byte):
    """fp32 of bits of e4m3fn."""
    magnitude = byte.to(tl.int32) & 0x7F
    normal = ((magnitude << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    value = tl.where(magnitude < 8, magnitude.to(tl.float32) * 0.001953125, normal)
    value = tl.where(magnitude == 0x7F, float("nan"), value)
    return tl.where(byte.to(tl.int32) >= 0x80, -value, value)


@triton.jit
def _scale_of(most, param):
    scale = tl.div_rn(tl.load(most + param), 448.0)
    return tl.where(scale < 1.1754943508222875e-38, 1.1754943508222875e-38, scale)  # NaN stays


@triton.jit
def _tile_of(tiles, runs, BLOCK: tl.constexpr):
    """(first element, how many are left, parameter) of this program's tile."""
    program = tl.program_id(0).to(tl.int64)
    row = runs + tl.load(tiles + 2 * program).to(tl.int64) * T_COLUMNS
    start = tl.load(tiles + 2 * program + 1).to(tl.int64) * BLOCK
    return tl.load(row + T_FIRST) + start, tl.load(row + T_NUMEL) - start, tl.load(row + T_PARAM)


@triton.jit
def largest_kernel(
    values,  # bf16 as int16
    most,  # int32 [P]: bits of fp32, which are ordered as magnitudes are; NaN is above all
    tiles,  # int32 [t, 2]
    runs,  # int64 [n, 3]
    DTYPE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    first, left, param = _tile_of(tiles, runs, BLOCK)
    i = tl.arange(0, BLOCK)
    if (left >= BLOCK) & ((first & 15) == 0):
        x = load(tl.multiple_of(values + first, 16), i, i < left, DTYPE, False)
    else:
        x = load(values + first, i, i < left, DTYPE, True)
    found = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=0)
    tl.atomic_max(most + param, found)


@triton.jit
def pack_kernel(
    values,  # bf16 as int16
    most,  # fp32 [P]
    sent,  # uint8, a place for each of `values`
    tiles,
    runs,
    DTYPE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    first, left, param = _tile_of(tiles, runs, BLOCK)
    scale = _scale_of(most, param)
    i = tl.arange(0, BLOCK)
    if (left >= BLOCK) & ((first & 15) == 0):
        x = load(tl.multiple_of(values + first, 16), i, i < left, DTYPE, False)
        tl.store(tl.multiple_of(sent + first, 16) + i, to_float8(tl.div_rn(x, scale)))
    else:
        x = load(values + first, i, i < left, DTYPE, True)
        tl.store(sent + first + i, to_float8(tl.div_rn(x, scale)), mask=i < left)


@triton.jit
def unpack_kernel(
    sent,  # uint8
    most,  # fp32 [P]
    values,  # bf16 as int16, a place for each of `sent`
    tiles,
    runs,
    DTYPE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    first, left, param = _tile_of(tiles, runs, BLOCK)
    is_gap = param < 0
    scale = _scale_of(most, tl.where(is_gap, 0, param))
    i = tl.arange(0, BLOCK)
    if (left >= BLOCK) & ((first & 15) == 0):
        x = from_float8(tl.load(tl.multiple_of(sent + first, 16) + i)) * scale
        x = tl.where(is_gap, 0.0, x)
        store(tl.multiple_of(values + first, 16), i, x, i < left, DTYPE, False)
    else:
        x = from_float8(tl.load(sent + first + i, mask=i < left, other=0)) * scale
        x = tl.where(is_gap, 0.0, x)
        store(values + first, i, x, i < left, DTYPE, True)


class Float8Runs:
    """Table of the runs of parameters in one stretch of elements, on its device for good."""

    def __init__(self, runs: Sequence[tuple[int, int, int]], device: torch.device) -> None:
        """runs: (first element, how many, parameter); of no parameter, if that is negative: such a
        gap is 0 when it comes back."""
        numels = [numel for _, numel, _ in runs]
        largest = max(numels, default=1)
        self._block = FLOAT8_BLOCK
        if is_interpreted():
            self._block = min(1 << 16, 1 << max(6, (largest - 1).bit_length()))
        self._device = device
        self._runs = torch.tensor(runs, dtype=torch.int64).reshape(-1, 3).to(device)
        self._tiles = tile_table(numels, self._block, device)

    def largest(self, values: Tensor, most: Tensor) -> None:
        """Raise `most`, fp32 [P] of what is not negative, to the largest |x| of every run."""
        self._launch(largest_kernel, values, _bits(values), most.view(torch.int32))

    def pack(self, values: Tensor, most: Tensor, sent: Tensor) -> None:
        """Fill `sent`, uint8, from `values`."""
        self._launch(pack_kernel, values, _bits(values), most, sent)

    def unpack(self, sent: Tensor, most: Tensor, values: Tensor) -> None:
        """Fill `values` from `sent`, uint8; gaps with 0."""
        self._launch(unpack_kernel, values, sent, most, _bits(values))

    def _launch(self, kernel: object, typed: Tensor, *args: Tensor) -> None:
        if not len(self._tiles):
            return
        with on(self._device):
            kernel[(len(self._tiles),)](  # type: ignore[index]
                *args, self._tiles, self._runs, TRITON_DTYPES[typed.dtype], self._block,
                num_warps=WARPS, **_EXACT,
            )  # fmt: skip


def _bits(values: Tensor) -> Tensor:
    return values.view(torch.int16) if values.dtype is torch.bfloat16 else values
