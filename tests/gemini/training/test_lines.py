"""Ctrl-C at any line of a step: taken again, it has the bits that it would have had."""

import signal

import pytest

from gemini.placement.timetable.updates import TAIL
from tests.support import corpus, lines
from tests.support.lines import (
    BEGINS,
    PLACES,
    Life,
    Point,
    ctrl_c,
    made,
    points_of,
    search,
    some,
    step,
)
from tests.support.loops import interrupted
from tests.support.loops.tails import has_tail

CI = pytest.mark.ci
FOUND = corpus.read("lines")
ONE_RANK = [name for name, place in PLACES.items() if place.ranks == 1]


@pytest.mark.parametrize(
    "found",
    [pytest.param(f, id=n, marks=[CI] if "files" in f["place"] else []) for n, f in FOUND.items()],
)
def test_lines_where_ctrl_c_did_harm_once(found):
    sent = found.get("sent", "ctrl-c")
    assert search(found["place"], [Point(**found["point"])], found["repeats"], sent) == (1, 1)


@pytest.mark.ci
@pytest.mark.parametrize(
    ("place", "count", "sent"),
    [
        ("serial, host, fp32", 30, "ctrl-c"),
        ("serial, nvme, bf16", 20, "ctrl-c"),
        ("serial, nvme, bf16", 10, "time-out"),
        ("tail, nvme, bf16", 20, "ctrl-c"),
        ("tail, cpu, fp32", 10, "ctrl-c"),
        ("tail, files, bf16", 20, "ctrl-c"),
        ("tail, nvme, bf16", 10, "time-out"),
        ("tail, nvme, bf16, 2 ranks", 10, "ctrl-c"),
    ],
)
def test_a_step_that_a_signal_came_into_can_be_taken_again(place, count, sent):
    points = some(place, count)
    assert len({point.where for point in points}) >= count
    tried, came = search(place, points, sent=sent)
    # of blocks that a thread updates, some vary; and see `tests.support.lines.Together`
    assert tried == len(points) and came > 0.5 * tried


@pytest.mark.parametrize(
    "place",
    [name for name, place in PLACES.items() if place.update != "serial" and place.ranks == 1],
)
def test_places_have_the_updates_that_they_name(place):
    """And not serial steps where a budget has no room for others."""
    model, optimizer = made(place)
    for number in range(4):
        assert model.engine.overlap.in_use() == PLACES[place].update == TAIL
        step(model, optimizer, number)
        assert has_tail(optimizer)
    optimizer.close()


def test_a_step_that_differs_is_found():
    before = signal.getsignal(signal.SIGINT)
    life = Life("serial, host, fp32")
    life.interrupt(Point("none", "none", "none", BEGINS, 1))
    life.model.module.layers[0].bias.data += 1
    with pytest.raises(AssertionError, match="differ"):
        life.interrupt(Point("none", "none", "none", BEGINS, 1))
    life.end()
    assert signal.getsignal(signal.SIGINT) is before


class Held:
    def __enter__(self):
        self.names = ["a", "b"]

    def __exit__(self, *_):
        pass


def doubled(names):
    for name in names:
        yield 2 * name


def visited(names):
    held = Held()
    with held:
        for name in doubled(names):
            held.names.append(name)
            held.names[0] += name
        held.names += names
    return held.names[0]


VISITED = [  # by a line of `visited` or `doubled`, what looks for signals there, and how often
    ("def visited(names):", "begins", 1),
    ("with held:", "behind __exit__", 1),
    ("for name in doubled(names):", "goes round", 2),
    ("held.names.append(name)", "behind append", 2),
    ("def doubled(names):", "begins", 1),
    ("yield 2 * name", "begins", 2),
    ("for name in names:", "goes round", 2),
    ("def __exit__(self, *_):", "begins", 1),
    ("def __enter__(self):", "begins", 1),
]


def test_points_are_where_python_looks_for_signals(monkeypatch):
    """And neither behind an operator or `__enter__`, nor between lines that call nothing."""
    monkeypatch.setattr(lines, "OURS", (__file__,))
    points = points_of(lambda: visited("cd"))
    found = {(p.line, p.look, p.time) for p in points if p.function != points[0].function}
    assert found == {(line, look, n) for line, look, most in VISITED for n in {1, most}}


def test_a_signal_behind_a_call_is_raised_by_that_call(monkeypatch):
    """Inside of the `try` around it, with what it did done."""
    monkeypatch.setattr(lines, "OURS", (__file__,))
    held, caught = ["a"], []

    def takes():
        try:
            taken = held.pop()
        except KeyboardInterrupt:
            caught.append(list(held))
        else:
            held.append(taken)

    (point,) = (p for p in points_of(takes) if p.look == "behind pop")
    with ctrl_c(point) as came:
        takes()
    assert came == [point] and caught == [[]] == [held]


# -- drawn programs --


@pytest.mark.parametrize("found", corpus.read("interrupted").values(), ids=lambda f: f["place"])
def test_drawn_programs_where_ctrl_c_did_harm_once(found):
    here = interrupted.Program.read(found["program"]), found["place"], *found["call"]
    _, want = interrupted.points_of_call(*here)
    got = interrupted.outcome_with(*here, Point(**found["point"]))
    assert got.caught and interrupted.differs(want, got) == []


@pytest.mark.parametrize("place", ["serial, host, fp32", "tail, nvme, bf16"])
def test_drawn_programs_that_ctrl_c_came_into_have_the_bits_of_others(place):
    came, finds = interrupted.search(place, 0, 4)
    assert finds == [] and came > 0


@pytest.mark.ci
def test_drawn_programs_at_every_place_that_ctrl_c_came_into_have_the_bits_of_others():
    found = {place: interrupted.search(place, i, 1) for i, place in enumerate(ONE_RANK)}
    assert {place: finds for place, (_, finds) in found.items() if finds} == {}
    assert sum(came for came, _ in found.values()) > len(ONE_RANK) / 2


def test_a_drawn_program_that_differs_is_found(monkeypatch):
    """A call that is done again, and twice is not as once."""

    def twice(run):
        run.params[0].data.mul_(1.5)

    monkeypatch.setitem(interrupted.CALLS, "twice", twice)
    one = interrupted.Round([("twice", ())], [("forward", (0, "")), ("backward", (1, ""))], [])
    program = interrupted.Program(is_half_frozen=False, rounds=[one])
    here = (program, "serial, host, fp32", 0, 1)  # the forward
    points, want = interrupted.points_of_call(*here)
    nowhere, point = Point("none", "none", "none", BEGINS, 1), points[len(points) // 2]
    assert interrupted.differs(want, interrupted.outcome_with(*here, nowhere)) == []
    assert "layers.0.weight" in interrupted.differs(want, interrupted.outcome_with(*here, point))
