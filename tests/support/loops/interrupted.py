"""Drawn programs that Ctrl-C comes into once, at any line: done again, they have the same bits.

    python -m tests.support.loops.interrupted PLACE [--count 400] [--seed 0]

A program is a list of rounds: what a loop sets, its backwards and what it does to gradients, a
step, and what it looks at or saves then. A loop that is interrupted drops its gradients and begins
the round again; behind a step that counts, the call that was interrupted. Weights, state, counts
and all numbers that the program reads are those of the program that nothing came into.
"""

from __future__ import annotations

import argparse
import faulthandler
import logging
import random
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from gemini import load_checkpoint, save_checkpoint
from tests.support.corpus import Find, keep
from tests.support.lines import PLACES, SECONDS, Point, collecting, ctrl_c, made, stop
from tests.support.loops import programs
from tests.support.loops.cases import HalfFrozen
from tests.support.loops.programs import LAYERS, REFUSALS, Call, Run
from tests.support.loops.sides import Net, batch
from tests.support.loops.tails import differences, everything

ROUNDS = (3, 5)
STEP: Call = ("step", ())


@dataclass
class KeptRun(Run):
    """folder: where its checkpoint is."""

    folder: Path = Path()


def forward_child(run: Run, layer: int, seed: int) -> None:
    child = run.inner.layers[layer]  # nothing casts its input
    run.losses.append(child(batch(seed)[0].to(child.weight.dtype)).pow(2).mean())


def give_weights(run: Run, which: int, seed: int) -> None:
    """Twice is as once."""
    param = run.params[which]
    values = torch.randn(param.shape, generator=torch.Generator().manual_seed(seed))
    param.data.copy_(0.1 * values)


def save_whole(run: KeptRun) -> None:
    save_checkpoint(run.folder, run.model, run.optimizer)


def come_back(run: KeptRun) -> None:
    if run.folder.exists():
        load_checkpoint(run.folder, run.model, run.optimizer)


CALLS: dict[str, Callable[..., None]] = programs.CALLS | {
    function.__name__: function for function in (forward_child, give_weights, save_whole, come_back)
}


@dataclass(frozen=True)
class Round:
    """sets: what a loop may do again from its beginning. behind: what changes nothing."""

    sets: list[Call]
    work: list[Call]
    behind: list[Call]

    @cached_property
    def calls(self) -> list[Call]:
        return [*self.sets, *self.work, STEP, ("zero_grad", ("model", True)), *self.behind]

    @property
    def step(self) -> int:
        return len(self.sets) + len(self.work)


@dataclass(frozen=True)
class Program:
    is_half_frozen: bool
    rounds: list[Round]

    @staticmethod
    def read(said: dict[str, Any]) -> Program:
        """From what `asdict` has made of one, and JSON of that."""
        rounds = [
            Round(
                **{
                    part: [(name, tuple(args)) for name, args in calls]
                    for part, calls in one.items()
                }
            )
            for one in said["rounds"]
        ]
        return Program(said["is_half_frozen"], rounds)


def _repeatable(sets: list[Call]) -> list[Call]:
    """Unfreezing that a step has carried out stays; a checkpoint of before has no state of it."""
    unfreezes = any(name == "freeze" and args[-1] for name, args in sets)
    return [call for call in sets if not (unfreezes and call[0] == "come_back")]


def draw(rng: random.Random, place: str) -> Program:
    num_params = 2 * LAYERS

    def some(*calls: Call, share: float) -> list[Call]:
        return [call for call in calls if rng.random() < share]

    def backwards() -> list[Call]:
        seed, layer = rng.randrange(50), rng.randrange(LAYERS)
        loss = rng.choice(
            [
                ("forward", (seed, rng.choice(["", "logits *=", "loss /=", "loss +="]))),
                ("forward", (seed, "")),
                ("forward_child", (layer, seed)),
                ("penalty", (layer,)),
            ]
        )
        return [loss, ("backward", (1, rng.choice(["", "", "no_sync"])))]

    def a_round() -> Round:
        seed, param = rng.randrange(50), rng.randrange(num_params)
        clips: list[Call] = [
            ("clip", (rng.choice(["2", "1", "inf", "value"]),)),
            ("clip_by_optimizer", (rng.choice(["2", "inf", "value"]),)),
        ]
        return Round(
            _repeatable(
                some(
                    ("change_lr", (rng.choice([0.1, 0.5]),)),
                    ("freeze", (rng.randrange(LAYERS), rng.random() < 0.7)),
                    ("give_weights", (param, seed)),
                    ("load", ()),
                    ("come_back", ()),
                    ("reload_optimizer", ()),
                    share=0.1,
                )
            ),
            [
                *some(("bad_forward", ()), share=0.1),
                *(call for _ in range(rng.choice([1, 1, 2])) for call in backwards()),
                *some(("evaluate", (seed,)), ("read_weights", (True,)), share=0.15),
                *some(
                    ("scale_gradients", (rng.choice([0.5, 2.0]), rng.choice([None, param]))),
                    ("drop_gradient", (param,)),
                    ("assign_gradient", (param, seed)),
                    ("read_gradients", ()),
                    rng.choice(clips),
                    share=0.15,
                ),
            ],
            some(
                ("evaluate", (seed,)),
                ("read_weights", (False,)),
                ("save", ()),
                ("save_whole", ()),
                share=0.2,
            ),
        )

    in_files = PLACES[place].home == "files"  # whose budget half of the gradients would not fill
    return Program(
        not in_files and rng.random() < 0.2, [a_round() for _ in range(rng.randint(*ROUNDS))]
    )


