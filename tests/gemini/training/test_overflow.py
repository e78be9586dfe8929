"""A gradient that is not finite: nothing changes, it is named, it is counted."""

import logging
import math

import pytest
import torch

from bench.shared.models import token_batches, token_loss
from bench.shared.reference import everything, same
from bench.shared.simulated import SimBackend
from bench.shared.workers import run_ranks
from gemini import PrecisionPolicy
from optim import HybridSGD, LossScale, NonFiniteGradientError
from optim.rules.report import Outcome, Skips, StepReport
from tests.support import towers

SMALL = {"min_chunk_size_m": 0.004}


def wrapped(precision="bf16", *args, **options):
    return towers.wrapped(precision, *args, rule={"lr": 1e-2, "eps": 1e-3}, **options)


def one_step(model, optimizer, part, spoil=None, value=math.nan, clip=False):
    handle = None
    if spoil is not None:
        weight = model.module.get_parameter(spoil)
        handle = weight.register_hook(lambda grad: grad * value)
    token_loss(model, part).backward()
    if handle is not None:
        handle.remove()
    if clip:
        optimizer.clip_grad_norm_(0.5)
    optimizer.step()
    optimizer.zero_grad()
    return optimizer.last_report


@pytest.mark.parametrize(
    ("precision", "value"), [("fp32", math.nan), ("bf16", math.inf), ("fp16", -math.inf)]
)
def test_a_step_in_the_middle_is_skipped_and_leaves_no_trace(precision, value, tmp_path):
    """Weights on a simulated device, state half on disk, clipping on."""
    batches = [parts[0] for parts in token_batches(4, 1)]
    model, optimizer = wrapped(precision, SimBackend(), tmp_path, 0.5)
    for part in batches[:2]:
        assert not one_step(model, optimizer, part, clip=True).skipped
    before = everything(model, optimizer)
    report = one_step(model, optimizer, batches[2], "layers.2.1.weight", value, clip=True)
    assert report.skipped and report.nonfinite == "layers.2.1.weight on rank 0"
    assert same(everything(model, optimizer), before)
    assert optimizer.skipped_steps == 1

    assert not one_step(model, optimizer, batches[3], clip=True).skipped
    clean, clean_optimizer = wrapped(precision)
    for part in (*batches[:2], batches[3]):
        one_step(clean, clean_optimizer, part, clip=True)
    assert same(everything(model, optimizer), everything(clean, clean_optimizer))


@pytest.mark.parametrize("names", [("layers.3.1.bias", "layers.1.3.weight"), ("layers.3.1.bias",)])
def test_the_first_parameter_that_is_not_finite_is_named(names):
    model, optimizer = wrapped()
    (batch,) = token_batches(1, 1)
    for name in names:
        model.module.get_parameter(name).register_hook(lambda grad: grad * math.nan)
    assert one_step(model, optimizer, batch[0]).nonfinite == f"{names[-1]} on rank 0"


@pytest.mark.parametrize("device", ["cpu", pytest.param("triton", marks=pytest.mark.ci)])
def test_the_loss_scale_follows_its_schedule(device):
    options = LossScale(initial_scale=2.0**10, growth_interval=2, hysteresis=2)
    backend = SimBackend(updates_by_triton=True) if device == "triton" else "cpu"
    model, optimizer = wrapped("fp16", backend, loss_scale=options)
    (batch,) = token_batches(1, 1)
    seen = []
    #          good   good   forgiven  good   backs off  backs off  good   good
    for bad in (False, False, True, False, True, True, False, False, False):
        report = one_step(model, optimizer, batch[0], "head.weight" if bad else None)
        assert report.skipped == bad
        seen.append(math.log2(report.loss_scale))
    assert seen == [10, 10, 11, 11, 11, 10, 9, 9, 10]
    assert optimizer.skipped_steps == 3
    counters = optimizer.state_dict()["counters"]
    assert counters == {"skipped_steps": 3, "scale": 1024, "good_steps": 1, "hysteresis_left": 2}


