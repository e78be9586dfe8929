"""`update="auto"`: steps are what the plan prices lowest, with the bits of serial ones."""

import pytest

from gemini import AutoPlacement
from gemini.placement.draft import PlanResult
from gemini.placement.timetable.allowed import NO_BUFFERS
from gemini.placement.timetable.updates import (
    BEHIND,
    IN_BACKWARD,
    UPDATES,
    best_update,
)
from tests.support.loops.early import same
from tests.support.loops.tails import SCHEDULES, run

PLAIN = SCHEDULES["plain"]


def automatic(schedule, **options):
    """For every step whether it had a tail, and whether a backward updated; the plan, and the
    first line of what is said of updates."""
    found = same(schedule, "auto", **options)
    with run(schedule, "auto", **options) as (model, _, _):
        lines = model.explain(next(iter(model.engine.layout.params)).name).splitlines()
        said = next((line for line in lines if line.startswith("update: ")), None)
        early = [report.speculated > 0 for report in found.early]
        return found.tails, early, model.engine.planning.result, said


@pytest.mark.parametrize("best", UPDATES)
def test_steps_are_what_the_plan_prices_lowest(best, monkeypatch):
    monkeypatch.setattr(PlanResult, "best_update", best)
    tails, early, _, said = automatic(PLAIN)
    assert tails == [best in BEHIND] * 4
    assert any(early) == (best in IN_BACKWARD)
    rest = "behind the next forward" if best in BEHIND else "in step()"
    in_backward = "in backward, and the rest " * (best in IN_BACKWARD)
    assert said == f"update: {in_backward}{rest}"


def test_the_choice_is_that_of_the_prices(monkeypatch):
    planned = automatic(PLAIN)[2]
    assert planned.seconds_by_update.keys() == set(UPDATES)
    assert planned.best_update == best_update(planned.seconds_by_update)
    for best in UPDATES:
        prices = {update: 2.0 - (update == best) for update in UPDATES}
        monkeypatch.setattr(PlanResult, "seconds_by_update", prices)
        assert planned.best_update == best


LEAST = AutoPlacement("130KiB")


def test_a_rule_is_above_the_choice(monkeypatch):
    monkeypatch.setattr(PlanResult, "best_update", "both")
    tails, early, _, said = automatic(PLAIN, placement_policy=LEAST)
    assert not any(tails) and not any(early)
    assert said == f"update: serial, as {NO_BUFFERS}"
