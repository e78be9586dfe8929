"""`update="auto"`: steps are what the plan prices lowest, with the bits of serial ones."""

from itertools import cycle

import pytest

from bench.shared.workers import run_ranks
from gemini import AutoPlacement
from gemini.placement.draft import PlanResult
from gemini.placement.timetable.tail import NO_BUFFERS
from gemini.placement.timetable.updates import BEHIND, IN_BACKWARD, UPDATES, best_update
from tests.support.loops.early import Sometimes, patient
from tests.support.loops.tails import SCHEDULES, absent, differences, everything, run

PLAIN = SCHEDULES["plain"]


def told(schedule, speculated):
    """Notes behind every step how many blocks were updated in backward."""

    def steps(model, optimizer):
        for _ in schedule(model, optimizer):
            speculated.append(optimizer.last_report.speculation.speculated)
            yield

    return steps


def automatic(schedule, **options):
    """What it comes to; for every step whether it had a tail, and whether a backward updated; and
    the plan and the first line of what is said of updates."""
    speculated = []
    with patient(), run(told(schedule, speculated), "auto", **options) as (model, optimizer, tails):
        lines = model.explain(next(iter(model.engine.layout.params)).name).splitlines()
        said = next((line for line in lines if line.startswith("update: ")), None)
        found = everything(model, optimizer)
        return found, tails, [n > 0 for n in speculated], model.engine.planning.result, said


def serial(schedule, **options):
    with run(schedule, "serial", **options) as (model, optimizer, _):
        return everything(model, optimizer)


@pytest.mark.parametrize("best", UPDATES)
def test_steps_are_what_the_plan_prices_lowest(best, monkeypatch):
    monkeypatch.setattr(PlanResult, "best_update", best)
    found, tails, early, _, said = automatic(PLAIN)
    assert differences(found, serial(PLAIN)) == []
    assert tails == [best in BEHIND] * 4
    assert any(early) == (best in IN_BACKWARD)
    rest = "behind the next forward" if best in BEHIND else "in step()"
    in_backward = "in backward, and the rest " * (best in IN_BACKWARD)
    assert said == f"update: {in_backward}{rest}"


def test_the_choice_is_that_of_the_prices():
    _, tails, _, planned, _ = automatic(PLAIN)
    assert planned.seconds_by_update.keys() == set(UPDATES)
    assert planned.best_update == best_update(planned.seconds_by_update)
    assert tails == [planned.best_update in BEHIND] * 4


@pytest.mark.parametrize("name", [*SCHEDULES, "absent"])
def test_steps_that_change_with_their_plan_have_the_bits_of_serial_steps(name, monkeypatch):
    """Another choice whenever somebody asks: in a backward, in a step, behind it."""
    schedule = SCHEDULES.get(name, absent)
    options = {"module": Sometimes} if name == "absent" else {}
    choices = cycle(["serial", "both", "both", "tail", "both", "speculate", "speculate"])
    monkeypatch.setattr(PlanResult, "best_update", property(lambda _: next(choices)))
    assert differences(automatic(schedule, **options)[0], serial(schedule, **options)) == []


LEAST = AutoPlacement("130KiB")


def test_a_rule_is_above_the_choice(monkeypatch):
    monkeypatch.setattr(PlanResult, "best_update", "both")
    found, tails, early, _, said = automatic(PLAIN, placement_policy=LEAST)
    assert not any(tails) and not any(early)
    assert said == f"update: serial, as {NO_BUFFERS}"
    assert differences(found, serial(PLAIN, placement_policy=LEAST)) == []


def on_ranks(rank):
    found, tails, _, planned, said = automatic(PLAIN)
    return differences(found, serial(PLAIN)), tails, planned.best_update, said


@pytest.mark.ci
def test_ranks_whose_passes_nobody_timed_do_both():
    for different, tails, best, said in run_ranks(on_ranks, 2):
        assert different == [] and all(tails) and best == "both"
        assert said == "update: in backward, and the rest behind the next forward"
