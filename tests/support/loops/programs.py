"""Short training programs, drawn at random: on plain torch and on a wrapped module.

    python -m tests.support.loops.programs --count 1000 [--doors] [--ranks 2 | --readers 2]
        [--seed 0] [--places]

A program is a list of public calls, as any loop may make them. Both sides run it; the updates are
the same, or the wrapped side refuses a call with words. What differs without an error is a defect:
the program is cut down to the calls that it needs, and kept in tests/corpus/programs, where tests
run it every time.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from bench.shared.workers import run_ranks
from gemini.checkpoint.format.manifest import CheckpointError
from gemini.saved_names import peeled
from tests.support.loops.cases import HalfFrozen
from tests.support.loops.doors import ALIASES, DOORS, WRAPPERS, built, kept_of
from tests.support.loops.doors import through as state_through
from tests.support.loops.readers import readers
from tests.support.loops.sides import ADAM, BESIDE, PLACEMENTS, Net, batch, plain, updates, wrapped

PLACES = ("resident", "host", "nvme", "nvme, tail", "cpu, tail")
IN_KERNELS = ("stream, tail",)  # of the interpreter, which takes a second a program
BOUND = 1e-4  # of updates and outputs; fp32 sums in another order differ by 1e-6 an operation
MAX_CALLS = 18
LAYERS = 3
FOUND = Path(__file__).resolve().parents[2] / "corpus" / "programs"
# what GeminiDDP refuses by design, with words
REFUSALS = (RuntimeError, ValueError)

Call = tuple[str, tuple[Any, ...]]
Draw = Callable[[random.Random], list[Call]]


@dataclass
class Run:
    """One side of a program while it runs."""

    model: Any
    optimizer: Any
    losses: list[Tensor] = field(default_factory=list)
    saved: list[Any] = field(default_factory=list)
    seen: list[float] = field(default_factory=list)

    @property
    def inner(self) -> nn.Module:
        inner: nn.Module = getattr(self.model, "module", self.model)
        return inner

    @property
    def params(self) -> list[nn.Parameter]:
        return list(self.model.parameters())

    def no_sync(self) -> Any:
        return self.model.no_sync() if hasattr(self.model, "no_sync") else nullcontext()


# -- the calls: each is done to both sides ---------------------------------------------------


def forward(run: Run, seed: int, change: str) -> None:
    x, y = batch(seed)
    out = run.model(x)
    if change == "logits *=":
        out *= 0.5
    loss = (out - y).pow(2).mean()
    if change == "loss /=":
        loss /= 2
    elif change == "loss +=":
        loss += 0.01 * out.pow(2).mean()
    run.seen.append(float(loss.detach()))
    run.losses.append(loss)


def forward_inner(run: Run, seed: int) -> None:
    x, y = batch(seed)
    run.losses.append((run.inner(x) - y).pow(2).mean())


def forward_child(run: Run, layer: int, seed: int) -> None:
    run.losses.append(run.inner.layers[layer](batch(seed)[0]).pow(2).mean())


def penalty(run: Run, layer: int) -> None:
    run.losses.append(0.1 * run.inner.layers[layer].weight.pow(2).sum())


def backward(run: Run, num_losses: int, how: str) -> None:
    losses, run.losses = run.losses[-num_losses:], run.losses[:-num_losses]
    if not losses:
        return
    with run.no_sync() if how == "no_sync" else nullcontext():
        if how == "apart":
            for loss in losses:
                loss.backward()
        else:
            sum(losses[1:], losses[0]).backward()


def clip(run: Run, how: str) -> None:
    if all(p.grad is None for p in run.params):
        return
    if how == "value":
        clip_grad_value_(run.params, 0.01)
    else:
        run.seen.append(float(clip_grad_norm_(run.params, 0.3, float(how))))


def clip_by_optimizer(run: Run, how: str) -> None:
    """The wrapped side's own: what it is asked for is done by the coming step."""
    if all(p.grad is None for p in run.params):
        return
    if run.inner is run.model:
        clip(run, how)
    elif how == "value":
        run.optimizer.clip_grad_by_value(0.01)
    else:
        run.seen.append(float(run.optimizer.clip_grad_norm_(0.3, float(how))))


