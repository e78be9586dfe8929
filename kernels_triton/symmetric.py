"""Product of a bf16 matrix with its own transpose, of which the upper triangle is computed.

    A = X X^T      of X [r, c]: [r, r] fp32, r^2 c multiply-adds in place of 2 r^2 c

Products of bf16 values are exact in fp32, in which they are summed, in the order of columns. A tile
of A is one program's, so no bit depends on the device's number of cores, and what is below the
diagonal is a copy. Sums of a library's product have another order, so A has other bits than theirs.
Bytes: X is read r / TILE times, mostly from a cache, and A written once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import is_interpreted, on

TILE = 128  # rows and columns of A in one program: 128 registers of a thread hold the sums
AT_ONCE = 64  # columns of X that are multiplied at once
WARPS, STAGES = 8, 3
ALIGNED = 16  # elements and bytes, of which Triton knows that sizes and addresses are multiples
_EXACT = {"enable_fp_fusion": False}


@triton.jit
def _rows(x, rows, columns, r, c, row_stride, column_stride, INTERPRETED: tl.constexpr):
    """[n, k] of X from int16, 0 outside of it; in fp32 where no program multiplies bf16."""
    mask = (rows[:, None] < r) & (columns[None, :] < c)
    place = rows[:, None].to(tl.int64) * row_stride + columns[None, :].to(tl.int64) * column_stride
    bits = tl.load(x + place, mask=mask, other=0)
    if INTERPRETED:
        return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return bits.to(tl.bfloat16, bitcast=True)


@triton.jit
def gram_kernel(
    x,  # bf16 as int16, of strides of which one is 1
    out,  # fp32 [r, r]
    r,
    c,
    row_stride,
    column_stride,
    TILE: tl.constexpr,
    AT_ONCE: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Compute one tile of the upper triangle in one program, and write it on both sides."""
    first, second = tl.program_id(0), tl.program_id(1)
    if first <= second:
        i = first * TILE + tl.arange(0, TILE)
        j = second * TILE + tl.arange(0, TILE)
        sums = tl.zeros([TILE, TILE], tl.float32)
        for start in range(0, c, AT_ONCE):
            k = start + tl.arange(0, AT_ONCE)
            left = _rows(x, i, k, r, c, row_stride, column_stride, INTERPRETED)
            right = _rows(x, j, k, r, c, row_stride, column_stride, INTERPRETED)
            sums = tl.dot(left, tl.trans(right), sums)
        upper = (i[:, None] <= j[None, :]) & (j[None, :] < r)
        place = i[:, None].to(tl.int64) * r + j[None, :]
        tl.store(out + place, sums, mask=upper)
        # the same sums, also within a tile of the diagonal
        place = j[None, :].to(tl.int64) * r + i[:, None]
        tl.store(out + place, sums, mask=upper & (i[:, None] < j[None, :]))


def gram(x: Tensor) -> Tensor:
    """X X^T, fp32 [r, r], of a bf16 matrix [r, c], or of one's transpose; symmetric to the bit.

    By torch's product where a size is no multiple of 16: unaligned tiles spill registers.
    Raises ValueError for another dtype, and for what is no matrix.
    """
    if x.dtype is not torch.bfloat16 or x.dim() != 2:
        raise ValueError(
            f"x is {x.dtype} of shape {tuple(x.shape)}; expected a bfloat16 matrix [r, c]"
        )
    rows, columns = x.shape
    is_aligned = 1 in x.stride() and not any(n % ALIGNED for n in (*x.shape, max(x.stride())))
    if not (is_aligned and x.data_ptr() % ALIGNED == 0):
        wide = x.float()
        return wide @ wide.T
    out = torch.empty(rows, rows, dtype=torch.float32, device=x.device)
    tiles = triton.cdiv(rows, TILE)
    with on(x.device):
        gram_kernel[(tiles, tiles)](
            x.view(torch.int16), out, rows, columns, *x.stride(), TILE, AT_ONCE,
            is_interpreted(), num_warps=WARPS, num_stages=STAGES, **_EXACT,
        )  # fmt: skip
    return out
