"""Ctrl-C, or a time-out by SIGALRM, at every line of a step, wherever Python may deliver it.

    python -m tests.support.lines PLACE [COUNT] [--sent time-out]

Python looks for signals where a function begins or a generator goes on, where a loop goes round,
and behind every call. Events of `sys.settrace` and `sys.setprofile` are there: "call"; "line", if
the frame has gone back; "return" of what a line has called, and "c_return". Between other
instructions none is delivered, so none is tried there. No event is behind a class in C that is
called (`dict()`, `partial(..)()`): it is tried behind what that calls, and at the next event.
Behind a property it is tried too, where Python does not look.
"""

from __future__ import annotations

import argparse
import faulthandler
import itertools
import linecache
import logging
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from inspect import CO_GENERATOR
from pathlib import Path
from types import CodeType, FrameType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from bench.shared.workers import run_ranks
from gemini import AutoPlacement
from optim.state.deferred_signals import TailSignals
from tests.support.corpus import Find, keep
from tests.support.loops.sides import Net, depth_at, loss_of, wrapped
from tests.support.loops.tails import differences, everything

ROOT = Path(__file__).resolve().parents[2]
# a device's own bookkeeping, which torch has in C++: Python delivers nothing there
OURS = tuple(f"{ROOT / folder}/" for folder in ("gemini", "optim", "io/nvme", "kernels_triton"))
BEGINS, GOES_ROUND, BEHIND = "begins", "goes round", "behind "  # what a point's `look` says
CALLED = {"__init__", "__call__", "__exit__"}  # by a call or the end of a `with`, as no operator is
HOMES = {  # of model data, as `sides.wrapped` has them
    "resident": "resident",
    "host": "host",
    "cpu": "cpu, tail",  # state in host memory beside a device, and half of the rest
    "nvme": "nvme",  # state alone
    "files": "files",  # and parameters and gradients
}
PRECISIONS = ("bf16", "fp32")


@dataclass(frozen=True, slots=True)
class Place:
    update: str
    home: str
    precision: str
    ranks: int = 1

    def __str__(self) -> str:
        of_ranks = f", {self.ranks} ranks" if self.ranks > 1 else ""
        return f"{self.update}, {self.home}, {self.precision}{of_ranks}"


PLACES = {
    str(Place(*place)): Place(*place)
    for place in (
        *itertools.product(("serial",), HOMES, PRECISIONS),
        *itertools.product(("tail",), ("cpu", "nvme"), PRECISIONS),
        ("tail", "files", "bf16"),
        *itertools.product(("serial",), ("resident", "host", "nvme", "files"), ("bf16",), (2,)),
        *itertools.product(("tail",), ("nvme", "files"), ("bf16",), (2,)),
    )
}
Where = tuple[str, str, str, str]  # of a `Point`: all but its time
ROOM = 144 * 1024  # bytes of a rank: parameters are in files, and blocks are updated beside a pass
STEPS = 60  # of one life
IN_A_LIFE = 300  # points
LOOKS_FOR_OTHERS, PAUSE_SECONDS = 1000, 0.001  # before a rank that is alone at a point goes on
NOBODY, EVERYBODY = "nobody", "everybody"
_never = threading.Event()
SECONDS = 300  # for one interruption and two steps: more is a hang


def _time_is_up(number: int, frame: FrameType | None) -> None:
    raise TimeoutError("time is up")


@dataclass(frozen=True, slots=True)
class Sent:
    """Signal that is sent, its handler, and what that raises."""

    number: int
    handler: Callable[..., Any]
    error: type[BaseException]


# TimeoutError is an OSError, as a disk's errors are, and Ctrl-C no Exception
CTRL_C = Sent(signal.SIGINT, signal.default_int_handler, KeyboardInterrupt)
TIME_OUT = Sent(signal.SIGALRM, _time_is_up, TimeoutError)
SENT = {"ctrl-c": CTRL_C, "time-out": TIME_OUT}


