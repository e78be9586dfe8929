"""The committed matrix keeps its bounds; tests/dist makes a part of it anew."""

import json
from pathlib import Path

from bench.numerics import BOUNDS, PLACEMENTS, pairs

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