def scale_gradients(run: Run, factor: float, which: int | None) -> None:
    for i, param in enumerate(run.params):
        if param.grad is not None and which in (None, i):
            param.grad *= factor


def drop_gradient(run: Run, which: int | None) -> None:
    for i, param in enumerate(run.params):
        if which in (None, i):
            param.grad = None


def assign_gradient(run: Run, which: int, seed: int) -> None:
    param = run.params[which]
    if param.requires_grad:
        param.grad = 0.1 * torch.randn(param.shape, generator=torch.Generator().manual_seed(seed))


def spoil_gradient(run: Run, which: int) -> None:
    param = run.params[which]
    if param.grad is not None:
        param.grad[0] = float("nan")


def read_gradients(run: Run) -> None:
    run.seen += [float(p.grad.double().norm()) for p in run.params if p.grad is not None]


def step(run: Run) -> None:
    """torch's side skips it where a gradient is not finite, as the wrapped one does by itself."""
    grads = [p.grad for p in run.params if p.grad is not None]
    if not grads:
        return
    if run.inner is run.model and not all(bool(g.isfinite().all()) for g in grads):
        return
    run.optimizer.step()


def begin(run: Run, late: bool, frozen: bool, kind: str = "") -> None:
    """An optimizer over all parameters, or over all but the last layer's.

    `frozen`: all but the last layer are, when the module is wrapped; `kind`: of `WRAPPERS` or
    `ALIASES`; see `build_of`.
    """
    if not late:
        return
    kind = type(run.optimizer)
    options: dict[str, Any] = {"foreach": False}
    if run.inner is not run.model:
        run.optimizer.close()
        options = {}
    run.optimizer = kind(run.params[:-2], **ADAM, **options)


def add_group(run: Run) -> None:
    known = {id(p) for group in run.optimizer.param_groups for p in group["params"]}
    late = [p for p in run.params if id(p) not in known]
    if late:
        run.optimizer.add_param_group({"params": late, "lr": 0.2})


def zero_grad(run: Run, who: str, set_to_none: bool) -> None:
    (run.optimizer if who == "optimizer" else run.model).zero_grad(set_to_none=set_to_none)


def evaluate(run: Run, seed: int) -> None:
    with torch.no_grad():
        run.seen.append(float(run.model(batch(seed)[0]).double().pow(2).mean()))


def read_weights(run: Run, reverse: bool) -> None:
    params = run.params[::-1] if reverse else run.params
    norms = [float(p.detach().double().norm()) for p in params]
    run.seen += norms[::-1] if reverse else norms


def write_weights(run: Run, which: int, how: str) -> None:
    param = run.params[which]
    if how == "data":
        param.data.mul_(0.9)
    else:
        with torch.no_grad():
            param.add_(0.01)


def freeze(run: Run, layer: int, unfreeze: bool) -> None:
    run.inner.layers[layer].requires_grad_(unfreeze)


def save(run: Run) -> None:
    run.saved.append({name: value.clone() for name, value in run.model.state_dict().items()})


def load(run: Run) -> None:
    if run.saved:
        run.model.load_state_dict(run.saved[-1])


def reload_optimizer(run: Run) -> None:
    run.optimizer.load_state_dict(run.optimizer.state_dict())


def bad_forward(run: Run) -> None:
    try:
        run.model(torch.ones(2, 5))
    except RuntimeError:
        return
    raise AssertionError("a forward took an input of another width")


def change_lr(run: Run, lr: float) -> None:
    for group in run.optimizer.param_groups:
        group["lr"] = lr


def through(run: Run, door: str) -> None:
    """The wrapped side's state by a door of saving, which changes nothing and refuses nothing."""
    if run.inner is run.model:
        return
    pending = bool(run.losses) or any(p.grad is not None for p in run.params)
    inner = peeled(run.inner)
    fresh = type(inner)(len(inner.layers))
    try:
        state_through(run.model, run.optimizer, door, fresh, pending=pending)
    except CheckpointError as error:
        raise AssertionError(f"{door} is refused: {error}") from error


