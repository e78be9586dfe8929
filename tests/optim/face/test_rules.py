"""Every elementwise optimizer through one table: torch's updates, tiers, groups, resume, ranks.

What kernels make of them is in `tests/kernels_triton`, and the digests of wrapped modules with
clipping, skipped steps and checkpoints, by home and ranks, in `tests/golden`.
"""

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

from bench.shared.workers import run_ranks
from optim import HybridAdam, HybridScheduleFreeAdamW
from optim.rules.rule import UpdateRule
from optim.update.built_kernels import compiler
from tests.golden.bits import OTHERS, backward, bits, digest, made
from tests.support.plain_training import make_params, on_disk, train, update_error
from tests.support.rules import CASES, LIKE_TORCH

SHAPES = [(1,), (3,), (17,), (1023,), (1025,), (33, 41), (5, 3, 7)]
STEPS = 7  # RAdam is rectified from the sixth


def small_params():
    return make_params(shapes=SHAPES)


def late(step):
    """Parameters without a gradient: the fifth one joins at the third step, another skips one."""
    return ((4,) if step < 2 else ()) + ((6,) if step == 1 else ())


def run(make, params=None, steps=STEPS, first=0, **places):
    params = params or small_params()
    optimizer = make(params, **places)
    return train(params, optimizer, steps, late, first), optimizer


def same(got, want):
    return all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("name", LIKE_TORCH)
def test_updates_are_torchs(name, path):
    """By eager operators, and by kernels in the interpreter; parameters come late, or skip one."""
    case = LIKE_TORCH[name]
    got, optimizer = run(case.make)
    assert optimizer.last_report.update_path == path
    assert update_error(got, run(case.of_torch)[0], small_params()) < 1e-6


@pytest.mark.ci
@pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
@pytest.mark.parametrize("name", LIKE_TORCH)
def test_updates_are_torchs_by_the_compiled_path(name):
    case = LIKE_TORCH[name]
    got, _ = run(case.make, cpu_path="compile")
    assert update_error(got, run(case.of_torch)[0], small_params()) < 2e-6  # torch's roots are not


@pytest.mark.parametrize("name", CASES)
def test_every_option_of_the_table_matters(name):
    """Else updates would be torch's without it."""
    case = CASES[name]
    got = run(case.make)[0]
    for left_out in case.options:
        options = {option: v for option, v in case.options.items() if option != left_out}
        if left_out == "momentum" and ("dampening" in options or "nesterov" in options):
            continue  # which are refused without
        error = update_error(run(case.ours, **options)[0], got, small_params())
        assert error > 1e-3 or options | {left_out: 0.0} == case.options, (left_out, error)


@pytest.mark.parametrize("name", CASES)
def test_bits_are_the_same_wherever_the_state_is(name, tmp_path):
    want, _ = run(CASES[name].make, steps=3)
    got, optimizer = run(CASES[name].make, steps=3, **on_disk(tmp_path, 0.6))
    assert optimizer.nvme_bytes > 0 and same(got, want)
    optimizer.close()


@pytest.mark.ci
@pytest.mark.parametrize("name", CASES)
def test_kernels_give_the_same_bits_wherever_the_state_is(name, on_triton, tmp_path):
    want, _ = run(CASES[name].make, steps=3)
    for fraction in (0.4, 1.0):
        got, optimizer = run(CASES[name].make, steps=3, **on_disk(tmp_path, fraction))
        assert optimizer.last_report.update_path == "triton" and same(got, want)
        optimizer.close()


@pytest.mark.parametrize("name", CASES)
def test_groups_have_options_of_their_own(name):
    """A group beside another has the bits that it has alone; noise of state is by position."""
    case = CASES[name]
    params, stored = small_params(), {k: v for k, v in case.options.items() if k == "state"}
    own = {k: v for k, v in case.options.items() if k not in stored}
    both = case.ours([{"params": params[:3], **own}, {"params": params[3:]}], **stored)
    train(params, both, 4)
    for part, options in ((slice(0, 3), own), (slice(3, None), {}))[: 1 if stored else 2]:
        alone = small_params()
        optimizer = case.ours(alone[part], **options, **stored)
        train(alone, optimizer, 4)
        assert same(params[part], alone[part])


