"""The committed matrix keeps its bounds; tests/dist makes a part of it anew."""

import json
from dataclasses import replace
from pathlib import Path

from bench.numerics import BOUNDS, PLACEMENTS, pairs
from bench.support import digests

RESULTS = Path(__file__).parents[2] / "bench" / "results" / "numerics-cpu.json"


def test_the_committed_results_have_every_pair_and_one_digest_a_precision():
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    for precision, bound in BOUNDS.items():
        found = {
            p["case"]: p["update_error"] for p in results["pairs"] if p["precision"] == precision
        }
        assert found.keys() == {name for name, _ in pairs(precision)}
        assert max(found.values()) <= bound
        rows = [d for d in results["digests"] if d["precision"] == precision]
        assert {row["placement"] for row in rows} == PLACEMENTS.keys()
        assert len({row["sha256"] for row in rows}) == 1


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