@dataclass(frozen=True, slots=True)
class Point:
    """The `time`-th time that a line of a function comes to one of its looks for signals.

    function, line: as they are written. look: `BEGINS`, `GOES_ROUND`, or `BEHIND` with the name of
    what was called.
    """

    file: str
    function: str
    line: str
    look: str
    time: int

    @property
    def where(self) -> Where:
        return self.file, self.function, self.line, self.look


def _where(frame: FrameType, look: str) -> Where:
    code = frame.f_code
    line = linecache.getline(code.co_filename, frame.f_lineno).strip()
    return code.co_filename.removeprefix(f"{ROOT}/"), code.co_qualname, line, look


@contextmanager
def _tracing(function: str | None, reached: Callable[[Where], None]) -> Iterator[None]:
    """`reached` is told of every such place in a function of ours, or in all; what it raises comes
    out of there."""

    def is_meant(code: CodeType) -> bool:
        return code.co_filename.startswith(OURS) and function in (None, code.co_qualname)

    def enter(frame: FrameType, event: str, arg: Any) -> Any:
        if not is_meant(frame.f_code):
            return None
        last = frame.f_lasti

        def each(frame: FrameType, event: str, arg: Any) -> Any:
            nonlocal last
            before, last = last, frame.f_lasti
            if event == "line" and last <= before:
                reached(_where(frame, GOES_ROUND))
            return each

        reached(_where(frame, BEGINS))
        return each

    def returned(frame: FrameType, event: str, arg: Any) -> None:
        if event == "c_return" and is_meant(frame.f_code):
            reached(_where(frame, BEHIND + arg.__name__))
        elif event == "return" and (caller := frame.f_back) and is_meant(caller.f_code):
            name, is_generator = frame.f_code.co_name, frame.f_code.co_flags & CO_GENERATOR
            is_operator = name.startswith("__") and name not in CALLED
            if not is_generator and not is_operator:
                reached(_where(caller, BEHIND + name))

    sys.settrace(enter)
    sys.setprofile(returned)
    try:
        yield
    finally:
        stop()


def stop() -> None:
    """End what `ctrl_c` or `collecting` began."""
    sys.setprofile(None)
    sys.settrace(None)


def points_of(call: Callable[[], object]) -> list[Point]:
    """All that `call` comes to in this thread, each the first time and the last."""
    points: list[Point] = []
    with collecting(points):
        call()
    return points


@contextmanager
def collecting(points: list[Point]) -> Iterator[None]:
    """The same of what is done meanwhile."""
    counts: dict[Where, int] = {}

    def count(where: Where) -> None:
        counts[where] = counts.get(where, 0) + 1

    with _tracing(None, count):
        yield
    points += [Point(*where, time) for where, n in counts.items() for time in sorted({1, n})]


@contextmanager
def ctrl_c(
    point: Point, may_come: Callable[[], bool] = lambda: True, number: int = signal.SIGINT
) -> Iterator[list[Point]]:
    """Deliver one there, or another signal, if it may come. Yields where it was delivered."""
    came: list[Point] = []
    times = itertools.count(1)

    def act(where: Where) -> None:
        if where == point.where and next(times) == point.time and may_come():
            came.append(point)
            signal.raise_signal(number)

    with _tracing(point.function, act):
        yield came


# -- training ----------------------------------------------------------------------------------


def made(place: str, build: Callable[..., Any] = Net) -> tuple[Any, Any]:
    """A wrapped module at a place, and its optimizer."""
    one = PLACES[place]
    options: dict[str, Any] = {"update": one.update, "precision": one.precision}
    if one.home == "files" and one.update != "serial":
        options["placement_policy"] = AutoPlacement(ROOM * one.ranks)
    return wrapped(build, HOMES[one.home], **options)


def step(model: Any, optimizer: Any, number: int) -> None:
    """Every other one has two backwards, of which one reduces nothing, and a clip."""
    if number % 2:
        with model.no_sync():
            loss_of(model, number + STEPS).backward()
    loss_of(model, number).backward()
    if number % 2:
        optimizer.clip_grad_norm_(0.5)
    optimizer.step()
    optimizer.zero_grad()


