"""Update kernels against their formulas; in the interpreter where there is no GPU.

Bit-equal to the formula: the kernels do the same fp32 operations in the same order, with no
contraction and correctly rounded square root and division. The reference is the rule's formula,
called with torch's operators; their square root is taken in fp64, as that of fp32 on the CPU is not
correctly rounded.
"""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kernels_triton import ops
from kernels_triton.control_fields import LOSS_SCALE, NUM_CONTROL
from kernels_triton.launch import choose_launch, is_interpreted
from kernels_triton.tiles import SegmentRow, segment_table, tile_table
from kernels_triton.update.frame import NUM_COEFFICIENTS, NUM_HYPER
from optim.adam import AdamRule
from optim.rules.quantised import state_noise
from optim.rules.split_master import untied
from optim.state.pieces import plane_part
from optim.update.triton_update import kernel_of
from tests.support.pairs import pairs
from tests.support.rules import CASES

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LARGE = 4096  # in the interpreter a tile
NUMELS = [1, 3, 17, 0, 1023, 1025, 64, LARGE, LARGE + 1, 10_003 if is_interpreted() else 100_003]
RULE = AdamRule()
ADAM = kernel_of(RULE)
LR, BETAS, EPS, DECAY = 1e-2, (0.9, 0.999), 1e-8, 0.1

pytestmark = [] if is_interpreted() else [pytest.mark.gpu, pytest.mark.values]


class Slabs:
    """Segments of NUMELS elements in slabs, each at a multiple of 64, NaN in between."""

    def __init__(self, param_dtype, grad_dtype, num_planes, has_master, unaligned=False, keeper=1):
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
        planes = [(0.1, keeper == 0), (1e-3, True), (1e-3, True)][:num_planes]
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

    def quantise(self, layout):
        """Keep the planes as this layout does."""
        values, end = self.planes, self.planes[0].numel()
        self.planes = [
            torch.zeros(p.numel(end), dtype=getattr(torch, p.dtype), device=DEVICE)
            for p in layout.stored().planes
        ]
        for offset, numel in zip(self.offsets, NUMELS, strict=True):
            here = slice(offset, offset + numel)
            layout.codec.encode([v[here] for v in values], self.stored(offset, numel), layout, None)

    def stored(self, offset, numel):
        """Of a segment: what there is of its planes."""
        last = self.param.numel()
        return [plane_part(plane, offset, offset + numel, last) for plane in self.planes]

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


