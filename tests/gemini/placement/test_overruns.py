"""A hard budget that is passed is said: as a warning, in reports, and among the deviations."""

import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn

from bench.shared.models import Tower, token_batches, token_loss
from bench.shared.simulated import SimBackend
from gemini import AutoPlacement, BudgetWarning, ConstPlacement, GeminiDDP, trace
from gemini.chunk.layout import specs_of
from gemini.memtracer import monitor
from gemini.memtracer.trace import sequential_trace
from gemini.placement.overruns import Overruns
from gemini.placement.sizes import BudgetError, Budgets
from gemini.placement.tiers import Tier
from optim import HybridAdam
from tests.support.spilled import BLOCKS, SMALL, homes, wrapped

D, N = Tier.DEVICE, Tier.NVME
IDS = torch.zeros(4, 9, dtype=torch.int64)


def made(kib, module=None, trace=None, **policy):
    placement = AutoPlacement(round(kib * 1024), **policy)
    model = GeminiDDP(module or Tower(), placement_policy=placement, trace=trace, **SMALL)
    return model, HybridAdam(model.parameters(), nvme=BLOCKS)


def train(model, optimizer, batches, num_backwards=1):
    for (ids,) in batches:
        for _ in range(num_backwards):
            token_loss(model, ids).backward()
        optimizer.step()
        optimizer.zero_grad()


def said(model):
    """What the reports and the deviations say, which is the same."""
    lines = model.memory_report().overruns
    assert all(line in str(model.memory_report()) for line in lines)
    assert all(line in model.explain("head.weight") for line in lines)
    return lines


@pytest.fixture
def no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error", BudgetWarning)
        yield


def test_a_model_within_its_budget_says_nothing(no_warning):
    model, optimizer = made(400, trace=trace(Tower(), (IDS,)))
    train(model, optimizer, token_batches(3, 1))
    with torch.no_grad():
        model(IDS)
    with model.summon_full_params():  # more than the budget, as the user asks for it
        pass
    assert said(model) == () and model.memory_stats.deviations == []


def test_activations_that_pass_a_budget_are_measured_and_said():
    """The trace was of a small batch; what forward leaves of a large one is known exactly."""
    small, large = torch.zeros(1, 3, dtype=torch.int64), torch.zeros(40, 9, dtype=torch.int64)
    model, optimizer = made(400, trace=trace(Tower(), (small,)))
    with warnings.catch_warnings():
        warnings.simplefilter("error", BudgetWarning)
        train(model, optimizer, [(small,)])
    with pytest.warns(BudgetWarning, match=r"device: the budget .* activations and temporaries"):
        train(model, optimizer, [(large,)])
    (line,) = said(model)
    assert "400.00 KiB, was passed by" in line and "at forward" in line
    (deviation,) = model.memory_stats.deviations
    assert str(deviation) == line
    needed = trace(Tower(), (large,)).peak_non_model_bytes
    assert 0.5 * needed < deviation.other_bytes <= needed
    with warnings.catch_warnings():  # once
        warnings.simplefilter("error", BudgetWarning)
        train(model, optimizer, [(large,), (small,)])


def test_the_warning_is_of_the_line_of_the_users_loop():
    model, optimizer = made(130, trace=sequential_trace(specs_of(Tower(), "bfloat16")))
    with pytest.warns(BudgetWarning) as found:
        train(model, optimizer, token_batches(2, 1))
    assert found[0].filename in (__file__, token_loss.__code__.co_filename)


def test_model_data_that_passes_a_budget_is_said(tmp_path):
    """A trace that lacks the backward of some modules: what runs is not what was planned."""

    class Wide(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(8))

        def forward(self, x):
            for layer in self.layers:
                x = torch.relu(layer(x))
            return x.sum()

    whole = trace(Wide(), (torch.zeros(2, 64),))
    lost = [f"layers.{i}" for i in range(0, 8, 2)]
    moments = [m for m in whole.moments if m.phase == "forward" or m.module not in lost]
    short = replace(whole, moments=tuple(replace(m, non_model_bytes=0) for m in moments))
    with pytest.raises(BudgetError) as info:
        made(1, Wide(), short)
    budget = 1024 + info.value.missing_bytes
    model, optimizer = made(budget / 1024, Wide(), short)
    with pytest.warns(BudgetWarning, match=r"device: the budget .* give the trace= of this loop"):
        for _ in range(2):
            model(torch.zeros(2, 64)).backward()
            optimizer.step()
            optimizer.zero_grad()
    passed = [d for d in model.memory_stats.deviations if hasattr(d, "tier")]
    assert passed[-1].model_bytes > budget == passed[-1].budget_bytes
    assert str(passed[-1]) in model.memory_report().overruns
    model.memory_stats.dump_memory_stats(tmp_path / "stats.json")
    assert "was passed by" in (tmp_path / "stats.json").read_text(encoding="utf-8")