def moves(state, grads, **options):
    """[steps, n] fp32: how far each element is moved in every step, in rates."""
    param, found = torch.nn.Parameter(torch.zeros(grads.shape[1:])), []
    optimizer = HybridAdam([param], lr=1.0, state=state, **options)
    for grad in grads:
        param.grad = grad.clone()
        optimizer.step()
        found.append(param.detach().flatten().clone())
        param.detach().zero_()
    optimizer.close()
    return torch.stack(found)


def of_any_spread(steps, rows, columns, seed=0):
    """Gradients whose sizes span 10 decades in every row; some begin late, some are rare or 0, some
    always the same, and in step 3 one is beyond fp32 when it is squared."""
    generator = torch.Generator().manual_seed(seed)
    shape = (rows, columns)
    grads = torch.randn(steps, *shape, generator=generator)
    grads[:, :, ::5] = 1.0
    when = torch.arange(steps).view(-1, 1, 1)
    grads *= when >= torch.randint(0, steps, shape, generator=generator) * (
        torch.arange(columns) % 3 == 0
    )
    grads[:, :, 1::7] *= torch.rand(grads[:, :, 1::7].shape, generator=generator) < 0.1
    grads *= 10 ** (-10 * torch.rand(shape, generator=generator))
    grads[:, :, 2::11] = 0.0
    grads[3, 0, 0] = 1e25
    return grads


@pytest.mark.parametrize(("updater", "eps"), [
    *[(path, eps) for path in ("eager", "compile") for eps in (1e-8, 1e-3, 1e-16)],
    ("triton", 1e-8), pytest.param("triton", 1e-16, marks=pytest.mark.ci),
])  # fmt: skip
def test_8_bits_move_no_element_further_than_twice_what_fp32_does(updater, eps, request):
    """Its longest step beside the longest of its twin, whose moments are exact; a second moment
    that became 0 beside a first one that did not would move it by thousands of rates."""
    if updater == "triton":
        request.getfixturevalue("on_triton")
    elif updater == "compile" and compiler() is None:
        pytest.skip("no C++ compiler")
    grads = of_any_spread(12, 9, 33)
    exact = moves("fp32", grads, cpu_path="eager", eps=eps).abs()
    cpu_path = "auto" if updater == "triton" else updater
    found = moves("8bit", grads, cpu_path=cpu_path, eps=eps).abs()
    longest, allowed = found.amax(0), 2 * exact.amax(0)
    assert bool((longest <= allowed).all()), (longest / allowed).max()
    assert not found[4:, 0].any() and not exact[4:, 0].any()  # beyond fp32: it rests, alone
    assert 0.95 < float(found.sum() / exact.sum()) < 1.05


def of_two_ranks(rank, folder, name):
    return bits(name, "partly on disk", "serial", Path(folder))


@pytest.mark.ci
@pytest.mark.parametrize("name", OTHERS)
def test_two_ranks_have_the_bits_of_one(name, tmp_path):
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    one = bits(name, "resident", "serial", tmp_path / "one")
    assert run_ranks(of_two_ranks, 2, str(tmp_path / "two"), name) == [one] * 2


# -- what a rule says ----------------------------------------------------------------------------


def test_a_plane_that_no_group_asked_for_is_named():
    optimizer = CASES["rmsprop"].make(params := small_params())
    train(params, optimizer, 1)
    optimizer.param_groups[0]["momentum"] = 0.9
    with pytest.raises(ValueError, match="was made without momentum_buffer; make the optimizer wi"):
        train(params, optimizer, 1)