CALLS: dict[str, Callable[..., None]] = {
    function.__name__: function
    for function in (
        forward, forward_inner, forward_child, penalty, backward, clip, clip_by_optimizer,
        scale_gradients,
        drop_gradient, assign_gradient, step, zero_grad, evaluate, read_weights, write_weights,
        freeze, save, load, reload_optimizer, bad_forward, change_lr, begin, add_group,
        spoil_gradient, read_gradients, through,
    )
}  # fmt: skip


def draw(rng: random.Random) -> list[Call]:
    """A program: mostly steps as loops have them, and anything between."""
    num_params = 2 * LAYERS

    def one() -> Call:
        seed, layer, param = rng.randrange(50), rng.randrange(LAYERS), rng.randrange(num_params)
        return rng.choice(
            [
                ("forward", (seed, rng.choice(["", "logits *=", "loss /=", "loss +="]))),
                ("forward_inner", (seed,)),
                ("forward_child", (layer, seed)),
                ("penalty", (layer,)),
                ("backward", (rng.choice([1, 1, 2]), rng.choice(["", "apart", "no_sync"]))),
                ("clip", (rng.choice(["2", "1", "inf", "value"]),)),
                ("scale_gradients", (rng.choice([0.5, 2.0]), rng.choice([None, param]))),
                ("drop_gradient", (rng.choice([None, param]),)),
                ("assign_gradient", (param, seed)),
                ("step", ()),
                ("zero_grad", (rng.choice(["optimizer", "model"]), rng.random() < 0.8)),
                ("evaluate", (seed,)),
                ("read_weights", (rng.random() < 0.5,)),
                ("write_weights", (param, rng.choice(["data", "add_"]))),
                ("freeze", (layer, rng.random() < 0.6)),
                ("save", ()),
                ("load", ()),
                ("reload_optimizer", ()),
                ("bad_forward", ()),
                ("change_lr", (rng.choice([0.1, 0.5]),)),
                ("add_group", ()),
                ("spoil_gradient", (param,)),
            ]
        )

    def change_of_gradients() -> Call:
        seed, param = rng.randrange(50), rng.randrange(num_params)
        return rng.choice(
            [
                ("clip", (rng.choice(["2", "1", "inf", "value"]),)),
                ("clip_by_optimizer", (rng.choice(["2", "inf", "value"]),)),
                ("scale_gradients", (rng.choice([0.5, 2.0]), rng.choice([None, param]))),
                ("drop_gradient", (param,)),
                ("assign_gradient", (param, seed)),
                ("read_gradients", ()),
            ]
        )

    program: list[Call] = [("begin", (rng.random() < 0.3, rng.random() < 0.2))]
    num_calls = rng.randint(4, MAX_CALLS)
    while len(program) < num_calls:
        kind = rng.random()
        if kind < 0.1:
            program += [
                ("forward", (rng.randrange(50), "")),
                ("backward", (1, rng.choice(["", "", "no_sync"]))),
                *(change_of_gradients() for _ in range(rng.randint(2, 4))),
                ("step", ()),
            ]
        elif kind < 0.3:
            program += [
                ("forward", (rng.randrange(50), rng.choice(["", "loss /="]))),
                ("backward", (1, rng.choice(["", "", "no_sync"]))),
            ]
            if rng.random() < 0.7:
                program += [("step", ()), ("zero_grad", ("optimizer", True))]
        else:
            program.append(one())
    return [*program, ("step", ())]


def draw_doors(rng: random.Random) -> list[Call]:
    """A program of a module under wrappers, or with memory that is shared, whose state goes through
    files."""
    (_, args), *program = draw(rng)
    for _ in range(rng.randint(1, 3)):
        program.insert(rng.randrange(len(program) + 1), ("through", (rng.choice(DOORS),)))
    kind = rng.choice([*WRAPPERS, *WRAPPERS, *ALIASES])
    return [("begin", (*args, kind)), *program]


