"""A tail beside budgets: gradients that live into the next forward are in the plan, and count."""

import warnings

import pytest

from gemini import AutoPlacement, BudgetWarning
from gemini.placement.tiers import Tier
from tests.support.loops.schedules import ENOUGH, RISING, same
from tests.support.loops.tails import SCHEDULES, late_updates, wrapped


@pytest.mark.parametrize("name", ["clips", pytest.param("skips", marks=pytest.mark.ci),
                                  pytest.param("accumulates", marks=pytest.mark.ci)])  # fmt: skip
def test_steps_have_tails_when_parameters_have_risen_from_files(name):
    """Others leave gradients in files."""
    assert any(same(SCHEDULES[name], "tail", "rising").tails)


@pytest.mark.parametrize("budget", [RISING, ENOUGH])
def test_held_gradients_count_and_pass_no_budget(budget):
    """No block is updated before a forward waits for the first."""
    model, optimizer = wrapped("tail", placement_policy=AutoPlacement(budget))
    ledger, budget_bytes = model.engine.manager.ledger, model.engine.planning.plan.budgets.device
    gradient_bytes = sum(chunk.spec.payload_bytes for chunk in model.engine.chunks)
    held = []
    with warnings.catch_warnings():
        warnings.simplefilter("error", BudgetWarning)  # in forward, too
        for _ in late_updates(model, optimizer):
            held.append(ledger.kept_bytes)
            assert ledger.totals()[Tier.DEVICE] <= budget_bytes
    assert held[1:] == [gradient_bytes] * 3
    assert optimizer.last_report.behind.wait().committed
    optimizer.close()