def test_a_rule_that_no_kernel_can_be_made_of_is_named():
    from optim.update.triton_update import kernel_of

    class Wide(UpdateRule):
        name = "wide"
        layout = CASES["adamw"].rule().layout
        options = {f"o{i}": 1.0 for i in range(11)}  # noqa: RUF012
        coefficients = staticmethod(lambda h, t: {"lr": h.o0})
        formula = staticmethod(lambda param, grad, c, **planes: (param - c.lr * grad, planes))

    with pytest.raises(ValueError, match="wide has 11 hyperparameters; a kernel has 10"):
        kernel_of(Wide())

    class Exponential(Wide):
        options = {"o0": 1.0}  # noqa: RUF012
        formula = staticmethod(lambda param, grad, c, **planes: (param - grad.exp(), planes))

    with pytest.raises(ValueError, match=r"calls torch's exp of torch\.float32"):
        kernel_of(Exponential())


# -- schedule-free: two sets of weights ----------------------------------------------------------


class Reference(torch.optim.Optimizer):
    """AdamWScheduleFreeReference of facebookresearch/schedule_free."""

    def __init__(self, params, lr, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0,
                 warmup_steps=0, r=0.0, weight_lr_power=2.0):  # fmt: skip
        super().__init__(params, {})
        self.options = lr, betas, eps, weight_decay, warmup_steps, r, weight_lr_power
        self.count, self.total, self.largest = 0, 0.0, 0.0

    @torch.no_grad()
    def step(self):
        lr, (beta1, beta2), eps, weight_decay, warmup_steps, r, weight_lr_power = self.options
        self.count += 1
        rate = lr * min(1.0, self.count / warmup_steps if warmup_steps else 1.0)
        self.largest = max(rate, self.largest)
        weight = self.count**r * self.largest**weight_lr_power
        self.total += weight
        pull = weight / self.total
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            if not state:
                state.update(z=p.detach().clone(), v=torch.zeros_like(p))
            state["v"].mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
            root = (state["v"] / (1 - beta2**self.count)).sqrt()
            update = p.grad / (root + eps) + weight_decay * p
            p.lerp_(state["z"], pull)
            p.add_(update, alpha=rate * (beta1 * (1 - pull) - 1))
            state["z"].sub_(update, alpha=rate)

    @torch.no_grad()
    def average(self, params):
        beta1 = self.options[1][0]
        return [p.lerp(self.state[p]["z"], 1 - 1 / beta1) for p in params]


SCHEDULES = [
    {"lr": 0.1},
    {"lr": 0.1, "warmup_steps": 5, "weight_decay": 0.1},
    {"lr": 0.1, "warmup_steps": 3, "r": 1.5, "betas": (0.95, 0.99)},
    {"lr": 0.1, "weight_lr_power": 0.0, "r": 0.5},
]


@pytest.mark.parametrize("options", SCHEDULES, ids=str)
def test_schedule_free_updates_are_the_references(options, path):
    start, ours = small_params(), small_params()
    optimizer = HybridScheduleFreeAdamW(ours, **options)
    theirs = [nn.Parameter(p.detach().clone()) for p in start]
    reference = Reference(theirs, **options)
    got, want = train(ours, optimizer, 10), train(theirs, reference, 10)
    assert update_error(got, want, start) < 1e-6
    optimizer.eval()
    assert update_error(ours, reference.average(theirs), start) < 1e-6
    optimizer.eval()  # twice is once
    optimizer.train()
    assert update_error(ours, want, start) < 1e-6


@pytest.mark.parametrize("fraction", [0.5, 1.0])
def test_the_swap_of_a_plain_module_has_the_same_bits_on_disk(fraction, tmp_path):
    found = []
    for places in ({}, on_disk(tmp_path, fraction)):
        params = make_params(shapes=SHAPES)
        params[5].data = params[5].data.t().contiguous().t()  # in another order
        optimizer = HybridScheduleFreeAdamW(params, lr=1e-2, **places)
        train(params, optimizer, 3, late)
        optimizer.eval()
        found.append([p.detach().clone() for p in params])
        optimizer.train()
        found.append(train(params, optimizer, 1, first=3))
        optimizer.close()
    assert same(found[0], found[2]) and same(found[1], found[3])