# -- both sides ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """What came of a program. `said`: why the wrapped side refused a call; then it ends there."""

    difference: float
    said: str | None = None


def build_of(program: list[Call]) -> tuple[Callable[..., nn.Module], str]:
    """Builder of a program's module, and what is done to it before it is wrapped."""
    name, args = program[0]
    build = HalfFrozen if name == "begin" and args[1] else Net
    return build, args[2] if name == "begin" and len(args) > 2 else ""


def run_program(program: list[Call], place: str, num_readers: int = 0) -> Outcome:
    """Both sides, call by call; so many threads read the wrapped one meanwhile."""
    build, kind = build_of(program)
    torch_model, torch_optimizer = plain(built(build, kind), place)
    want = Run(torch_model, torch_optimizer)
    try:
        model, optimizer = wrapped(built(build, kind), place)
    except ValueError as error:
        if kind in ALIASES and "share memory" in str(error):
            return Outcome(0.0, f"{kind}: {error}")
        raise AssertionError(f"a module under {kind!r} is refused: {error}") from error
    got = Run(model, optimizer)
    said = None
    with ExitStack() as stack:
        stack.callback(lambda: got.optimizer.close(keep_masters=False))
        beside = stack.enter_context(readers(got, count=num_readers, interval=1e-5))
        for name, args in program:
            theirs = _error_of(CALLS[name], want, args)
            ours = _error_of(CALLS[name], got, args)
            if theirs is not None or ours is not None:
                if theirs is not None and ours is None:
                    raise AssertionError(f"torch refuses {name}{args}, and we do not: {theirs}")
                said = f"{name}: {ours}"
                break
        for run in (want, got):
            run.seen += kept_of(run.inner)
        ours, theirs = updates(model, build, place), updates(torch_model, build, place)
    if beside.errors:
        raise AssertionError(f"a reader of {beside.errors[0][0]}: {beside.errors[0][1]!r}")
    if ours is None or theirs is None:
        return Outcome(_apart(want.seen, got.seen), said)
    moved = 0.0 if said else float((ours - theirs).norm() / theirs.norm().clamp(min=1e-3))
    return Outcome(max(moved, _apart(want.seen, got.seen)), said)


def _error_of(function: Callable[..., None], run: Run, args: tuple[Any, ...]) -> str | None:
    try:
        function(run, *args)
    except REFUSALS as error:
        return f"{type(error).__name__}: {error}"
    return None


def _apart(want: list[float], got: list[float]) -> float:
    return max(
        (abs(a - b) / max(1e-3, abs(a)) for a, b in zip(want, got, strict=False)), default=0.0
    )


def is_wrong(program: list[Call], place: str, num_readers: int = 0) -> str | None:
    """What differs without an error, or None."""
    try:
        outcome = run_program(program, place, num_readers)
    except AssertionError as error:
        return str(error)
    if not outcome.difference < BOUND:
        return f"differs by {outcome.difference:.2e}"
    return None


def smallest(program: list[Call], place: str) -> list[Call]:
    """The program without the calls that it can be wrong without."""
    for i in reversed(range(len(program))):
        shorter = program[:i] + program[i + 1 :]
        if shorter and is_wrong(shorter, place):
            program = shorter
    return program


# -- what was found ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Found:
    """A program that was wrong once, where it was, and how."""

    name: str
    why: str
    places: tuple[str, ...]
    program: list[Call]

    @staticmethod
    def read(path: Path) -> Found:
        said = json.loads(path.read_text(encoding="utf-8"))
        program = [(name, tuple(args)) for name, args in said["program"]]
        return Found(path.stem, said["why"], tuple(said["places"]), program)


def all_found(folder: Path = FOUND) -> list[Found]:
    return [Found.read(path) for path in sorted(folder.glob("*.json"))]