def test_an_overflow_of_the_scale_itself_is_found_and_cured():
    model, optimizer = wrapped("fp16", loss_scale=LossScale(initial_scale=2.0**30, hysteresis=1))
    (batch,) = token_batches(1, 1)
    reports = [one_step(model, optimizer, batch[0]) for _ in range(20)]
    skipped = [report.skipped for report in reports]
    assert skipped[0] and not skipped[-1] and skipped == sorted(skipped, reverse=True)
    assert optimizer.skipped_steps == sum(skipped)


def test_a_burst_is_logged_once_and_the_next_one_again(caplog):
    model, optimizer = wrapped()
    (batch,) = token_batches(1, 1)
    with caplog.at_level(logging.WARNING, "gemini"):
        for bad in (False, True, True, True, False, True, False):
            one_step(model, optimizer, batch[0], "head.weight" if bad else None)
    said = [r.getMessage() for r in caplog.records if "step skipped" in r.getMessage()]
    assert len(said) == 2 and all("embed.weight on rank 0" in text for text in said)


class Heard:
    """Outcome of a step that a rank hears of when it asks, or so many steps later."""

    def __init__(self, outcome, later):
        self.outcome, self.later = outcome, later

    def ready(self):
        self.later -= 1
        return self.later < 0

    def wait(self):
        return self.outcome


@pytest.mark.parametrize("later", [0, 1, 3, 9])
def test_ranks_raise_in_the_same_step_whenever_they_hear_of_its_outcome(later):
    """Four skipped steps in a row at the least scale or below; a good step begins anew."""
    scales = [8, 4, 2, 2, 2, None, 2, 1, 1, 2, 2, 4, 2, 2, 2, 2]
    skips, raised = Skips(most=4, least=2.0, tells=False), []
    for number, scale in enumerate(scales):
        outcome = Outcome(scale is not None, nonfinite="a.weight", loss_scale=scale or 2.0)
        try:
            skips.add(StepReport(Heard(outcome, later)))
        except NonFiniteGradientError as error:
            assert "4 steps in a row" in str(error) and "a.weight" in str(error)
            assert error.report.outcome.wait() is outcome
            raised.append(number)
    assert raised == [9, 15]


def test_outcomes_are_waited_for_only_where_a_step_may_be_one_skipped_too_many():
    skips, asked = Skips(most=4, tells=False), []

    class Late(Heard):
        def wait(self):
            asked.append(self)
            return self.outcome

    for _ in range(3):
        skips.add(StepReport(Late(Outcome(), 99)))
    assert asked == []
    skips.add(StepReport(Late(Outcome(), 99)))
    assert len(asked) == 1


def test_skips_in_a_row_are_told_ever_more_rarely_and_one_too_many_raises_and_is_named(caplog):
    scale = LossScale(initial_scale=4.0, hysteresis=1)  # 4 and 2 fall, and do not count
    model, optimizer = wrapped("fp16", loss_scale=scale, on_nonfinite=4)
    (batch,) = token_batches(1, 1)
    before = model.state_dict()
    with caplog.at_level(logging.WARNING, "gemini"):
        for _ in range(5):
            assert one_step(model, optimizer, batch[0], "head.weight").skipped
        with pytest.raises(
            NonFiniteGradientError, match=r"4 steps .* embed.weight on rank 0 .*on_nonfinite=4"
        ):
            one_step(model, optimizer, batch[0], "head.weight")
    said = [r.getMessage() for r in caplog.records if "skipped" in r.getMessage()]
    assert [text[:4] for text in said] == ["step", "2 st", "4 st"]
    assert optimizer.last_report.skipped and optimizer.skipped_steps == 6
    assert same(model.state_dict(), before)


