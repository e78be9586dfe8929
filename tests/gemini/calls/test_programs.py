"""Drawn programs: the updates of torch, or an error. Several ranks are in tests/dist."""

import pytest
import torch

from bench.shared.workers import run_ranks
from tests.support.loops.programs import (
    IN_KERNELS,
    PLACES,
    Found,
    all_found,
    draw_doors,
    found_again,
    is_wrong,
    keep,
    run_many,
)
from tests.support.loops.sides import ADAM, depth_at

CI = pytest.mark.ci
FOUND = [(found, place) for found in all_found() for place in found.places]


# What more of them found is in the corpus; `deep` draws on.
@pytest.mark.parametrize(("first", "count"), [(0, 50), pytest.param(50, 100, marks=CI)])
def test_drawn_programs_have_the_updates_of_torch_or_are_refused(first, count):
    report = run_many(0, first, count)
    assert report.wrong == ()
    assert report.ran > 0.9 * count and report.ran + sum(report.refused.values()) == count


@pytest.mark.ci
def test_drawn_programs_where_kernels_update_beside_the_pass():
    report = run_many(0, 0, 10, IN_KERNELS)
    assert report.wrong == () and report.ran > 8


@pytest.mark.ci
def test_drawn_programs_under_wrappers_through_files_have_the_updates_of_torch():
    report = run_many(0, 0, 40, PLACES, drawn=draw_doors)
    assert report.wrong == ()
    assert report.ran > 0.6 * 40 and report.ran + sum(report.refused.values()) == 40


@pytest.mark.parametrize(("found", "place"), FOUND, ids=[f"{f.name}-{place}" for f, place in FOUND])
def test_programs_that_were_wrong_once_are_right(found, place):
    assert is_wrong(found.program, place) is None, found.why


@pytest.mark.ci
def test_programs_that_were_wrong_once_are_right_on_two_ranks():
    assert run_ranks(found_again, 2, ["resident", "nvme"]) == [[], []]


def test_a_program_that_is_wrong_is_kept_where_tests_find_it(tmp_path):
    program = [("begin", (False, True)), ("drop_gradient", (None,)), ("step", ())]
    path = keep("differs by 1", "host", program, tmp_path)
    assert keep("differs by 2", "nvme", program, tmp_path) == path
    assert all_found(tmp_path) == [Found(path.stem, "differs by 2", ("host", "nvme"), program)]


@pytest.mark.parametrize("place", PLACES)
def test_a_program_that_differs_is_found(place, monkeypatch):
    """The comparison itself can fail: an update that one side does not make."""
    program = [("forward", (0, "")), ("backward", (1, "")), ("step", ())]
    assert is_wrong(program, place) is None
    monkeypatch.setattr("tests.support.loops.sides.ADAM", {**ADAM, "lr": 0.9 * ADAM["lr"]})
    monkeypatch.setattr("tests.support.loops.programs.plain", _plain)
    assert "differs" in is_wrong(program, place)


def _plain(build, place):
    return (module := build(depth_at(place))), torch.optim.AdamW(
        module.parameters(), foreach=False, **ADAM
    )
