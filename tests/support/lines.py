"""Ctrl-C at every line of a training step, wherever Python may deliver it.

    python -m tests.support.lines PLACE

Python looks for signals where a function begins or a generator goes on, where a loop goes round,
and behind every call. Between other instructions none is delivered, so none is tried there. Behind
the last call of a `try` or a `with` it is delivered inside of that: it is tried before that call.
"""

from __future__ import annotations

import argparse
import dis
import faulthandler
import itertools
import linecache
import logging
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

from gemini.placement.timetable.updates import IN_BACKWARD
from tests.support.corpus import Find, keep
from tests.support.loops.sides import Net, depth_at, loss_of, wrapped
from tests.support.loops.tails import differences, everything, update_early

ROOT = Path(__file__).resolve().parents[2]
# a device's own bookkeeping, which torch has in C++: Python delivers nothing there
OURS = tuple(f"{ROOT / folder}/" for folder in ("gemini", "optim", "io/nvme", "kernels_triton"))
LOOKS = ("RESUME", "CALL", "JUMP_BACKWARD", "POP_JUMP_BACKWARD")  # instructions of CPython 3.11 on
UPDATES = ("serial", "speculate", "tail", "both")
HOMES = ("nvme", "files")  # of state alone, or of parameters and gradients too
PLACES = {
    ", ".join(place): place
    for place in (
        *itertools.product(UPDATES, HOMES, ("bf16", "fp32")),
        *itertools.product(("serial",), ("host",), ("bf16", "fp32")),
    )
}
STEPS = 60  # of one life
SECONDS = 300  # for one interruption and two steps: more is a hang


@dataclass(frozen=True, slots=True)
class Point:
    """The `look`-th place of a line at which Python looks for signals, the `time`-th time that it
    comes there. function, line: as they are written."""

    file: str
    function: str
    line: str
    look: int
    time: int

    @property
    def where(self) -> tuple[str, str, str, int]:
        return self.file, self.function, self.line, self.look


@cache
def _looks(code: CodeType) -> dict[int, tuple[str, str, str, int]]:
    """Every place where signals are looked for, by the offset of the instruction behind it."""
    found: dict[int, tuple[str, str, str, int]] = {}
    in_line: dict[int, int] = {}
    file, line = str(Path(code.co_filename).relative_to(ROOT)), code.co_firstlineno
    handled = dis.Bytecode(code).exception_entries
    instructions = list(dis.get_instructions(code))
    for instruction, following in itertools.pairwise(instructions):
        if instruction.positions is not None and instruction.positions.lineno is not None:
            line = instruction.positions.lineno
        if not instruction.opname.startswith(LOOKS):
            continue
        look = in_line[line] = in_line.get(line, -1) + 1
        text = linecache.getline(code.co_filename, line).strip()
        behind = instruction.argval if "JUMP" in instruction.opname else following.offset
        if _handler(handled, behind) != _handler(handled, instruction.offset):
            behind = instruction.offset  # a trace can be in the same `try` only before it
        found.setdefault(behind, (file, code.co_qualname, text, look))
    return found


def _handler(entries: Any, offset: int) -> int | None:
    """Where an exception goes that is raised there."""
    return next((e.target for e in entries if e.start <= offset < e.end), None)


@contextmanager
def _tracing(function: str | None, reached: Callable[[Any], None]) -> Iterator[None]:
    """`reached` is told of every such place in a function of ours, or in all, before it goes on."""

    def enter(frame: FrameType, event: str, arg: Any) -> Any:
        code = frame.f_code
        ours = code.co_filename.startswith(OURS)
        if not ours or function not in (None, code.co_qualname):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return each

    def each(frame: FrameType, event: str, arg: Any) -> Any:
        if event == "opcode" and (where := _looks(frame.f_code).get(frame.f_lasti)):
            reached(where)
        return each

    sys.settrace(enter)
    try:
        yield
    finally:
        sys.settrace(None)