def swapped(rank, folder, home, update, kind):
    """Digests after eval() and train(), and one step more, of a wrapped module."""
    model, optimizer = made(kind, home, update)
    found = []
    for _ in range(2):
        for factor in (0.5, 0.25):
            backward(model, optimizer, factor)
            optimizer.step()
            optimizer.zero_grad()
        for swap in (optimizer.eval, optimizer.train):
            swap()
            with torch.no_grad():  # weights that are used are those
                model(torch.zeros(()))
            found.append(digest(model, optimizer))
    optimizer.close()
    return found


@pytest.mark.parametrize(
    ("home", "update"),
    [("disk", "serial"), ("partly on disk", "tail"), ("files", "serial"), ("host", "serial"),
     ("host and disk", "tail")],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["schedule-free", "schedule-free, fp32"])
def test_the_swap_of_a_wrapped_module_has_the_same_bits_in_every_home(kind, home, update, tmp_path):
    want = swapped(0, tmp_path, "resident", "serial", kind)
    assert len(set(want)) == 4
    assert swapped(0, tmp_path, home, update, kind) == want


def test_the_swap_of_a_wrapped_module_is_the_formula():
    model, optimizer = made("schedule-free, fp32", "resident", "serial")

    def weights():
        with model.summon_full_params(writeback=False):
            return torch.cat([p.detach().flatten() for p in model.module.parameters()])

    for factor in (0.5, 0.25):
        backward(model, optimizer, factor)
        optimizer.step()
    z = {}
    optimizer.visit_state(
        lambda run: (
            z.setdefault((run.name, run.start), run.values.clone()) if run.plane == "z" else None
        )
    )
    y, z = weights(), torch.cat([z[key] for key in sorted(z)])
    optimizer.eval()
    assert torch.allclose(weights(), y + (1 - 1 / 0.9) * (z - y), rtol=0, atol=1e-7)
    assert not torch.allclose(weights(), y, rtol=0, atol=1e-5)
    optimizer.train()
    assert torch.allclose(weights(), y, rtol=0, atol=1e-7)
    optimizer.close()


@pytest.mark.ci
@pytest.mark.parametrize("home", ["resident", "partly on disk"])
def test_the_swap_at_two_ranks_has_the_bits_of_one(home, tmp_path):
    want = swapped(0, tmp_path, "resident", "serial", "schedule-free")
    found = run_ranks(swapped, 2, str(tmp_path), home, "serial", "schedule-free")
    assert found == [want] * 2


def test_the_mode_is_a_part_of_the_state_and_guards_steps():
    params = small_params()
    optimizer = HybridScheduleFreeAdamW(params, lr=1e-2)
    start = [p.detach().clone() for p in params]
    optimizer.eval()
    with pytest.raises(RuntimeError, match=r"call optimizer\.train\(\) before it"):
        train(params, optimizer, 1)
    assert same(params, start)  # of before the first step, there is nothing to average
    optimizer.train()
    train(params, optimizer, 2)
    optimizer.eval()
    other = HybridScheduleFreeAdamW(small_params())
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    with pytest.raises(RuntimeError, match="a step after eval"):
        train(other.param_groups[0]["params"], other, 1)


def test_weights_that_could_not_come_back_are_refused():
    optimizer = HybridScheduleFreeAdamW(make_params(torch.bfloat16, SHAPES))
    with pytest.raises(ValueError, match=r"torch\.bfloat16 without fp32 masters cannot come back"):
        optimizer.eval()
    with pytest.raises(ValueError, match=r"betas\[0\]=0"):
        HybridScheduleFreeAdamW(small_params(), betas=(0.0, 0.9))
