"""Masters of which only what bf16 weights lack is kept: nothing of them is lost, on every path."""

import pytest
import torch

from optim.adam import AdamRule
from optim.adaptive import LionRule
from optim.rules.split_master import join, join_masters, remainder_of, split_masters, tie_sign
from optim.rules.state_layout import MASTER, REMAINDER, WEIGHT
from optim.state.pieces import Piece
from optim.update import cpu_update, kernel_specs
from optim.update.built_kernels import compiler
from optim.update.compiled_update import CompiledUpdate
from optim.update.cpu_update import StepInputs
from optim.update.triton_update import TritonUpdater

BF16 = torch.bfloat16
LAYOUT = AdamRule.layout.with_master().with_remainder()
GROUP = {
    "lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0,
    "adamw_mode": True, "bias_correction": True, "amsgrad": False, "maximize": False,
}  # fmt: skip
LOWER = [0, 1, 2, 0x1234, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0x8002, 0xCDEF, 0xFFFE, 0xFFFF]


def patterns(upper, lower):
    """fp32 of every pair of halves."""
    bits = (upper[:, None] << 16) | lower
    return bits.flatten().to(torch.int32).view(torch.float32)


def kept(master, values):
    """fp32 `values` with the signs that belong to the masters."""
    return (values.abs().view(torch.int32) | tie_sign(master)).view(torch.float32)


def check_round_trip(masters):
    keeper = kept(masters, torch.zeros_like(masters))
    back = join(masters.to(BF16), remainder_of(masters), keeper)
    is_nan = masters.isnan()
    assert torch.equal(back.view(torch.int32)[~is_nan], masters.view(torch.int32)[~is_nan])
    assert bool(back[is_nan].isnan().all())


def test_every_upper_half_comes_back_with_lower_halves_at_all_borders():
    """Infinities, subnormals, both zeros, ties of even and odd; NaN stays NaN."""
    check_round_trip(patterns(torch.arange(1 << 16), torch.tensor(LOWER)))


def test_every_lower_half_comes_back_whatever_the_exponent():
    upper = torch.tensor([0, 1, 0x3F80, 0x3F81, 0x7F7F, 0x7F80, 0x8000, 0x8001, 0xBF7F, 0xFF7F])
    check_round_trip(patterns(upper, torch.arange(1 << 16)))


def test_one_master_of_131072_is_a_tie_that_was_rounded_down():
    ties = tie_sign(patterns(torch.arange(0x3F00, 0x4000), torch.arange(1 << 16))) != 0
    assert int(ties.sum()) * 131072 == ties.numel()


@pytest.mark.parametrize("with_weight", [False, True])
def test_what_is_shown_has_no_sign_that_belongs_to_a_master(with_weight):
    masters = patterns(torch.arange(0x3F00, 0x5000), torch.tensor(LOWER))  # more than one tile
    second = torch.rand(masters.numel())
    planes = {
        REMAINDER: remainder_of(masters), "exp_avg": -second, "exp_avg_sq": kept(masters, second)
    }  # fmt: skip
    if with_weight:
        planes[WEIGHT] = torch.zeros(masters.numel(), dtype=BF16)
    assert 0 < int(planes["exp_avg_sq"].signbit().sum()) < second.numel()
    values = join_masters(planes, masters.to(BF16), LAYOUT)
    assert list(values) == [MASTER, "exp_avg", "exp_avg_sq"]
    assert torch.equal(values[MASTER], masters) and torch.equal(values["exp_avg_sq"], second)
    assert torch.equal(values["exp_avg"], -second)
    values[MASTER] = masters.flip(0)
    split_masters(planes, values, LAYOUT)
    again = join_masters(planes, masters.flip(0).to(BF16), LAYOUT)
    assert torch.equal(again[MASTER], masters.flip(0))
    assert torch.equal(again["exp_avg_sq"], second)
    if with_weight:
        assert torch.equal(planes[WEIGHT], masters.flip(0).to(BF16))


def test_a_rule_without_a_plane_for_ties_keeps_its_masters_whole():
    layout = LionRule.layout.with_master()
    assert layout.with_remainder() == layout and not layout.splits("bfloat16")
    whole = AdamRule.layout.with_master()
    assert whole.splits("bfloat16") and not whole.splits("float16") and not whole.splits("float32")
    assert not AdamRule.layout.splits("bfloat16")  # no master
    assert LAYOUT.is_split and LAYOUT.has_master and LAYOUT.bytes_per_element == 10


