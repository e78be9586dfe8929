"""Squares of weights and directions by kernels, against the rule's own function by operators.

Both compute in fp32 and sum exact squares in fp64, in another order. A square root of torch's in
fp32 on a CPU is an ulp off in places, where a kernel's is correctly rounded.
"""

import math

import pytest
import torch

from kernels_triton import ops
from kernels_triton.launch import is_interpreted
from kernels_triton.update.frame import NUM_COEFFICIENTS
from optim import HybridLamb
from optim.rules.split_master import remainder_of, tie_sign
from optim.state.memory import memory_of
from optim.state.pieces import Piece
from optim.step.direction_norms import DirectionNorms
from optim.update.launch_tables import LaunchTables, segments_of

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NUMELS = [1, 1023, 1024, 64, 70_001]
SLAB = sum(-(-n // 64) * 64 for n in NUMELS)
STEP, FACTOR, LIMIT = 3, 0.5, 1.5

pytestmark = [] if is_interpreted() else [pytest.mark.gpu, pytest.mark.values]


def rule_and_hyper(**options):
    optimizer = HybridLamb([torch.nn.Parameter(torch.zeros(1))], weight_decay=0.1, **options)
    rule = optimizer.rule_for(optimizer.param_groups)
    return rule, rule.hyper(optimizer.param_groups[0])


def state(form, dtype):
    """Slabs, pieces, and weights in fp32, of parameters one after the other; NaN between them."""
    torch.manual_seed(0)
    slabs = [torch.full((SLAB,), math.nan, device=DEVICE) for _ in range(3)]
    pieces, weights, at = [], [], 0
    low = torch.zeros(SLAB, dtype=torch.int16, device=DEVICE)
    for i, n in enumerate(NUMELS):
        here = slice(at, at + n)
        weight = torch.randn(n, device=DEVICE)
        ties = weight[::7].view(torch.int32)  # half-way between two of bf16, and rounded down
        weight[::7] = (ties & ~0x1FFFF | 0x8000).view(torch.float32)
        slabs[1][here] = torch.randn(n, device=DEVICE)
        slabs[2][here] = torch.rand(n, device=DEVICE)
        shown = weight.bfloat16() if form != "none" else weight.to(dtype)
        master = None
        if form == "none":
            weight = shown.float()
        elif form == "whole":
            slabs[0][here] = weight
            master = slabs[0][here]
        else:
            low[here] = remainder_of(weight)
            keeper = slabs[2][here].view(torch.int32)
            keeper |= tie_sign(weight)
            master = low[here]
        grad = torch.randn(n, device=DEVICE).to(dtype)
        planes = slabs[1][here], slabs[2][here]
        pieces.append(Piece(shown, grad, master, planes, None, 0, i))
        weights.append(weight)
        at += -(-n // 64) * 64
    first = {"none": [], "whole": [slabs[0]], "split": [low]}[form]
    return [*first, *slabs[1:]], pieces, weights


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", ["none", "whole", "split"])
def test_squares_are_those_of_the_direction_by_operators(form, dtype):
    rule, hyper = rule_and_hyper(bias_correction=True)
    slabs, pieces, weights = state(form, dtype)
    memory = memory_of(DEVICE)
    norms = DirectionNorms(rule, memory, None)
    keyed = segments_of(pieces, slabs[0], memory)
    launch = norms.launch_of("test", pieces, dict(enumerate(slabs)))
    assert isinstance(launch.tables, LaunchTables) and launch.tables.keyed == keyed
    rows = torch.zeros(len(NUMELS), NUM_COEFFICIENTS)
    values = torch.tensor(rule.values(hyper, STEP))
    rows[:, : len(values)] = values
    tables = launch.tables
    got = ops.direction_squares(
        norms.kernel, tables.tiles, tables.segments, launch.ends, tables.ranges, rows.to(DEVICE),
        slabs, FACTOR, LIMIT, tables.launch.block, tables.launch.num_warps,
    ).cpu()  # fmt: skip
    for (_, segment), squares in zip(tables.keyed, got, strict=True):
        piece, weight = pieces[segment.counter], weights[segment.counter]
        grad = piece.grad.float().mul(FACTOR).clamp(-LIMIT, LIMIT)
        planes = [piece.planes[0], piece.planes[1].abs()]
        direction = rule.moved_along(weight, grad, planes, hyper, STEP)
        want = [float(one.double().square().sum()) for one in (weight, direction)]
        assert float(squares[0]) == pytest.approx(want[0], rel=1e-13)
        # torch's operators fuse products with sums on some CPUs: then four of them round otherwise
        assert float(squares[1]) == pytest.approx(want[1], rel=2.0**-20)


def test_a_plane_of_another_dtype_is_refused():
    rule, _ = rule_and_hyper()
    slabs, pieces, _ = state("none", torch.float32)
    norms = DirectionNorms(rule, memory_of(DEVICE), None)
    launch = norms.launch_of("test", pieces, dict(enumerate(slabs)))
    with pytest.raises(ValueError, match=r"planes\[1\] has dtype torch.float64"):
        ops.direction_squares(
            norms.kernel, launch.tables.tiles, launch.tables.segments, launch.ends,
            launch.tables.ranges, torch.zeros(len(NUMELS), NUM_COEFFICIENTS, device=DEVICE),
            [slabs[0], slabs[1].double()], 1.0, math.inf, 1024, 4,
        )  # fmt: skip


def test_elements_behind_a_parameter_count_for_nothing():
    """They are read as zeros, of which a direction without eps is none: 0 / 0."""
    rule, hyper = rule_and_hyper(eps=0.0)
    slabs, pieces, _ = state("none", torch.float32)
    norms = DirectionNorms(rule, memory_of(DEVICE), None)
    launch = norms.launch_of("test", pieces, dict(enumerate(slabs)))
    rows = torch.zeros(len(NUMELS), NUM_COEFFICIENTS)
    values = torch.tensor(rule.values(hyper, STEP))
    rows[:, : len(values)] = values
    found = ops.direction_squares(
        norms.kernel, launch.tables.tiles, launch.tables.segments, launch.ends,
        launch.tables.ranges, rows.to(DEVICE), slabs, FACTOR, LIMIT, launch.tables.launch.block, 4,
    )  # fmt: skip
    assert bool(found.isfinite().all())