def points_of(call: Callable[[], object]) -> list[Point]:
    """All that `call` comes to in this thread, each the first time and the last."""
    counts: dict[Any, int] = {}

    def count(where: Any) -> None:
        counts[where] = counts.get(where, 0) + 1

    with _tracing(None, count):
        call()
    return [Point(*where, time) for where, n in counts.items() for time in sorted({1, n})]


@contextmanager
def ctrl_c(point: Point) -> Iterator[list[Point]]:
    """Deliver one there. Yields where it was delivered."""
    came: list[Point] = []
    times = itertools.count(1)

    def act(where: Any) -> None:
        if where == point.where and next(times) == point.time:
            came.append(point)
            signal.raise_signal(signal.SIGINT)

    with _tracing(point.function, act):
        yield came


# -- training ----------------------------------------------------------------------------------


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


class Life:
    """A model that is interrupted again and again, beside the states of one that is not."""

    def __init__(self, place: str) -> None:
        self._update, self._home, self._precision = PLACES[place]
        self._handler = signal.signal(signal.SIGINT, signal.default_int_handler)
        depth = depth_at(self._home)
        self._other = wrapped(lambda _: Net(depth), "nvme", precision=self._precision)
        self._want: list[dict[str, Any]] = []  # of the other, behind so many steps
        self.begin()

    def _made(self, update: str) -> tuple[Any, Any]:
        made = wrapped(place=self._home, update=update, precision=self._precision)
        if update in IN_BACKWARD:
            update_early(*made)
        return made

    def begin(self) -> None:
        """Anew, with two steps behind it."""
        self.model, self.optimizer = self._made(self._update)
        for _ in range(2):
            self._step()

    def end(self) -> None:
        self.optimizer.close()
        self._other[1].close()
        signal.signal(signal.SIGINT, self._handler)

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
        return list(dict.fromkeys([*points_of(self._step), *points_of(self._step)]))

    def interrupt(self, point: Point) -> bool:
        """Take two steps, with Ctrl-C at the point; then a step that does not count is taken again.
        Whether it came there. Raises AssertionError where anything differs."""
        if self._done + 2 > STEPS:
            self.optimizer.close()
            self.begin()
        came: list[Point] = []
        caught, goal = 0, self._done + 2
        while True:
            try:
                while self._done < goal:
                    if came:
                        self._step()
                    else:
                        with ctrl_c(point) as came:
                            self._step()
                wrong = differences(everything(self.model, self.optimizer), self._wanted(goal))
                assert wrong == [], f"{point}: {wrong[0]} and {len(wrong) - 1} more differ"
                return bool(came)
            except KeyboardInterrupt:  # it may come later: a tail delivers it when it has ended
                caught += 1
                assert came and caught == 1
                self.optimizer.zero_grad()


def search(place: str, points: Sequence[Point] | None = None, repeats: int = 1) -> tuple[int, int]:
    """Interrupt a life at these points, or at all: how many there are, and how many came. Raises
    `Find`."""
    life, num_came = Life(place), 0
    points = life.points() if points is None else points
    for point in points:
        try:
            faulthandler.dump_traceback_later(SECONDS, exit=True)
            num_came += sum(life.interrupt(point) for _ in range(repeats)) == repeats
        except Exception as error:
            raise Find(
                place=place, point=asdict(point), repeats=repeats, said=str(error)
            ) from error
        finally:
            faulthandler.cancel_dump_traceback_later()
    life.end()
    return len(points), num_came


def some(place: str, count: int) -> list[Point]:
    """So many points of a place, spread over its lines."""
    life = Life(place)
    points = [point for point in life.points() if point.time == 1]
    life.end()
    return points[:: len(points) // count]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("place", choices=PLACES)
    place = parser.parse_args().place
    torch.set_num_threads(1)
    logging.getLogger("gemini").setLevel(logging.ERROR)
    try:
        points, came = search(place)
    except Find as find:
        print(find, "is kept in", keep("lines", find.found))
        raise
    print(f"{points} points, of which {came} came again: all have the bits of no interruption")
    return 0


if __name__ == "__main__":
    sys.exit(main())
