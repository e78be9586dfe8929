"""bench.accumulate: both orders end with the same weights, and one reads less."""

import argparse
import warnings

from bench.accumulate import measured, table
from gemini import BudgetWarning


def test_rows_of_both_orders(tmp_path):
    args = argparse.Namespace(width=128, layers=4, seq=8, steps=2, budget=1.0)
    rows = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BudgetWarning)
        for order in ("layers", "batches"):
            rows.append(measured(args, order, 4, str(tmp_path)))
    layers, batches = rows
    assert (layers["digest"], layers["losses"]) == (batches["digest"], batches["losses"])
    assert 0 < layers["read_mib"] < batches["read_mib"]
    assert table(rows).splitlines()[2].startswith("| 4 | ")
