"""The committed matrix keeps its bounds; tests/dist makes a part of it anew."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench.numerics import BOUNDS, PLACEMENTS, pairs
from bench.support import digests

RESULTS = Path(__file__).parents[2] / "bench" / "results" / "numerics-cpu.json"


def test_the_committed_results_have_every_pair_and_one_digest_a_precision():
    results = json.loads(RESULTS.read_text())
    for precision, bound in BOUNDS.items():
        found = {
            p["case"]: p["update_error"] for p in results["pairs"] if p["precision"] == precision
        }
        assert found.keys() == {name for name, _ in pairs(precision)}
        assert max(found.values()) <= bound
        rows = [d for d in results["digests"] if d["precision"] == precision]
        assert {row["placement"] for row in rows} == PLACEMENTS.keys()
        assert len({row["sha256"] for row in rows}) == 1


@pytest.fixture(scope="module")
def every_tier():
    """bf16 on every tier; the matrix of `bench.numerics` has all precisions."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    found = list(digests.cells("bf16"))
    torch.set_num_threads(before)
    return found


@pytest.mark.ci
def test_there_is_one_digest_of_every_schedule_wherever_and_whenever_state_is_updated(every_tier):
    found = {(c.tier, c.update, c.schedule): c for c in every_tier}
    assert len(every_tier) == 4 * 4 * 5 + 1 == len(found)
    assert digests.different(every_tier) == []
    on_host = {c.sha256 for c in every_tier if c.tier != "stream"}
    assert len(on_host) == 5  # what happens in a run changes its bits


@pytest.mark.ci
def test_where_less_is_hidden_than_was_asked_for_the_rule_is_said(every_tier):
    rules = {(c.tier, c.update): c.less_as for c in every_tier}
    for (tier, update), rule in rules.items():
        if update == "serial" or tier == "nvme" or (update == "tail" and tier != "resident"):
            assert rule is None
        elif update == "tail":
            assert rule == "all state is on the device"
        else:
            assert rule == "no state is on NVMe"
    lines = digests.table(every_tier).splitlines()
    assert len(lines) == 1 + 4 * 4
    assert ["less, as " in line for line in lines[1:]] == (
        [False, True, True, True] + 2 * [False, False, True, True] + [False] * 4
    )


@pytest.mark.ci
def test_blocks_on_disk_are_updated_in_backward_where_that_was_asked_for(every_tier):
    speculated = {}
    for one in every_tier:
        key = one.tier, one.update
        speculated[key] = speculated.get(key, 0) + one.num_speculated
    assert speculated.pop(("nvme", "speculate")) > 0
    speculated.pop(("nvme", "both"))  # it goes by the clock
    assert set(speculated.values()) == {0}


@pytest.mark.ci
@pytest.mark.parametrize("schedule", [digests.accumulate, digests.skip])
def test_some_tiers_have_one_digest(schedule):
    """Every tier and every update once; all of them with each other in the slower test."""
    found = [
        digests.cell("bf16", tier, update, schedule)
        for tier, update in zip(digests.TIERS, digests.UPDATES, strict=True)
    ]
    assert digests.different(found) == []


def made_up():
    """What runs say where all is well."""
    return [
        digests.Cell("bf16", tier, update, name, f"{name} {name == 'clip' and tier == 'stream'}")
        for name in digests.SCHEDULES for tier in digests.TIERS for update in digests.UPDATES
    ] + [digests.Cell("bf16", "resident", "serial", "whole", "resume False")]  # fmt: skip


def test_a_digest_that_differs_is_named():
    assert digests.different(made_up()) == []
    for at, name in ((3, "clip"), (-1, "resume")):
        wrong = made_up()
        wrong[at] = replace(wrong[at], sha256="another")
        assert digests.different(wrong) == [f"bf16 {name}"]


def test_only_what_is_clipped_may_differ_where_it_streams():
    """By the last bits of a norm."""
    cells = made_up()
    streams = [i for i, c in enumerate(cells) if c.tier == "stream"]
    for name, at in {cells[i].schedule: i for i in streams}.items():
        wrong = made_up()
        for i in streams:
            if wrong[i].schedule == name:
                wrong[i] = replace(wrong[i], sha256="another")
        assert digests.different(wrong) == ([] if name == "clip" else [f"bf16 {name}"])
        wrong[at] = replace(wrong[at], sha256="a third")
        assert digests.different(wrong) == [f"bf16 {name}"]
