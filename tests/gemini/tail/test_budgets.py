"""A tail beside budgets: gradients that live into the next forward are in the plan, and count."""

import warnings

import pytest

from bench.shared.workers import run_ranks
from gemini import AutoPlacement, BudgetWarning
from gemini.memtracer.monitor import ProcessMonitor
from gemini.placement.tiers import Tier
from tests.support.loops.early import reported
from tests.support.loops.tails import (
    SCHEDULES,
    differences,
    everything,
    late_updates,
    run,
    wrapped,
)

FILES_FIRST, ENOUGH = "400KiB", "2MiB"  # with the first, parameters rise from files when traced
RISE = ("plain", "clips", "skips", "accumulates")  # others leave gradients in files


@pytest.mark.parametrize(
    "name, budget",
    [*((name, ENOUGH) for name in SCHEDULES), *((name, FILES_FIRST) for name in RISE)],
)
def test_every_schedule_has_the_bits_of_serial_steps(name, budget):
    found = {}
    policy = AutoPlacement(budget)
    for update in ("serial", "tail"):
        with run(SCHEDULES[name], update, placement_policy=policy) as (model, optimizer, tails):
            assert any(tails) == (update == "tail")
            found[update] = everything(model, optimizer)
    assert differences(found["tail"], found["serial"]) == []


def on_ranks(rank):
    found = []
    for budget in (FILES_FIRST, "1MiB", "4MiB"):  # shared by them
        for name in ("clips", "skips"):
            by_update, policy = {}, AutoPlacement(budget)
            for update in ("serial", "tail"):
                with run(SCHEDULES[name], update, placement_policy=policy) as (m, optimizer, tails):
                    by_update[update] = everything(m, optimizer)
            found.append((any(tails), differences(by_update["tail"], by_update["serial"])))
    return found


@pytest.mark.ci
def test_ranks_that_share_a_budget_have_the_bits_of_serial_steps():
    """What they gather waits, and is released while blocks are updated."""
    for found in run_ranks(on_ranks, 2):
        assert [different for _, different in found] == [[]] * 6
        assert [has_tail for has_tail, _ in found[-2:]] == [True] * 2


@pytest.mark.parametrize("budget", [FILES_FIRST, ENOUGH])
def test_held_gradients_count_and_pass_no_budget(budget, monkeypatch):
    """No block is updated before a forward waits for the first. What libraries allocate once is not
    measured, so that all steps behind the first have a tail in a new process, too."""
    monkeypatch.setattr(ProcessMonitor, "period", lambda monitor: 0)
    model, optimizer = wrapped("tail", placement_policy=AutoPlacement(budget))
    ledger, budget_bytes = model.engine.manager.ledger, model.engine.planning.plan.budgets.device
    gradient_bytes = sum(chunk.spec.payload_bytes for chunk in model.engine.chunks)
    held = []
    with warnings.catch_warnings():
        warnings.simplefilter("error", BudgetWarning)  # in forward, too
        for _ in late_updates(model, optimizer, 4):
            held.append(ledger.held_bytes())
            assert ledger.totals()[Tier.DEVICE] <= budget_bytes
    assert held[1:] == [gradient_bytes] * 3
    assert optimizer.last_report.behind.wait().committed
    optimizer.close()


@pytest.mark.parametrize("name", SCHEDULES)
def test_and_so_has_every_schedule_whose_steps_begin_in_backward(name):
    policy = AutoPlacement(ENOUGH)
    with run(SCHEDULES[name], "serial", placement_policy=policy) as (model, optimizer, _):
        serial = everything(model, optimizer)
    found, reports = reported(SCHEDULES[name], "both", placement_policy=policy)
    assert differences(found, serial) == []
    assert any(report.held for report in reports) == (name not in ("clips", "writes"))
