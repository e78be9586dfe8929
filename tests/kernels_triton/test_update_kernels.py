"""Update kernels against their formulas; in the interpreter where there is no GPU.

Bit-equal to the formula: the kernels do the same fp32 operations in the same order, with no
contraction and correctly rounded square root and division. The reference is computed in numpy,
whose fp32 square root is correctly rounded (torch's on the CPU is not).
"""

import numpy as np
import pytest
import torch

from kernels_triton import ops
from kernels_triton.control_fields import LOSS_SCALE, NUM_CONTROL
from kernels_triton.launch import choose_launch, is_interpreted
from kernels_triton.tiles import SegmentRow, segment_table, tile_table
from kernels_triton.update.frame import NUM_COEFFICIENTS, NUM_HYPER
from optim.rules.formulas import adam_coefficients
from tests.support.pairs import pairs

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LARGE = 4096  # in the interpreter a tile
NUMELS = [1, 3, 17, 0, 1023, 1025, 64, LARGE, LARGE + 1, 10_003 if is_interpreted() else 100_003]
LR, BETAS, EPS, DECAY = 1e-2, (0.9, 0.999), 1e-8, 0.1

pytestmark = [] if is_interpreted() else [pytest.mark.gpu, pytest.mark.values]


class Slabs:
    """Segments of NUMELS elements in slabs, each at a multiple of 64, NaN in between."""

    def __init__(self, param_dtype, grad_dtype, num_planes, has_master, unaligned=False):
        self.offsets, end = [], 0
        for numel in NUMELS:
            self.offsets.append(end)
            end += -(-numel // 64) * 64
        generator = torch.Generator().manual_seed(0)
        shift = 1 if unaligned else 0

        def slab(dtype, scale=1.0, positive=False):
            values = torch.full((end + shift,), float("nan"))
            for offset, numel in zip(self.offsets, NUMELS, strict=True):
                some = torch.randn(numel, generator=generator) * scale
                values[offset + shift : offset + shift + numel] = some.abs() if positive else some
            return values.to(dtype).to(DEVICE)[shift:]

        master = slab(torch.float32)
        planes = [(0.1, False), (1e-3, True), (1e-3, True)][:num_planes]
        self.planes = [slab(torch.float32, *plane) for plane in planes]
        self.master = master if has_master else None
        self.param = (
            master.to(param_dtype) if has_master or param_dtype != torch.float32 else master
        )
        if unaligned:  # the conversion made a fresh, aligned tensor
            param = torch.empty(end + 1, dtype=param_dtype, device=DEVICE)[1:]
            self.param = param.copy_(self.param)
        self.grad = slab(grad_dtype)
        self.segments = [
            SegmentRow(
                self.param.data_ptr() + offset * self.param.element_size(),
                self.grad.data_ptr() + offset * self.grad.element_size(),
                offset,
                numel,
                counter,
            )
            for counter, (offset, numel) in enumerate(zip(self.offsets, NUMELS, strict=True))
        ]

    def all_planes(self):
        return ([self.master] if self.master is not None else []) + self.planes


def run(slabs, rule, hyper_rows, groups=None, steps=0, present=None, loss_scale=1.0):
    n = len(NUMELS)
    hyper = torch.zeros(len(hyper_rows), NUM_HYPER, dtype=torch.float64)
    for i, row in enumerate(hyper_rows):
        hyper[i, : len(row)] = torch.tensor(row, dtype=torch.float64)
    groups = torch.tensor(groups or [0] * n)
    steps = torch.tensor(steps if isinstance(steps, list) else [steps] * n)
    present = torch.tensor([1.0] * n if present is None else present, dtype=torch.float64)
    coefficients = torch.zeros(n, NUM_COEFFICIENTS)
    control = torch.zeros(NUM_CONTROL, dtype=torch.float64)
    control[LOSS_SCALE] = loss_scale
    groups, hyper, steps, present, coefficients, control = (
        t.to(DEVICE) for t in (groups, hyper, steps, present, coefficients, control)
    )
    ops.prologue(rule, groups, hyper, steps, present, coefficients, control, [], False)
    launch = choose_launch(28, is_interpreted(), LARGE)
    tables = (
        tile_table(NUMELS, launch.block, DEVICE),
        segment_table(slabs.segments, DEVICE),
    )
    ops.update(
        rule, *tables, coefficients, control, slabs.all_planes(), [], [],
        slabs.param.dtype, slabs.grad.dtype, launch.block, launch.num_warps,
    )  # fmt: skip
    return steps.tolist()


def numpy_adam(param, grad, m, v, c):
    """`formulas.adam` in numpy fp32."""
    w1, beta2, w2, step_size, inv_sqrt_bc2, eps, decay, l2 = (np.float32(x) for x in c[:8])
    grad = grad + l2 * param
    param = param * decay
    m = m + w1 * (grad - m)
    v = v * beta2 + w2 * grad * grad
    return param - step_size * (m / (np.sqrt(v) * inv_sqrt_bc2 + eps)), m, v


DTYPES = [
    (torch.float32, torch.float32, False),
    (torch.bfloat16, torch.bfloat16, True),
    (torch.float16, torch.float16, True),
    (torch.bfloat16, torch.float32, True),
    (torch.bfloat16, torch.bfloat16, False),
]


@pytest.mark.parametrize(
    ("dtypes", "adamw_mode", "unaligned"), pairs(DTYPES, [True, False], [False, True])
)
def test_adam_kernel_gives_the_bits_of_the_formula(dtypes, adamw_mode, unaligned):
    param_dtype, grad_dtype, has_master = dtypes
    slabs = Slabs(param_dtype, grad_dtype, 2, has_master, unaligned)
    start = slabs.master.clone() if has_master else slabs.param.float().clone()
    old = [plane.clone() for plane in slabs.planes]
    row = (LR, *BETAS, EPS, DECAY, float(adamw_mode), 1.0)
    run(slabs, "adam", [row], steps=4, loss_scale=4.0)
    coefficients = adam_coefficients(LR, BETAS, EPS, DECAY, adamw_mode, True, 5)
    for offset, numel in zip(slabs.offsets, NUMELS, strict=True):
        s = slice(offset, offset + numel)
        want = numpy_adam(
            start[s].cpu().numpy(), slabs.grad[s].float().cpu().numpy() * np.float32(0.25),
            old[0][s].cpu().numpy(), old[1][s].cpu().numpy(), coefficients,
        )  # fmt: skip
        want = [torch.from_numpy(w) for w in want]
        if has_master:
            assert torch.equal(slabs.master[s].cpu(), want[0])
        assert torch.equal(slabs.param[s].cpu(), want[0].to(param_dtype))
        assert torch.equal(slabs.planes[0][s].cpu(), want[1])
        assert torch.equal(slabs.planes[1][s].cpu(), want[2])


def numpy_amsgrad(param, grad, m, v, largest, c):
    """`formulas.amsgrad` in numpy fp32."""
    w1, beta2, w2, step_size, inv_sqrt_bc2, eps, decay, l2, sign, takes = map(np.float32, c)
    grad = sign * grad + l2 * param
    m = m + w1 * (grad - m)
    v = v * beta2 + w2 * grad * grad
    largest = np.maximum(largest, v) if takes else largest
    root = np.sqrt(largest if takes else v)
    return param * decay - step_size * (m / (root * inv_sqrt_bc2 + eps)), m, v, largest


@pytest.mark.parametrize(("param_dtype", "grad_dtype", "has_master"), DTYPES[:2])
@pytest.mark.parametrize("takes_maximum", [True, False])
@pytest.mark.parametrize("maximize", [True, False])
def test_amsgrad_kernel_gives_the_bits_of_the_formula(
    param_dtype, grad_dtype, has_master, takes_maximum, maximize
):
    slabs = Slabs(param_dtype, grad_dtype, 3, has_master)
    start = slabs.master.clone() if has_master else slabs.param.float().clone()
    old = [plane.clone() for plane in slabs.planes]
    flags = (0.0, 1.0, float(maximize), float(takes_maximum))
    run(slabs, "amsgrad", [(LR, *BETAS, EPS, DECAY, *flags)], steps=4)
    coefficients = adam_coefficients(
        LR, BETAS, EPS, DECAY, False, True, 5, amsgrad=takes_maximum, maximize=maximize
    )
    for offset, numel in zip(slabs.offsets, NUMELS, strict=True):
        s = slice(offset, offset + numel)
        want = numpy_amsgrad(
            start[s].cpu().numpy(), slabs.grad[s].float().cpu().numpy(),
            *(plane[s].cpu().numpy() for plane in old), coefficients,
        )  # fmt: skip
        updated = [slabs.master if has_master else slabs.param, *slabs.planes]
        for got, exact in zip(updated, want, strict=True):
            assert torch.equal(got[s].cpu(), torch.from_numpy(exact))


def test_a_plain_adam_that_maximizes_is_one_with_negated_gradients():
    rows = [(LR, *BETAS, EPS, DECAY, 0.0, 1.0, maximize) for maximize in (1.0, 0.0)]
    slabs = [Slabs(torch.float32, torch.float32, 2, False) for _ in rows]
    slabs[1].grad.neg_()
    for one, row in zip(slabs, rows, strict=True):
        run(one, "adam", [row])
    pairs = zip(*([one.param, *one.planes] for one in slabs), strict=True)
    for maximized, negated in pairs:
        assert torch.equal(maximized.nan_to_num(), negated.nan_to_num())


def numpy_sgd(p, g, b, row, step):
    """`formulas.sgd` in numpy fp32; `row` as the kernel gets it."""
    lr, momentum, weight_decay, dampening, nesterov, maximize = row
    f = np.float32
    g = f(-1 if maximize else 1) * g + f(weight_decay) * p
    if momentum == 0:
        return p - f(lr) * g, b
    b = f(momentum) * b + f(1 if step == 1 else 1 - dampening) * g
    return p - f(lr) * (g + f(momentum) * b if nesterov else b), b


@pytest.mark.parametrize("steps", [0, 4])
@pytest.mark.parametrize(
    "row",
    [
        (0.1, 0.9, 0.01, 0.5, 0.0, 0.0),
        (0.1, 0.9, 0.01, 0.0, 1.0, 0.0),
        (0.1, 0.9, 0.01, 0.25, 0.0, 1.0),
        (0.1, 0.0, 0.01, 0.0, 0.0, 1.0),
    ],
    ids=["dampening", "nesterov", "dampening-maximize", "no-momentum"],
)
def test_sgd_kernel_gives_the_bits_of_its_options(row, steps):
    slabs = Slabs(torch.bfloat16, torch.bfloat16, 1, True)
    p, b = slabs.master.cpu().numpy().copy(), slabs.planes[0].cpu().numpy().copy()
    p, b = numpy_sgd(p, slabs.grad.float().cpu().numpy(), b, row, steps + 1)
    run(slabs, "sgd", [row], steps=steps)
    for offset, numel in zip(slabs.offsets, NUMELS, strict=True):
        s = slice(offset, offset + numel)
        assert np.array_equal(slabs.master[s].cpu().numpy(), p[s])
        assert np.array_equal(slabs.planes[0][s].cpu().numpy(), b[s])


def test_nothing_between_segments_is_touched():
    slabs = Slabs(torch.bfloat16, torch.bfloat16, 2, True)
    run(slabs, "adam", [(LR, *BETAS, EPS, DECAY, 1.0, 1.0)])
    for tensor in (slabs.param, slabs.master, *slabs.planes):
        for offset, numel in zip(slabs.offsets, NUMELS, strict=True):
            gap = tensor[offset + numel : offset + -(-numel // 64) * 64]
            assert bool(gap.isnan().all())
            assert not bool(tensor[offset : offset + numel].isnan().any())


def test_groups_step_counts_and_absent_gradients_are_per_parameter():
    slabs = Slabs(torch.bfloat16, torch.bfloat16, 2, True)
    start = slabs.master.clone()
    rows = [(LR, *BETAS, EPS, 0.0, 1.0, 1.0), (10 * LR, 0.5, 0.9, EPS, 0.0, 1.0, 1.0)]
    groups, steps = [i % 2 for i in range(10)], [i // 2 % 2 * 3 for i in range(10)]
    present = [float(i != 8) for i in range(10)]
    after = run(slabs, "adam", rows, groups, steps, present)
    assert after == [s + (i != 8) for i, s in enumerate(steps)]
    references = {}
    for i, (offset, numel) in enumerate(zip(slabs.offsets, NUMELS, strict=True)):
        s, alike = slice(offset, offset + numel), (groups[i], steps[i])
        if i == 8:
            assert torch.equal(slabs.master[s], start[s])
            continue
        if alike not in references:
            references[alike] = Slabs(torch.bfloat16, torch.bfloat16, 2, True)
            run(references[alike], "adam", [rows[groups[i]]], steps=steps[i])
        assert torch.equal(slabs.master[s], references[alike].master[s])
    assert len(references) == 4


def test_coefficients_are_those_of_python_for_large_step_counts():
    n = len(NUMELS)
    counts = [1, 2, 3, 10, 99, 1000, 12345, 10**6, 2**31, 2**40 - 2]
    hyper = torch.zeros(1, NUM_HYPER, dtype=torch.float64, device=DEVICE)
    hyper[0, :7] = torch.tensor([LR, *BETAS, EPS, DECAY, 1.0, 1.0])
    hyper[0, 1:3] = torch.tensor(BETAS, dtype=torch.float64)
    hyper[0, 0], hyper[0, 3], hyper[0, 4] = LR, EPS, DECAY
    coefficients = torch.zeros(n, NUM_COEFFICIENTS, device=DEVICE)
    control = torch.zeros(NUM_CONTROL, dtype=torch.float64, device=DEVICE)
    control[LOSS_SCALE] = 1.0
    ops.prologue(
        "adam", torch.zeros(n, dtype=torch.int64, device=DEVICE), hyper,
        torch.tensor(counts, device=DEVICE) - 1,
        torch.ones(n, dtype=torch.float64, device=DEVICE), coefficients, control, [], False,
    )  # fmt: skip
    for count, row in zip(counts, coefficients.cpu(), strict=True):
        want = adam_coefficients(LR, BETAS, EPS, DECAY, True, True, count)
        torch.testing.assert_close(row[: len(want)], torch.tensor(want), rtol=1e-7, atol=0)


def test_sgd_and_lion_kernels_give_the_bits_of_their_formulas():
    for rule, row in (("sgd", (0.1, 0.9, 0.01)), ("lion", (1e-3, 0.9, 0.99, 0.1))):
        slabs = Slabs(torch.bfloat16, torch.bfloat16, 1, True)
        p, m = slabs.master.cpu().numpy().copy(), slabs.planes[0].cpu().numpy().copy()
        g = slabs.grad.float().cpu().numpy()
        run(slabs, rule, [row])
        f = np.float32
        if rule == "sgd":
            m = f(row[1]) * m + (g + f(row[2]) * p)
            p = p - f(row[0]) * m
        else:
            decayed = p * f(1 - row[0] * row[3])
            p = decayed - f(row[0]) * np.sign(m + f(1 - row[1]) * (g - m))
            m = m + f(1 - row[2]) * (g - m)
        for offset, numel in zip(slabs.offsets, NUMELS, strict=True):
            s = slice(offset, offset + numel)
            assert np.array_equal(slabs.master[s].cpu().numpy(), p[s])
            assert np.array_equal(slabs.planes[0][s].cpu().numpy(), m[s])
            assert torch.equal(slabs.param[s], slabs.master[s].bfloat16())


def test_bf16_rounding_is_torchs_on_all_upper_halves_and_ties():
    """Every upper half with lower halves around the tie; NaN stays NaN, whatever its bits."""
    upper = torch.arange(-(2**15), 2**15, dtype=torch.int32)
    bits = torch.cat([(upper << 16) | low for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)])
    source = bits.view(torch.float32).to(DEVICE)
    out = torch.empty(len(bits), dtype=torch.bfloat16, device=DEVICE)
    segments = segment_table(
        [SegmentRow(out.data_ptr(), source.data_ptr(), 0, len(bits), 0)], DEVICE
    )
    tiles = tile_table([len(bits)], ops.NORM_TILE, DEVICE)
    sums = torch.empty(len(tiles), device=DEVICE)
    bad = torch.empty(len(tiles), dtype=torch.int32, device=DEVICE)
    scale = torch.ones(1, dtype=torch.float64, device=DEVICE)
    ops.pack(
        tiles, segments, sums, bad, scale, [out], [source], torch.float32, torch.bfloat16, False
    )
    want = source.bfloat16()
    finite = ~source.isnan()
    assert torch.equal(out[finite].view(torch.int16), want[finite].view(torch.int16))
    assert bool(out[~finite].isnan().all())


BAD = {
    "planes": "planes has 1 slabs",
    "dtype": r"planes\[1\] has dtype torch.float64",
    "length": r"planes\[1\] has 5 elements",
    "overlap": r"planes\[1\] and planes\[0\] are the same memory",
    "grad_dtype": "grad_dtype=torch.int32",
    "tiles": "tiles has dtype",
}


@pytest.mark.parametrize("what", BAD)
def test_a_wrong_argument_is_named_before_anything_is_written(what):
    slabs = Slabs(torch.float32, torch.float32, 2, False)
    before = slabs.param.clone()
    planes, grad_dtype = list(slabs.planes), torch.float32
    tiles = tile_table(NUMELS, 4096, DEVICE)
    if what == "planes":
        planes = planes[:1]
    elif what == "dtype":
        planes[1] = planes[1].double()
    elif what == "length":
        planes[1] = planes[1][:5].clone()
    elif what == "overlap":
        planes[1] = planes[0]
    elif what == "grad_dtype":
        grad_dtype = torch.int32
    else:
        tiles = tiles.long()
    with pytest.raises(ValueError, match=BAD[what]):
        ops.update(
            "adam", tiles, segment_table(slabs.segments, DEVICE),
            torch.zeros(len(NUMELS), NUM_COEFFICIENTS, device=DEVICE),
            torch.zeros(NUM_CONTROL, dtype=torch.float64, device=DEVICE),
            planes, [], [], torch.float32, grad_dtype, 4096, 4,
        )  # fmt: skip
    assert torch.equal(slabs.param.nan_to_num(), before.nan_to_num())