def test_backwards_that_add_up_beyond_a_budget_are_said():
    """Sums are in fp32, which no plan of one backward has room for."""
    model, optimizer = wrapped(ConstPlacement("130KiB"))
    with pytest.warns(BudgetWarning, match="add up fewer backwards before a step"):
        train(model, optimizer, token_batches(2, 1), num_backwards=2)
    assert any("model data" in line for line in said(model))


def test_a_const_budget_is_not_passed_by_activations(no_warning):
    model, optimizer = wrapped(ConstPlacement("160KiB"))
    train(model, optimizer, [(torch.zeros(40, 9, dtype=torch.int64),)])
    assert said(model) == ()


# -- measured iterations that do not fit --


@pytest.fixture
def process(monkeypatch):
    """What the process is said to have grown by in every period: a list, the last one stays."""
    grown = [0]
    monkeypatch.setattr(monitor.ProcessMonitor, "period", lambda self: grown[0])
    return grown


def iterate(model, optimizer, process, nbytes):
    process[0] = nbytes
    train(model, optimizer, token_batches(1, 1))


def test_what_only_the_first_iteration_took_is_measured_again(process, no_warning):
    """Libraries allocate once. Homes rise with what the second one took."""
    model, optimizer = made(200 << 10, warmup_non_model_data_ratio=0.9995)
    assert N in set.union(*homes(model))
    iterate(model, optimizer, process, 300 << 20)
    assert N in set.union(*homes(model)) and not model.engine.planning.has_trace
    iterate(model, optimizer, process, 1 << 20)
    assert homes(model) == ({D}, {D}, {D})
    assert said(model) == ()


def test_an_iteration_that_fits_nowhere_is_said_before_it_comes_when_it_was_measured_twice(process):
    model, optimizer = made(200 << 10)
    with warnings.catch_warnings():
        warnings.simplefilter("error", BudgetWarning)
        for _ in range(2):
            iterate(model, optimizer, process, 300 << 20)
        with pytest.raises(BudgetWarning, match=r"of int64\[4, 9\] needs more .* device_budget of"):
            model(IDS)  # no operator of it runs
    (line,) = said(model)
    assert "raise device_budget by as much" in line
    with warnings.catch_warnings():
        warnings.simplefilter("error", BudgetWarning)
        iterate(model, optimizer, process, 300 << 20)


def test_an_iteration_that_fits_in_lower_homes_finds_them(process, no_warning):
    model, optimizer = made(200 << 10, warmup_non_model_data_ratio=0.1)
    model.engine.planning.overruns.noise_bytes = 0
    assert homes(model) == ({D}, {D}, {D})
    for _ in range(2):
        iterate(model, optimizer, process, (200 << 20) - (250 << 10))
    assert N in homes(model)[2] and said(model) == ()


def test_what_a_process_grows_by_is_known_to_some_mebibytes(process, caplog, no_warning):
    """A tiny budget is passed by what malloc keeps: that is no accusation, but it is reported."""
    model, optimizer = made(600)
    for _ in range(2):
        iterate(model, optimizer, process, 4 << 20)
    assert len(said(model)) == 1
    assert "an iteration needs more memory than was left for it" in caplog.text


def test_homes_on_a_simulated_device_follow_what_operators_made_and_not_the_process(process):
    found = []
    for grown in (0, 300 << 20):
        placement = AutoPlacement("250KiB", "2MiB")
        model = GeminiDDP(Tower(), SimBackend(0), placement, **SMALL)
        optimizer = HybridAdam(model.parameters(), nvme=BLOCKS)
        before = homes(model)
        iterate(model, optimizer, process, grown)
        assert model.engine.planning.has_trace and homes(model) != before
        found.append(homes(model))
    assert found[0] == found[1]


def test_the_allocator_of_a_gpu_does_not_see_what_the_host_holds():
    model, optimizer = wrapped(AutoPlacement("90KiB", "2MiB"), device=SimBackend(0))
    train(model, optimizer, token_batches(1, 1))
    ledger = model.engine.manager.ledger
    totals = ledger.totals()
    assert totals[Tier.HOST] > 0
    assert ledger.memory_bytes() == totals[D] + totals[Tier.HOST]
    assert ledger.device_bytes() == totals[D] <= 90 << 10
    in_use = ledger.bytes_in_use()
    for tier in Tier:
        assert totals[tier] == sum(n for (where, _), n in in_use.items() if where is tier)


def test_the_worst_of_every_tier_is_kept():
    found = Overruns(AutoPlacement(), Budgets(100, 200, 300))
    for tier, nbytes in ((D, 90), (D, 120), (N, 400), (D, 110)):
        found.check(tier, nbytes, 0, "here")
    with pytest.warns(BudgetWarning):
        found.settle()
    assert [(o.tier, o.missing_bytes) for o in found.found] == [(D, 20), (N, 100)]
    found.check(D, 119, 0, "there")
    found.check(Tier.HOST, 200, 0, "there")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found.settle()
    assert len(found.lines()) == 2


def test_a_refusal_is_an_error_and_no_warning(no_warning):
    with pytest.raises(BudgetError):
        made(20)
