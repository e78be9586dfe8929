"""Ctrl-C at any line of a step: taken again, it has the bits that it would have had."""

import signal

import pytest

from tests.support import corpus
from tests.support.lines import Life, Point, points_of, search, some

CI = pytest.mark.ci
FOUND = corpus.read("lines")


@pytest.mark.parametrize(
    "found",
    [pytest.param(f, id=n, marks=[CI] if "files" in f["place"] else []) for n, f in FOUND.items()],
)
def test_lines_where_ctrl_c_did_harm_once(found):
    assert search(found["place"], [Point(**found["point"])], found["repeats"]) == (1, 1)


@pytest.mark.ci
@pytest.mark.parametrize(
    ("place", "count"),
    [
        ("serial, host, fp32", 30),
        ("serial, nvme, bf16", 20),
        ("speculate, nvme, fp32", 20),
        ("tail, nvme, bf16", 20),
        ("both, files, bf16", 8),
    ],
)
def test_a_step_that_ctrl_c_came_into_can_be_taken_again(place, count):
    points = some(place, count)
    assert len({point.where for point in points}) >= count
    tried, came = search(place, points)
    assert tried == len(points) and came > 0.8 * tried  # of blocks that a thread updates, some vary


def test_a_step_that_differs_is_found():
    before = signal.getsignal(signal.SIGINT)
    life = Life("serial, host, fp32")
    life.interrupt(Point("none", "none", "none", 0, 1))
    life.model.module.layers[0].bias.data += 1
    with pytest.raises(AssertionError, match="differ"):
        life.interrupt(Point("none", "none", "none", 0, 1))
    life.end()
    assert signal.getsignal(signal.SIGINT) is before


def test_points_are_where_python_looks_for_signals():
    from gemini.units import align_up

    (point,) = (p for p in points_of(lambda: align_up(5, 4)) if p.function == "align_up")
    assert point == Point("gemini/units.py", "align_up", point.line, 0, 1)
    assert point.line.startswith("def align_up(")
