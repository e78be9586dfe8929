"""Means of squares along rows and columns of matrices that are cut anywhere: sums that are exact,
and a variance of every element that two lines of numbers say (Shazeer & Stern 2018). Pure.

A parameter of more than two dimensions is a stack of matrices, of its last two.

[Note: exact] Squares are added as two numbers each, multiples of two powers of two that follow from
the largest magnitude. No sum of either is rounded, so order and cuts change no bit. What is left
out is 2^-102 of the square of that magnitude or less.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor

Stack = tuple[int, int, int]  # matrices, rows, columns
Box = tuple[slice, slice, slice]
# of values [n], to sums as `LineSums.values`; then the first element, the stack and both rounders
AddSquares: TypeAlias = Callable[[Tensor, Tensor, int, Stack, tuple[float, float]], None]


def has_lines(shape: Sequence[int]) -> bool:
    """Whether a parameter is a matrix, or a stack of such."""
    return len(shape) > 1 and math.prod(shape) > 0


def stack_of(shape: Sequence[int]) -> Stack:
    *stack, rows, columns = shape
    return math.prod(stack), rows, columns


def boxes(stack: Stack, first: int, numel: int) -> Iterator[tuple[slice, Box]]:
    """Boxes, at most five, of elements [first, first + numel) of a contiguous stack, each with its
    place in the run."""
    _, rows, columns = stack
    at, end = first, first + numel
    while at < end:
        matrix, inside = divmod(at, rows * columns)
        row, column = divmod(inside, columns)
        if column or end - at < columns:
            box = (1, 1, min(columns - column, end - at))
        elif row or end - at < rows * columns:
            box = (1, min(rows - row, (end - at) // columns), columns)
        else:
            box = ((end - at) // (rows * columns), rows, columns)
        begins = (matrix, row, column)
        here = slice(at - first, at - first + math.prod(box))
        yield here, tuple(slice(b, b + n) for b, n in zip(begins, box, strict=True))  # type: ignore[misc]
        at += math.prod(box)


class LineSums:
    """Sums of squares of some elements of a stack along its rows and its columns; [Note: exact].

    values: [2 * matrices * (rows + columns)] fp64, where the first elements were, to be added to
    that of others.
    """

    def __init__(self, stack: Stack, largest: float) -> None:
        """largest: at least half of the largest magnitude; it decides on bits."""
        self.stack = stack
        matrices, rows, columns = stack
        self.values = torch.zeros(2 * matrices * (rows + columns), dtype=torch.float64)
        self._is_begun = False
        most = max(rows, columns)
        # x + 3 * top has the last bit top * 2^-51, for |x| <= top; four times the sum of a line
        top = math.ldexp(1.0, math.frexp(most * largest * largest)[1] + 3)
        rest = math.ldexp(top, math.frexp(most)[1] - 51)
        self.rounders = (3.0 * top, 3.0 * rest)

    @property
    def _lines(self) -> tuple[Tensor, Tensor]:
        """Sums of lines, [2, matrices, rows] and [2, matrices, columns]."""
        matrices, rows, columns = self.stack
        of_rows, of_columns = self.values.split([2 * matrices * rows, 2 * matrices * columns])
        return of_rows.view(2, matrices, rows), of_columns.view(2, matrices, columns)

    def add(self, values: Tensor, first: int, by: AddSquares | None = None) -> None:
        """Add elements [first, first + n), [n] of any float type and place. by: what adds their
        squares to the sums, to the same bits; None: torch's operators."""
        if not self._is_begun:
            self._is_begun = True
            self.values = torch.zeros_like(self.values, device=values.device)
        if by is not None:
            by(values, self.values, first, self.stack, self.rounders)
            return
        of_rows, of_columns = self._lines
        squares = values.double().square()
        for here, (matrices, rows, columns) in boxes(self.stack, first, values.numel()):
            left = squares[here].view(*(s.stop - s.start for s in (matrices, rows, columns)))
            for level, rounder in enumerate(self.rounders):
                part = left.add(rounder).sub_(rounder)
                left = left - part
                of_rows[level, matrices, rows] += part.sum(2).to(of_rows.device)
                of_columns[level, matrices, columns] += part.sum(1).to(of_rows.device)

    def means(self) -> tuple[Tensor, Tensor]:
        """Means of squares: of every row [matrices, rows] and of every column [matrices,
        columns]."""
        _, rows, columns = self.stack
        of_rows, of_columns = self._lines
        return of_rows.sum(0) / columns, of_columns.sum(0) / rows


@dataclass(frozen=True, slots=True, eq=False)
class Factors:
    """Variances of the elements of a stack: those of their rows [matrices, rows], divided by the
    mean of these, times those of their columns [matrices, columns]."""

    stack: Stack
    rows: Tensor
    columns: Tensor
    _there: dict[torch.device, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def variance(self, first: int, numel: int, device: torch.device) -> Tensor:
        """Variances [numel] of elements from `first`; ones after the last."""
        if device not in self._there:
            self._there[device] = _sent(self.rows, device), _sent(self.columns, device)
        of_rows, of_columns = self._there[device]
        found = torch.empty(numel, dtype=of_rows.dtype, device=device)
        inside = min(numel, math.prod(self.stack) - first)  # a gap of zeros follows a parameter
        found[inside:].fill_(1.0)
        for here, (matrices, rows, columns) in boxes(self.stack, first, inside):
            row, column = of_rows[matrices, rows, None], of_columns[matrices, None, columns]
            shape = torch.broadcast_shapes(row.shape, column.shape)
            torch.mul(row, column, out=found[here].view(shape))
        return found


def _sent(values: Tensor, device: torch.device) -> Tensor:
    """Values of the host on a device; the host does not wait."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values
