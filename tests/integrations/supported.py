"""What works through each trainer, and which test shows it: the tables of docs/trainers.md.

`make readme-tables` writes them; a test compares, and looks for every test that is named.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Row:
    """One thing that people do with a trainer."""

    what: str
    how: str  # in a few words: as it works here, or "refused: " and what to do
    test: str  # "FILE::NAME", FILE below tests/


OPTIMIZERS = (
    Row(
        "`torch.optim.AdamW`, `Adam`",
        "become `HybridAdam`: L2 and decoupled decay, `amsgrad`, `maximize`, groups, a rate that "
        "is a tensor",
        "integrations/test_torch_optimizers.py::test_updates_and_schedules_are_torchs",
    ),
    Row(
        "`torch.optim.SGD`",
        "becomes `HybridSGD`: momentum, dampening, nesterov, `maximize`",
        "integrations/test_torch_optimizers.py::test_updates_and_schedules_are_torchs",
    ),
    Row(
        "a `Lion`",
        "becomes `HybridLion`; options that change its formula are refused by name",
        "integrations/test_torch_optimizers.py::test_a_decoupled_lion_is_refused",
    ),
    Row(
        "state that it has",
        "is taken over",
        "integrations/test_torch_optimizers.py::test_state_that_it_has_goes_on",
    ),
    Row(
        "another optimizer, a subclass, a replaced `step`",
        "refused, with what is taken",
        "integrations/test_torch_optimizers.py"
        "::test_what_has_no_meaning_here_is_refused_and_nothing_changes",
    ),
)

SUPPORTED: dict[str, tuple[Row, ...]] = {
    "optimizers": OPTIMIZERS,
}


def table(library: str) -> str:
    """A markdown table of the library's rows."""
    rows = [f"| {row.what} | {row.how} |" for row in SUPPORTED[library]]
    return "\n".join(["| what | here |", "|---|---|", *rows])