def keep(why: str, place: str, program: list[Call], folder: Path = FOUND) -> Path:
    """Write it for tests to run; the same program has one file."""
    text = json.dumps(program)
    path = folder / f"{hashlib.sha256(text.encode()).hexdigest()[:12]}.json"
    places = Found.read(path).places if path.exists() else ()
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(in_json(why, sorted({*places, place}), program), encoding="utf-8")
    return path


def in_json(why: str, places: Sequence[str], program: list[Call]) -> str:
    """A line a call."""
    calls = ",\n  ".join(map(json.dumps, program))
    head = f'{{\n "why": {json.dumps(why)},\n "places": {json.dumps(list(places))},\n'
    return f'{head} "program": [\n  {calls}\n ]\n}}\n'


def found_again(rank: int, places: Sequence[str]) -> list[str]:
    """What of all that was found is wrong at these places, on every rank of a run."""
    torch.set_num_threads(1)
    said = [
        (found.name, place, is_wrong(found.program, place))
        for found in all_found() for place in places
    ]  # fmt: skip
    return [f"{name} at {place}: {wrong}" for name, place, wrong in said if wrong]


# -- many --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Report:
    """Of many programs: how many ran to their end, what was refused, and what was wrong."""

    ran: int
    refused: dict[str, int]
    wrong: tuple[str, ...]
    numbers: tuple[int, ...]  # of what was wrong


def run_many(
    rank: int,
    seed: int,
    count: int,
    places: Sequence[str] = PLACES,
    num_readers: int = 0,
    drawn: Draw = draw,
) -> Report:
    """Programs `seed` to `seed + count`, each at one of the places, beside so many readers."""
    torch.set_num_threads(1)
    ran, refused, wrong = 0, {}, {}
    for number in range(seed, seed + count):
        program, place = drawn(random.Random(number)), places[number % len(places)]
        try:
            outcome = run_program(program, place, num_readers)
        except AssertionError as error:
            wrong[number] = f"program {number} at {place}: {error}"
            continue
        if not outcome.difference < BOUND:
            wrong[number] = f"program {number} at {place}: {outcome}"
        elif outcome.said is None:
            ran += 1
        else:
            said = outcome.said[:90]
            refused[said] = refused.get(said, 0) + 1
    return Report(ran, refused, tuple(wrong.values()), tuple(wrong))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--places", nargs="+", choices=(*PLACEMENTS, *BESIDE), default=PLACES)
    parser.add_argument("--readers", type=int, default=0, help="threads that read, at one rank")
    parser.add_argument("--doors", action="store_true", help="wrappers of torch, and files")
    parser.add_argument("--show", type=int, help="cut this program down and print it")
    args = parser.parse_args()
    drawn = draw_doors if args.doors else draw
    if args.show is not None:
        program = drawn(random.Random(args.show))
        place = args.places[args.show % len(args.places)]
        print(place, is_wrong(program, place))
        for call in smallest(program, place):
            print("   ", *call)
        return
    reports = []
    for seed in range(args.seed, args.seed + args.count, 100):
        count = min(100, args.seed + args.count - seed)
        if args.ranks == 1:
            reports.append(run_many(0, seed, count, args.places, args.readers, drawn))
        else:
            reports.append(run_ranks(run_many, args.ranks, seed, count, args.places, 0, drawn)[0])
        print(f"{seed + count}: {sum(len(r.wrong) for r in reports)} wrong", flush=True)
    refused: dict[str, int] = {}
    for report in reports:
        for said, times in report.refused.items():
            refused[said] = refused.get(said, 0) + times
        for number, text in zip(report.numbers, report.wrong, strict=True):
            program, place = drawn(random.Random(number)), args.places[number % len(args.places)]
            if args.ranks == 1:
                program = smallest(program, place)
            print(text, "is kept in", keep(f"{text}, {args.ranks} ranks", place, program))
    print(f"{sum(r.ran for r in reports)} ran to their end, {sum(refused.values())} were refused")
    for said, times in sorted(refused.items(), key=lambda item: -item[1]):
        print(f"{times:6} {said}")
    sys.exit(any(r.wrong for r in reports))


if __name__ == "__main__":
    main()
