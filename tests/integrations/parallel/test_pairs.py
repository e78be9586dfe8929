"""Any two ways to use ranks together, in stages too, at up to 8 ranks; against one process."""

from itertools import combinations, product
from math import prod

import pytest

from tests.integrations.cases.hybrid_runs import check_trained

pytest.importorskip("transformers")
pytestmark = pytest.mark.ci
NAMES = ("tp_size", "ep_size", "extra_dp_size", "data", "sequence_parallelism_mode", "pp_style")
VALUES = (
    (1, 2), (1, 2), (1, 2), (1, 2), (None, "split_gather", "all_to_all", "ring_attn"),
    (None, "1f1b", "interleaved", "zbv"),
)  # fmt: skip


def sizes(row):
    """Of the dimensions of a mesh."""
    *counts, mode, style = row
    return [*counts, 2 if mode in ("all_to_all", "ring_attn") else 1, 2 if style else 1]


def may_be(row):
    """tp splits experts by itself, and its ranks are those of split_gather."""
    tp, ep, _, _, mode, _ = row
    return 1 < prod(sizes(row)) <= 8 and tp * ep < 4 and (mode != "split_gather" or tp == 2)


def rows_of(candidates):
    """Few of these, in which all pairs of values occur that occur in any: greedily."""
    of = {row: set(combinations(enumerate(row), 2)) for row in candidates}
    missing, found = set().union(*of.values()), []
    while missing:
        row = max(candidates, key=lambda one: len(of[one] & missing))
        missing -= of[row]
        found.append(row)
    return found


ROWS = rows_of([row for row in product(*VALUES) if may_be(row)])


def options_of(row):
    given = dict(zip(NAMES, row, strict=True))
    del given["data"]  # what is left of the ranks
    mode, style = given["sequence_parallelism_mode"], given.pop("pp_style")
    given |= {"zero_stage": 1, "pp_size": 2 if style else 1}
    if mode:
        given |= {"enable_sequence_parallelism": True}
    if sizes(row)[4] == 2:
        given |= {"sp_size": 2}
    if style:
        given |= {"pp_style": style, "num_model_chunks": 1 if style == "1f1b" else 2}
        given |= {"dp_outside": style != "interleaved"}
    return given


def kind_of(row):
    return "Qwen2-MoE long shared" if row[1] > 1 else "Llama long shared"


def label(row):
    return ", ".join(
        f"{n.partition('_')[0]} {v}" for n, v in zip(NAMES, row, strict=True) if v not in (1, None)
    )


ALL = {
    ranks: [
        (label(row), kind_of(row), options_of(row)) for row in ROWS if prod(sizes(row)) == ranks
    ]
    for ranks in (2, 4, 8)
}
CASES = {**ALL, 8: ALL[8][::3]}  # the rest: tests/deep/meshes/


def test_any_two_train_as_one_process(found, ranks, case):
    check_trained(found[ranks], case)