class ExactRoots(TorchDispatchMode):
    """Square roots of fp32 are correctly rounded: twice as many digits leave no second rounding."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket is torch.ops.aten.sqrt and args[0].dtype == torch.float32:
            return func(args[0].double()).float()
        return func(*args, **(kwargs or {}))


DTYPES = [
    (torch.float32, torch.float32, False),
    (torch.bfloat16, torch.bfloat16, True),
    (torch.float16, torch.float16, True),
    (torch.bfloat16, torch.float32, True),
    (torch.bfloat16, torch.bfloat16, False),
]


def check_bits(rule, group, dtypes, unaligned=False, steps=4):
    param_dtype, grad_dtype, has_master = dtypes
    layout, hyper = rule.layout, rule.hyper(group)
    num_planes = len(layout.planes)
    keeper = next((i for i, plane in enumerate(layout.planes) if plane.keeps_ties), -1)
    slabs = Slabs(param_dtype, grad_dtype, num_planes, has_master, unaligned, keeper)
    start = slabs.master.clone() if has_master else slabs.param.float().clone()
    if layout.is_quantised:
        slabs.quantise(layout)
    old = [
        [p.cpu().clone() for p in slabs.stored(*where)]
        for where in zip(slabs.offsets, NUMELS, strict=True)
    ]
    run(slabs, kernel_of(rule), [rule.hyper_row(hyper)], steps=steps, loss_scale=4.0)
    values = torch.tensor(rule.values(hyper, steps + 1), dtype=torch.float32)
    for i, (offset, numel) in enumerate(zip(slabs.offsets, NUMELS, strict=True)):
        s, stored = slice(offset, offset + numel), old[i]
        before = stored
        if layout.is_quantised:
            before = [values[:numel] for values in layout.codec.decoded(stored, layout)]
        with ExactRoots():
            want = rule.updated(start[s].cpu(), slabs.grad[s].float().cpu() * 0.25, before, values)
            if layout.is_quantised:
                noise = state_noise(0, i, steps + 1, 0, numel)
                layout.codec.encode(want[1:], stored, layout, noise)
                want = [untied(want[0]) if has_master else want[0], *stored]
        assert numel == 0 or not torch.equal(want[0], start[s].cpu())
        if has_master:
            assert torch.equal(slabs.master[s].cpu(), want[0])
        assert torch.equal(slabs.param[s].cpu(), want[0].to(param_dtype))
        for got, exact in zip(slabs.stored(offset, numel), want[1:], strict=True):
            assert torch.equal(got.cpu(), exact)


@pytest.mark.parametrize(
    ("dtypes", "adamw_mode", "unaligned"), pairs(DTYPES, [True, False], [False, True])
)
def test_adam_kernel_gives_the_bits_of_the_formula(dtypes, adamw_mode, unaligned):
    group = {**CASES["adamw"].group(), "adamw_mode": adamw_mode}
    check_bits(RULE, group, dtypes, unaligned)


@pytest.mark.parametrize("steps", [0, 6])
@pytest.mark.parametrize("name", CASES)
def test_every_kernel_gives_the_bits_of_its_formula(name, steps):
    """In the first step, and where RAdam is rectified."""
    case = CASES[name]
    check_bits(case.rule(), case.group(), DTYPES[0 if steps else 1], steps=steps)


class Operators(AdamRule):
    """Every operator that a formula may have, on values of both signs, zeros and NaN."""

    name = "operators"

    @staticmethod
    def formula(param, grad, c, *, exp_avg, exp_avg_sq, max_exp_avg_sq=None):
        odd = torch.where(grad > 0.5, grad / 0.0, grad) - torch.where(grad > 1.0, grad / 0.0, 0.25)
        both = torch.maximum(odd, -param) + torch.minimum(odd, param) * odd.sign() - odd.abs()
        third = (1.0 - odd.clamp(-0.5, 0.75)).pow(2) + exp_avg.clamp(min=0.125) * 0.1
        new = torch.where((odd >= param) | (grad < 0), both, third) + c.eps.reciprocal()
        return new, {"exp_avg": odd.clamp(max=0.25) / 3, "exp_avg_sq": both.neg()}


def test_operators_are_torchs():
    rule = Operators()
    slabs = Slabs(torch.float32, torch.float32, 2, False)
    given = [t.cpu().clone() for t in (slabs.param, slabs.grad, *slabs.planes)]
    hyper = rule.hyper({**CASES["adamw"].group(), "eps": 3.0})
    run(slabs, kernel_of(rule), [rule.hyper_row(hyper)])
    values = torch.tensor(rule.values(hyper, 1), dtype=torch.float32)
    for offset, numel in zip(slabs.offsets, NUMELS, strict=True):
        param, grad, *planes = (t[offset : offset + numel] for t in given)
        want = rule.updated(param, grad, planes, values)
        for got, exact in zip((slabs.param, *slabs.planes), want, strict=True):
            got = got[offset : offset + numel].cpu()
            assert torch.equal(got.isnan(), exact.isnan())
            assert torch.equal(got.nan_to_num(), exact.nan_to_num())
    assert numel and exact.isnan().any() and not exact.isnan().all()


def test_nothing_between_segments_is_touched():
    slabs = Slabs(torch.bfloat16, torch.bfloat16, 2, True)
    run(slabs, ADAM, [(LR, *BETAS, EPS, DECAY, 1.0, 1.0)])
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
    after = run(slabs, ADAM, rows, groups, steps, present)
    assert after == [s + (i != 8) for i, s in enumerate(steps)]
    references = {}
    for i, (offset, numel) in enumerate(zip(slabs.offsets, NUMELS, strict=True)):
        s, alike = slice(offset, offset + numel), (groups[i], steps[i])
        if i == 8:
            assert torch.equal(slabs.master[s], start[s])
            continue
        if alike not in references:
            references[alike] = Slabs(torch.bfloat16, torch.bfloat16, 2, True)
            run(references[alike], ADAM, [rows[groups[i]]], steps=steps[i])
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
        ADAM, torch.zeros(n, dtype=torch.int64, device=DEVICE), hyper,
        torch.tensor(counts, device=DEVICE) - 1,
        torch.ones(n, dtype=torch.float64, device=DEVICE), coefficients, control, [], False,
    )  # fmt: skip
    hyper_of_adam = RULE.hyper({**RULE.options, "lr": LR, "weight_decay": DECAY})
    for count, row in zip(counts, coefficients.cpu(), strict=True):
        want = RULE.values(hyper_of_adam, count)
        torch.testing.assert_close(row[: len(want)], torch.tensor(want), rtol=1e-7, atol=0)


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
    "groups": r"planes\[1\] has \d+ elements, others differ",  # as many as scales would be
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
    elif what == "groups":
        planes[1] = planes[1][: -(-planes[0].numel() // 64)].clone()
    elif what == "overlap":
        planes[1] = planes[0]
    elif what == "grad_dtype":
        grad_dtype = torch.int32
    else:
        tiles = tiles.long()
    with pytest.raises(ValueError, match=BAD[what]):
        ops.update(
            ADAM, tiles, segment_table(slabs.segments, DEVICE),
            torch.zeros(len(NUMELS), NUM_COEFFICIENTS, device=DEVICE),
            torch.zeros(NUM_CONTROL, dtype=torch.float64, device=DEVICE),
            planes, [], [], torch.float32, grad_dtype, 4096, 4,
        )  # fmt: skip
    assert torch.equal(slabs.param.nan_to_num(), before.nan_to_num())
