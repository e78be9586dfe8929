"""Drawn programs: the updates of torch, or an error. Several ranks are in tests/dist."""

import pytest
import torch

from tests.support.loops.programs import IN_KERNELS, PLACES, is_wrong, run_many
from tests.support.loops.sides import ADAM

NUM_PROGRAMS = 300


@pytest.mark.parametrize("part", range(3))
def test_drawn_programs_have_the_updates_of_torch_or_are_refused(part):
    count = NUM_PROGRAMS // 3
    report = run_many(0, part * count, count)
    assert report.wrong == ()
    assert report.ran > 0.9 * count and report.ran + sum(report.refused.values()) == count


@pytest.mark.ci
def test_drawn_programs_where_kernels_update_beside_the_pass():
    report = run_many(0, 0, 60, IN_KERNELS)
    assert report.wrong == () and report.ran > 54


ONE_BACKWARD = [("forward", (13, "")), ("backward", (1, ""))]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("first", ["clip", "clip_by_optimizer"])
@pytest.mark.parametrize("how", ["2", "value"])
@pytest.mark.parametrize(
    "then", [("assign_gradient", (2, 1)), ("scale_gradients", (2.0, 1)), ("drop_gradient", (3,))]
)
def test_gradients_that_were_clipped_are_changed_and_clipped_again(place, first, how, then):
    program = [*ONE_BACKWARD, (first, (how,)), then, ("read_gradients", ()), ("clip", ("2",))]
    assert is_wrong([*program, ("step", ())], place) is None


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("how", ["2", "value"])
def test_gradients_are_clipped_twice_and_added_to(place, how):
    clips = [("clip_by_optimizer", (how,)), ("clip_by_optimizer", ("2",))]
    program = [*ONE_BACKWARD, *clips, *ONE_BACKWARD, ("clip_by_optimizer", ("inf",)), ("step", ())]
    assert is_wrong(program, place) is None


def test_a_parameter_comes_back_to_the_host_before_it_is_gathered_again():
    """Some of its blocks are on disk, and what is in memory is updated beside the next pass."""
    one_step = [("forward", (13, "")), ("backward", (1, "")), ("step", ())]
    assert is_wrong([*one_step, *one_step, ("forward", (17, ""))], "stream, both") is None
    assert (
        is_wrong(
            [("assign_gradient", (0, 27)), ("step", ()), ("forward", (22, ""))], "stream, both"
        )
        is None
    )


@pytest.mark.parametrize("place", PLACES)
def test_a_program_that_differs_is_found(place, monkeypatch):
    """The comparison itself can fail: an update that one side does not make."""
    program = [("forward", (0, "")), ("backward", (1, "")), ("step", ())]
    assert is_wrong(program, place) is None
    monkeypatch.setattr("tests.support.loops.sides.ADAM", {**ADAM, "lr": 0.9 * ADAM["lr"]})
    monkeypatch.setattr("tests.support.loops.programs.plain", _plain)
    assert "differs" in is_wrong(program, place)


def _plain(build):
    return (module := build()), torch.optim.AdamW(module.parameters(), foreach=False, **ADAM)