class Alone:
    """Ctrl-C of one rank, or what else is sent."""

    def __init__(self, sent: Sent = CTRL_C) -> None:
        self.sent = sent
        self._handler = signal.signal(sent.number, sent.handler)

    def next_one(self) -> None:
        """Another one is to come."""

    def may_come(self) -> bool:
        """Whether it is delivered here."""
        return True

    def common(self, points: Sequence[Point]) -> list[Point]:
        return list(points)

    def end(self) -> None:
        signal.signal(self.sent.number, self._handler)


class Together(Alone):
    """Ctrl-C of all ranks, each a process, at one place of the program or nowhere: ranks that stop
    at two places are out of step.

    Behind a step that has a tail it comes when the tail has ended: that is another moment on every
    rank, so it raises nothing there, as with a handler of a loop that looks for it between steps.
    """

    def __init__(self) -> None:
        super().__init__()
        signal.signal(signal.SIGINT, self._raise)
        self._store = dist.distributed_c10d._get_default_store()
        self._round = 0
        self._has_tail = self._comes_late = False
        hold, put_back = TailSignals.hold, TailSignals.put_back

        def held(signals: TailSignals) -> None:
            self._has_tail = True
            hold(signals)

        def back(signals: TailSignals) -> bool:
            done = put_back(signals)
            self._has_tail &= not done
            return done

        self._patches = ExitStack()
        self._patches.enter_context(mock.patch.object(TailSignals, "hold", held))
        self._patches.enter_context(mock.patch.object(TailSignals, "put_back", back))

    def _raise(self, number: int, frame: FrameType | None) -> None:
        if not self._comes_late:
            raise KeyboardInterrupt
        self._comes_late = False

    def next_one(self) -> None:
        self._round += 1

    def may_come(self) -> bool:
        """Whether all ranks come here, before the first of them gives up."""
        key, own = f"ctrl-c {self._round}", f"{dist.get_rank()}"
        said = self._store.compare_set(key, "", own).decode()
        if said == own:
            for _ in range(LOOKS_FOR_OTHERS):
                if self._store.compare_set(key, own, own).decode() != own:
                    break
                _never.wait(PAUSE_SECONDS)
            said = self._store.compare_set(key, own, NOBODY).decode()
        elif said != NOBODY:
            said = self._store.compare_set(key, said, EVERYBODY).decode()
        self._comes_late = self._has_tail
        return said == EVERYBODY

    def common(self, points: Sequence[Point]) -> list[Point]:
        """Those of rank 0 that every rank has."""
        of_ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(of_ranks, list(points))
        everywhere = set.intersection(*map(set, of_ranks))
        return [point for point in of_ranks[0] if point in everywhere]

    def end(self) -> None:
        self._patches.close()
        super().end()


class Life:
    """A model that is interrupted again and again, beside the states of one that is not."""

    def __init__(self, place: str, sent: str = "ctrl-c") -> None:
        self._name, self._place = place, PLACES[place]
        self._signals = Together() if self._place.ranks > 1 else Alone(SENT[sent])
        depth = depth_at(HOMES[self._place.home])
        self._other = wrapped(lambda _: Net(depth), "nvme", precision=self._place.precision)
        self._want: list[dict[str, Any]] = []  # of the other, behind so many steps
        self.begin()

    def begin(self) -> None:
        """Anew, with two steps behind it."""
        self.model, self.optimizer = made(self._name)
        for _ in range(2):
            self._step()

    def end(self) -> None:
        self.optimizer.close()
        self._other[1].close()
        self.put_back()

    def put_back(self) -> None:
        """Handlers as before; all that is left to do where a model is in no state to be closed."""
        self._signals.end()

    @property
    def _done(self) -> int:
        """Steps that count, of the one parameter or the other."""
        return int(self.optimizer.targets[0].step_counts[0])

    def _step(self) -> None:
        step(self.model, self.optimizer, self._done)

    def _wanted(self, number: int) -> dict[str, Any]:
        while len(self._want) <= number:
            if self._want:
                step(*self._other, len(self._want) - 1)
            self._want.append(everything(*self._other))
        return self._want[number]

    def points(self) -> list[Point]:
        """Of two steps."""
        points = list(dict.fromkeys([*points_of(self._step), *points_of(self._step)]))
        return self._signals.common(points)

    def interrupt(self, point: Point) -> bool:
        """Take two steps, with Ctrl-C at the point; then a step that does not count is taken again.
        Whether it stopped one. Raises AssertionError where anything differs."""
        if self._done + 2 > STEPS:
            self.optimizer.close()
            self.begin()
        came: list[Point] = []
        caught, goal, sent = 0, self._done + 2, self._signals.sent
        self._signals.next_one()
        while True:
            try:
                while self._done < goal:
                    if came:
                        self._step()
                    else:
                        with ctrl_c(point, self._signals.may_come, sent.number) as came:
                            self._step()
                wrong = differences(everything(self.model, self.optimizer), self._wanted(goal))
                assert wrong == [], f"{point}: {wrong[0]} and {len(wrong) - 1} more differ"
                return caught > 0
            except sent.error:  # it may come later: a tail delivers it when it has ended
                caught += 1
                assert came and caught == 1
                self.optimizer.zero_grad()


