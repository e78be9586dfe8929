"""Published layouts beside predicted ones."""

import pytest

from bench import published
from gemini.layouts.shape import decoder

TOLD = published.published()
FOUND = [published.predicted(point, TOLD) for point in TOLD["points"]]


def test_points_name_their_sources_machines_and_models():
    for point in TOLD["points"]:
        assert TOLD["sources"][point["source"]].startswith("https://")
        assert point["machine"] in TOLD["machines"] and point["model"] in TOLD["models"]
        layouts = list(published.layouts_of(point))
        assert layouts, point
        for layout in layouts:
            assert layout.ranks == point["ranks"], point


@pytest.mark.parametrize("name", TOLD["models"])
def test_sizes_of_models_are_those_of_their_names(name):
    """Within what names round away: MPT's to a digit, one of them far."""
    billions = float(name.rpartition("-")[2].removesuffix("b"))
    near = 0.35 if name.startswith("mpt") else 0.03
    assert decoder(name, **TOLD["models"][name]).numel / 1e9 == pytest.approx(billions, rel=near)


def test_points_that_determine_constants_are_met_and_count_in_no_error():
    fitted = [one for one in FOUND if "fit" in one.point]
    assert len(fitted) == 7
    assert all(one.speed == pytest.approx(1.0, abs=2e-3) for one in fitted)
    result = published.summary(FOUND)
    assert result["points"] - result["determine constants"] == 55


def test_constants_are_those_that_are_determined():
    again = published.published()
    published.fit(again)
    for name, machine in TOLD["machines"].items():
        for constant, value in machine.items():
            if isinstance(value, float):
                assert again["machines"][name][constant] == pytest.approx(value, rel=5e-3)


def test_speeds_are_predicted_within_what_is_asked():
    result = published.summary(FOUND)
    assert result["median error"] <= 0.15
    assert result["largest error"] <= 0.35


def test_memory_is_told_where_it_was_published():
    told = [one for one in FOUND if one.memory is not None]
    assert len(told) == 17
    assert published.summary(FOUND)["median error of memory"] <= 0.10
