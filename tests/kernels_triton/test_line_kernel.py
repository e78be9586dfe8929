"""Squares along rows and columns by a kernel: the bits of torch's operators, cut anywhere."""

import math
from itertools import pairwise

import pytest
import torch

from gemini.optim.rules.lines import LineSums
from kernels_triton.launch import is_interpreted
from kernels_triton.lines import COLUMNS, ROWS, add_line_squares

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

pytestmark = [] if is_interpreted() else [pytest.mark.gpu, pytest.mark.values]

STACKS = [
    (1, 1, 1),
    (1, ROWS, COLUMNS),
    (1, ROWS + 3, COLUMNS + 5),
    (1, 3, 2 * COLUMNS + 1),
    (1, 3 * ROWS + 1, 7),
    (4, 5, 9),  # several matrices in a tile
    (2, ROWS - 1, COLUMNS),
]


def drawn(stack, dtype):
    generator = torch.Generator().manual_seed(math.prod(stack))
    wide = torch.randn(stack, generator=generator).mul(
        torch.exp(4 * torch.randn(stack, generator=generator))
    )
    return wide.to(dtype).flatten()


def cuts_of(numel):
    """Runs that are cut anywhere: all of it, two and many."""
    middle = numel * 3 // 7
    edges = sorted({*range(0, numel, max(1, numel // 5)), middle, numel})
    return [[0, numel], [0, middle, numel], edges]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("stack", STACKS)
def test_sums_are_those_of_operators_to_the_bit(stack, dtype):
    values = drawn(stack, dtype)
    largest = float(values.abs().max())
    want = LineSums(stack, largest)
    want.add(values, 0)
    assert want.values.count_nonzero() >= 2
    there = values.to(DEVICE)
    for edges in cuts_of(values.numel()):
        own = LineSums(stack, largest)
        sums = torch.zeros_like(own.values, device=DEVICE)
        for begin, end in pairwise(edges):
            add_line_squares(there[begin:end], sums, begin, stack, own.rounders)
        assert torch.equal(sums.cpu(), want.values), edges


def test_sums_are_added_to_what_is_there():
    stack = (1, 4, 6)
    values = drawn(stack, torch.float32)
    own = LineSums(stack, float(values.abs().max()))
    sums = torch.zeros_like(own.values, device=DEVICE)
    for _ in range(2):
        add_line_squares(values.to(DEVICE), sums, 0, stack, own.rounders)
    own.add(values, 0)
    assert torch.equal(sums.cpu(), 2 * own.values)


def test_a_run_of_nothing_and_one_outside_of_its_stack():
    sums = torch.ones(2 * (2 + 3), dtype=torch.float64, device=DEVICE)
    add_line_squares(torch.empty(0, device=DEVICE), sums, 4, (1, 2, 3), (1.0, 1.0))
    assert sums.eq(1).all()
    with pytest.raises(ValueError, match="expected some of 6"):
        add_line_squares(torch.ones(3, device=DEVICE), sums, 4, (1, 2, 3), (1.0, 1.0))
    with pytest.raises(ValueError, match=r"expected float64 \[14\]"):
        add_line_squares(torch.ones(3, device=DEVICE), sums, 0, (1, 4, 3), (1.0, 1.0))


def test_a_run_is_one_launch():
    stack, calls = (1, 3, 4), []

    def counted(values, sums, first, *others):
        calls.append(first)
        add_line_squares(values, sums, first, *others)

    values = drawn(stack, torch.float32).to(DEVICE)
    found, want = LineSums(stack, 9.0), LineSums(stack, 9.0)
    for part, begin in ((values[:5], 0), (values[5:], 5)):
        found.add(part, begin, counted)
    want.add(values.cpu(), 0)
    assert calls == [0, 5] and torch.equal(found.values.cpu(), want.values)
