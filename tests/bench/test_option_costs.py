"""What options cost: rows of a bench, and whether each option is what it measures."""

import pytest

from bench import option_costs
from bench.option_costs import in_turns, measured, row


def test_a_row_has_the_median_of_the_ratios_of_rounds():
    found = row("marks", [[1.0, 2.0, 4.0], [1.5, 2.0, 8.0]], bytes_ratio=1.0)
    assert found == {
        "option": "marks", "seconds_without": 2.0, "ratio": 1.5, "least": 1.0, "most": 2.0,
        "bytes_ratio": 1.0,
    }  # fmt: skip


def test_jobs_take_turns_and_rounds_of_the_warm_up_do_not_count(monkeypatch):
    monkeypatch.setattr(option_costs, "WARM_UP", 1)
    seen = []

    def clock(job):
        seen.append(job)
        return float(len(seen))

    assert in_turns(["a", "b"], clock, 2) == [[3.0, 6.0], [4.0, 5.0]]
    assert "".join(seen) == "baabba"


@pytest.mark.ci
def test_every_option_is_measured_beside_a_step_without_it():
    deltas, receipts, canonical = measured("tiny", 1)
    assert [one["option"] for one in (deltas, receipts, canonical)] == [
        "deltas", "receipts", "canonical",
    ]  # fmt: skip
    assert canonical["bytes_ratio"] == 1.0
