"""Drawn programs: the updates of torch, or an error. Several ranks are in tests/dist."""

import pytest
import torch

from tests.support.loops import ADAM
from tests.support.programs import PLACES, is_wrong, run_many

NUM_PROGRAMS = 300


@pytest.mark.parametrize("part", range(3))
def test_drawn_programs_have_the_updates_of_torch_or_are_refused(part):
    count = NUM_PROGRAMS // 3
    report = run_many(0, part * count, count)
    assert report.wrong == ()
    assert report.ran > 0.9 * count and report.ran + sum(report.refused.values()) == count


@pytest.mark.parametrize("place", PLACES)
def test_a_program_that_differs_is_found(place, monkeypatch):
    """The comparison itself can fail: an update that one side does not make."""
    program = [("forward", (0, "")), ("backward", (1, "")), ("step", ())]
    assert is_wrong(program, place) is None
    monkeypatch.setattr("tests.support.loops.ADAM", {**ADAM, "lr": 0.9 * ADAM["lr"]})
    monkeypatch.setattr("tests.support.programs.plain", _plain)
    assert "differs" in is_wrong(program, place)


def _plain(build):
    return (module := build()), torch.optim.AdamW(module.parameters(), foreach=False, **ADAM)