def search(
    place: str,
    points: Sequence[Point] | None = None,
    repeats: int = 1,
    sent: str = "ctrl-c",
) -> tuple[int, int]:
    """Interrupt a life at these points, or at all: how many there are, and how many stopped a step.
    Raises `Find`."""
    points, num_came = points_at(place) if points is None else points, 0
    for first in range(0, len(points), IN_A_LIFE):
        told = _on_ranks(_interrupted, place, points[first : first + IN_A_LIFE], repeats, sent)
        finds = [find for _, find in told if find]
        if finds:
            raise Find(**finds[0] | {"said": " | ".join(find["said"] for find in finds)})
        num_came += told[0][0]
    return len(points), num_came


def points_at(place: str) -> list[Point]:
    """All that every rank comes to."""
    found: list[Point] = _on_ranks(_points, place)[0]
    return found


def _on_ranks(work: Callable[..., Any], place: str, *args: Any) -> list[Any]:
    ranks = PLACES[place].ranks
    if ranks == 1:
        return [work(0, place, *args)]
    return run_ranks(work, ranks, place, *args, processes=True)


def _points(rank: int, place: str) -> list[Point]:
    life = Life(place)
    points = life.points()
    life.end()
    return points


def _interrupted(
    rank: int, place: str, points: Sequence[Point], repeats: int, sent: str
) -> tuple[int, dict[str, Any] | None]:
    """How many stopped a step; and what went wrong, where one has."""
    life, num_came = Life(place, sent), 0
    for point in points:
        try:
            faulthandler.dump_traceback_later(SECONDS, exit=True)
            num_came += sum(life.interrupt(point) for _ in range(repeats)) == repeats
        except Exception as error:
            said = f"rank {rank}: {type(error).__name__}: {error}"
            found = {"place": place, "point": asdict(point), "repeats": repeats, "sent": sent}
            life.put_back()
            return num_came, found | {"said": said}
        finally:
            faulthandler.cancel_dump_traceback_later()
    life.end()
    return num_came, None


def some(place: str, count: int) -> list[Point]:
    """So many points of a place or a few more, spread over its lines."""
    points = [point for point in points_at(place) if point.time == 1]
    return points[:: max(1, len(points) // count)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("place", choices=PLACES)
    parser.add_argument("count", nargs="?", type=int, help="so many points, spread over the lines")
    parser.add_argument("--sent", choices=SENT, default="ctrl-c")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("gemini").setLevel(logging.ERROR)
    try:
        points = some(asked.place, asked.count) if asked.count else None
        tried, came = search(asked.place, points, sent=asked.sent)
    except Find as find:
        print(find, "is kept in", keep("lines", find.found))
        raise
    print(f"{tried} points, of which {came} stopped a step: all have the bits of no interruption")
    return 0


if __name__ == "__main__":
    sys.exit(main())