# -- carried out -------------------------------------------------------------------------------

Around = Callable[[int, int], AbstractContextManager[Any]]  # of a call: its round, and its number


@dataclass(frozen=True)
class Outcome:
    values: dict[str, Any]  # bit for bit; see `everything`
    seen: dict[tuple[int, int], list[str]]  # by call: what it read, or why it was refused
    caught: int


def carry_out(program: Program, place: str, around: Around) -> Outcome:
    """At the place, in a module of its own."""
    build = HalfFrozen if program.is_half_frozen else Net
    model, optimizer = made(place, build)
    optimizer.bind()
    seen: dict[tuple[int, int], list[str]] = {}
    number = index = caught = 0
    before: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        run = KeptRun(model, optimizer, folder=Path(folder) / "kept")
        while True:
            try:
                while number < len(program.rounds):
                    calls = program.rounds[number].calls
                    before, run.seen = counted(optimizer), []
                    with around(number, index):
                        said = [text.replace(folder, "") for text in _said_by(run, *calls[index])]
                    seen[number, index] = [*map(repr, run.seen), *said]
                    number, index = (
                        (number, index + 1) if index + 1 < len(calls) else (number + 1, 0)
                    )
                values = everything(model, optimizer)
                break
            except KeyboardInterrupt:  # it may come later: a tail delivers it when it has ended
                stop()
                caught += 1
                model.zero_grad()
                run.losses.clear()
                if number == len(program.rounds):
                    continue
                step = program.rounds[number].step
                if index == step and counted(optimizer) != before:
                    seen[number, index] = []
                    index += 1
                elif index <= step:
                    index = 0
    optimizer.close(keep_masters=False)
    return Outcome(values, seen, caught)


def counted(optimizer: Any) -> list[float]:
    """Steps of every parameter."""
    return [float(count) for count in optimizer.targets[0].step_counts]


def _said_by(run: Run, name: str, args: tuple[Any, ...]) -> list[str]:
    """Why the call was refused; then no loss is left."""
    try:
        CALLS[name](run, *args)
    except REFUSALS as error:
        run.losses.clear()
        return [f"{type(error).__name__}: {error}"]
    return []


def at(number: int, index: int, there: Callable[[], AbstractContextManager[Any]]) -> Around:
    """`there` around that call, the first time that it comes."""
    left = [there]

    def around(*call: int) -> AbstractContextManager[Any]:
        return left.pop()() if left and call == (number, index) else nullcontext()

    return around


def points_of_call(
    program: Program, place: str, number: int, index: int
) -> tuple[list[Point], Outcome]:
    """Where Ctrl-C may come in that call; and what comes of the program without."""
    points: list[Point] = []
    want = carry_out(program, place, at(number, index, lambda: collecting(points)))
    return points, want


def outcome_with(program: Program, place: str, number: int, index: int, point: Point) -> Outcome:
    """Of Ctrl-C at the point of that call."""
    return carry_out(program, place, at(number, index, lambda: ctrl_c(point)))


def differs(want: Outcome, got: Outcome) -> list[str]:
    if known := got.values.keys() ^ want.values.keys():  # state of what was unfrozen
        return sorted(known)
    seen = [f"call {call}" for call, read in want.seen.items() if got.seen[call] != read]
    return differences(got.values, want.values) + seen


# -- many --------------------------------------------------------------------------------------


def interrupt(place: str, seed: int) -> bool:
    """Draw a program and where Ctrl-C comes; whether it came. Raises `Find`."""
    rng = random.Random(f"{place} {seed}")
    program = draw(rng, place)
    number = rng.randrange(len(program.rounds))
    one = program.rounds[number]
    index = one.step if rng.random() < 0.25 else rng.randrange(len(one.calls))
    points, want = points_of_call(program, place, number, index)
    if not points:
        return False
    point = rng.choice(points)
    found = {
        "place": place, "program": asdict(program), "call": [number, index], "point": asdict(point)
    }  # fmt: skip
    try:
        got = outcome_with(program, place, number, index, point)
    except Exception as error:
        raise Find(**found, said=f"{type(error).__name__}: {error}") from error
    if wrong := differs(want, got):
        raise Find(**found, said=f"{wrong[0]} and {len(wrong) - 1} more differ")
    return got.caught > 0


def search(place: str, seed: int, count: int) -> tuple[int, list[Find]]:
    """Programs `seed` to `seed + count`: into how many it came, and what was found."""
    came, finds = 0, []
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        for number in range(seed, seed + count):
            faulthandler.dump_traceback_later(SECONDS, exit=True)
            try:
                came += interrupt(place, number)
            except Find as find:
                print(find, flush=True)
                finds.append(find)
    finally:
        faulthandler.cancel_dump_traceback_later()
        signal.signal(signal.SIGINT, handler)
    return came, finds


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("place", choices=[name for name, p in PLACES.items() if p.ranks == 1])
    parser.add_argument("--count", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args(arguments)
    torch.set_num_threads(1)
    logging.getLogger("gemini").setLevel(logging.ERROR)
    came, finds = search(asked.place, asked.seed, asked.count)
    for find in finds:
        print(find, "is kept in", keep("interrupted", find.found))
    print(f"{asked.count} programs, {came} interrupted: {len(finds)} differ from no interruption")
    return int(bool(finds))


if __name__ == "__main__":
    sys.exit(main())