@pytest.mark.parametrize(
    ("options", "most", "least"),
    [
        ({}, 64, math.inf),
        ({"precision": "fp16"}, 64, 1.0),
        ({"precision": "fp16", "loss_scale": 1024.0}, 64, math.inf),  # which never changes
        ({"precision": "fp16", "loss_scale": LossScale(backoff_factor=1.0)}, 64, math.inf),
        ({"on_nonfinite": 3}, 3, math.inf),
        ({"precision": "fp16", "on_nonfinite": "skip"}, math.inf, 1.0),
        ({"precision": "fp16", "on_nonfinite": "raise"}, 1, math.inf),
    ],
)
def test_how_many_skipped_steps_raise_and_at_which_scale(options, most, least):
    assert PrecisionPolicy(**options).settings().most_skipped == (most, least)


def test_a_plain_module_whose_scaler_skips_every_step_raises_too():
    """GradScaler's scale falls for ever: from 1 on it is of no use."""
    param = torch.nn.Parameter(torch.ones(3))
    optimizer, scaler = HybridSGD([param], lr=0.1), torch.amp.GradScaler("cpu", init_scale=2.0)
    with pytest.raises(NonFiniteGradientError, match=r"64 steps in a row.*parameter 0"):
        for _ in range(66):
            scaler.scale((param * float("nan")).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert torch.equal(param.detach(), torch.ones(3)) and optimizer.skipped_steps == 65


def skipped(rank, _):
    model, optimizer = wrapped()
    (parts,) = token_batches(1, 2)
    return one_step(model, optimizer, parts[rank], "head.weight").skipped


@pytest.mark.ci
def test_ranks_that_skip_together_say_so_once(caplog):
    assert run_ranks(skipped, 2, None) == [True, True]
    assert len([r for r in caplog.records if "step skipped" in r.getMessage()]) == 1


def test_raising_instead_changes_nothing_either():
    model, optimizer = wrapped(on_nonfinite="raise")
    (batch,) = token_batches(1, 1)
    one_step(model, optimizer, batch[0])
    before = everything(model, optimizer)
    with pytest.raises(NonFiniteGradientError, match=r"layers\.0\.1\.bias on rank 0"):
        one_step(model, optimizer, batch[0], "layers.0.1.bias")
    assert optimizer.last_report.skipped and optimizer.skipped_steps == 1
    optimizer.zero_grad()
    assert same(everything(model, optimizer), before)
    assert not one_step(model, optimizer, batch[0]).skipped


def test_counters_and_scale_survive_a_checkpoint():
    options = LossScale(initial_scale=2.0**12, growth_interval=3, hysteresis=1)
    parts = [p[0] for p in token_batches(6, 1)]
    model, optimizer = wrapped("fp16", loss_scale=options)
    for i, part in enumerate(parts[:4]):
        one_step(model, optimizer, part, "head.weight" if i == 1 else None)
    weights, saved = model.state_dict(), optimizer.state_dict()
    resumed, resumed_optimizer = wrapped("fp16", loss_scale=options)
    resumed.load_state_dict(weights)
    resumed_optimizer.load_state_dict(saved)
    assert resumed_optimizer.skipped_steps == 1
    for some, its in ((model, optimizer), (resumed, resumed_optimizer)):
        for part in parts[4:]:
            one_step(some, its, part)
    assert same(everything(resumed, resumed_optimizer), everything(model, optimizer))
    assert resumed_optimizer.state_dict()["counters"] == optimizer.state_dict()["counters"]


@pytest.mark.ci
def test_a_failing_disk_on_the_device_path_leaves_counts_and_scale(tmp_path):
    from tests.support.disks.faults import spoil_block

    model, optimizer = wrapped("fp16", SimBackend(updates_by_triton=True), tmp_path, 0.5)
    (batch,) = token_batches(1, 1)
    one_step(model, optimizer, batch[0])
    before = everything(model, optimizer), optimizer.state_dict()["counters"]
    token_loss(model, batch[0]).backward()
    restore = spoil_block(optimizer, 2)
    with pytest.raises(RuntimeError, match="block 2 "):
        optimizer.step()
    restore()
    assert same(everything(model, optimizer), before[0])
    assert optimizer.state_dict()["counters"] == before[1]