# -- updates --


def pieces(rule, numel, first=0):
    """The same state with whole and with split masters, `first` elements into their memory; every
    third master is a tie before the update, and every other one stays what it is."""
    generator = torch.Generator().manual_seed(1)
    master = torch.randn(numel, generator=generator)
    master.view(torch.int32)[::3].bitwise_and_(~0xFFFF).add_(0x8000)
    grad = torch.randn(numel, generator=generator).to(BF16)
    planes = [torch.randn(numel, generator=generator) * 0.1]
    planes += [torch.rand(numel, generator=generator) for _ in rule.layout.planes[1:]]
    grad[::2], planes[0][::2] = 0, 0
    hyper = rule.hyper({**GROUP, "amsgrad": "amsgrad" in rule.wanted})
    found = []
    for is_split in (False, True):
        own = [plane.clone() for plane in planes]
        if is_split:
            own[1] = kept(master, own[1])
        columns = [master.to(BF16), grad, remainder_of(master) if is_split else master, *own]
        param, gradient, high, *rest = [
            torch.cat([torch.zeros(first, dtype=column.dtype), column])[first:]
            for column in columns
        ]
        found.append(Piece(param, gradient, high, tuple(rest), hyper, 7, 0))
    return found


def assert_same(whole, halved):
    assert torch.equal(whole.param, halved.param)
    keeper = halved.planes[1]
    ties = keeper.signbit()
    assert 0 < int(ties.sum()) < ties.numel() or whole.param.numel() < 6
    assert torch.equal(join(halved.param, halved.master, keeper), whole.master)
    shown_planes = [halved.planes[0], keeper.abs(), *halved.planes[2:]]
    assert all(torch.equal(a, b) for a, b in zip(whole.planes, shown_planes, strict=True))


RULES = pytest.mark.parametrize(
    "rule", [AdamRule(), AdamRule("amsgrad")], ids=lambda rule: rule.name
)


@RULES
def test_the_eager_update_has_the_bits_of_whole_masters(rule, workers):
    whole, halved = pieces(rule, 3 * cpu_update.TILE_NUMEL // 2 + 7)
    before = whole.param.clone()
    for piece in (whole, halved):
        cpu_update.update(workers, rule, [piece], StepInputs(0.5, 0.2))
    assert not torch.equal(whole.param, before)
    assert_same(whole, halved)


@RULES
@pytest.mark.parametrize("numel", [1, 70_001])
def test_the_kernel_has_the_bits_of_whole_masters(rule, numel):
    both = pieces(rule, numel)
    layout = rule.layout.with_master()
    for piece, planes in zip(both, (layout, layout.with_remainder()), strict=True):
        updater = TritonUpdater(rule, [0], torch.device("cpu"))
        updater.begin([piece.hyper], with_norm=False)
        slabs = dict(zip(planes.names, (piece.master, *piece.planes), strict=True))
        updater.update([piece], slabs)
    assert_same(*both)


@pytest.mark.ci
@pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
@RULES
@pytest.mark.parametrize("numel", [1, 17, kernel_specs.TILE_NUMEL + 100_003])
@pytest.mark.parametrize("first", [0, 5])
def test_the_compiled_update_has_the_bits_of_whole_masters(rule, numel, first, workers):
    compiled = CompiledUpdate(rule, [])
    whole, halved = pieces(rule, numel, first)
    before = whole.param.clone()
    for piece in (whole, halved):
        compiled.update(workers, [piece], StepInputs(0.5, 0.2))
    assert numel == 1 or not torch.equal(whole.param, before)
    assert_same(whole, halved)


def test_the_kernel_refuses_remainders_for_a_rule_that_cannot_keep_ties():
    rule = LionRule()
    hyper = rule.hyper({"lr": 1e-3, "betas": (0.9, 0.99), "weight_decay": 0.0})
    param = torch.zeros(64, dtype=BF16)
    planes = {REMAINDER: torch.zeros(64, dtype=torch.int16), "exp_avg": torch.zeros(64)}
    piece = Piece(param, param.clone(), planes[REMAINDER], (planes["exp_avg"],), hyper, 1, 0)
    updater = TritonUpdater(rule, [0], torch.device("cpu"))
    updater.begin([hyper], with_norm=False)
    with pytest.raises(ValueError, match="lion has no plane that keeps ties"):
        updater.update([piece], planes)
