"""Sums of squares along rows and columns of a stack of matrices, of a run of its elements.

    rows[l, m, i] += sum over j of part_l(x[m, i, j]^2),  columns[l, m, j] += sum over i of the same

part_0 is a square rounded to a multiple of a power of two, part_1 what is left, rounded to a lower
one: (y + r) - r in fp64, with r from `optim.rules.lines` ([Note: exact] there). No sum of either is
rounded, so neither tiles nor the order of atomic additions change a bit, and the sums are those of
`LineSums.add` by torch's operators. Bytes: x is read once; a program adds two numbers a line.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import on

ROWS, COLUMNS = 16, 128  # of one program
WARPS = 8
_EXACT = {"enable_fp_fusion": False}


@triton.jit(do_not_specialize=["first", "top", "rest"])
def line_kernel(
    values,  # [numel] of any float type
    sums,  # fp64 [2 * matrices * (rows + columns)]
    first,
    numel,
    matrices,
    rows,
    columns,
    top,  # bits of both rounders
    rest,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Add the squares of one tile to the sums of its lines."""
    begin = first // columns + tl.program_id(0) * ROWS
    row = (begin + tl.arange(0, ROWS)).to(tl.int64)  # of all matrices
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    place = row[:, None] * columns + column[None, :] - first
    inside = (column[None, :] < columns) & (place >= 0) & (place < numel)
    x = tl.load(values + place, mask=inside, other=0.0).to(tl.float64)
    left = x * x
    last = tl.minimum((begin + ROWS - 1) // rows, matrices - 1)
    for level in tl.static_range(2):
        rounder = top.to(tl.int64).to(tl.float64, bitcast=True)
        if level == 1:
            rounder = rest.to(tl.int64).to(tl.float64, bitcast=True)
        part = (left + rounder) - rounder
        left -= part
        of_rows = sums + level * matrices * rows
        of_columns = sums + 2 * matrices * rows + level * matrices * columns
        tl.atomic_add(of_rows + row, tl.sum(part, 1), mask=row < matrices * rows)
        for matrix in range(begin // rows, last + 1):
            mine = tl.where((row // rows == matrix)[:, None], part, 0.0)
            found = tl.sum(mine, 0)
            tl.atomic_add(of_columns + matrix * columns + column, found, mask=column < columns)


def add_line_squares(
    values: Tensor,
    sums: Tensor,
    first: int,
    stack: Sequence[int],
    rounders: Sequence[float],
) -> None:
    """Add the squares of elements [first, first + n) of a contiguous stack to sums of its lines.

    values: [n]. sums: fp64 [2 * matrices * (rows + columns)], rows first. stack: matrices, rows and
    columns. rounders: of both levels. Raises ValueError for other sums, or a run outside of the
    stack.
    """
    matrices, rows, columns = stack
    if sums.dtype is not torch.float64 or sums.numel() != 2 * matrices * (rows + columns):
        raise ValueError(
            f"sums are {sums.dtype} [{sums.numel()}]; expected float64 "
            f"[{2 * matrices * (rows + columns)}]"
        )
    if first < 0 or first + values.numel() > matrices * rows * columns:
        raise ValueError(
            f"elements {first} to {first + values.numel()}; expected some of "
            f"{matrices * rows * columns}"
        )
    if not values.numel():
        return
    num_rows = (first + values.numel() - 1) // columns - first // columns + 1
    grid = (triton.cdiv(num_rows, ROWS), triton.cdiv(columns, COLUMNS))
    top, rest = (struct.unpack("<q", struct.pack("<d", rounder))[0] for rounder in rounders)
    with on(values.device):
        line_kernel[grid](
            values.contiguous(), sums, first, values.numel(), matrices, rows, columns, top, rest,
            ROWS, COLUMNS, num_warps=WARPS, **_EXACT,
        )  # fmt: skip
