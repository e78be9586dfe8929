"""Schedules in which something happens between backward and step, and updates that are not cut off.

Drawn programs, too: what one iteration does, as a value.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from bench.shared.models import seeded, token_loss
from optim.rules.report import Speculated
from optim.step.speculation import Speculation
from tests.support.loops.tails import Schedule, batches, differences, everything, run

UPDATES = ("speculate", "both")
PATIENCE_SECONDS = 20.0


@contextmanager
def patient() -> Iterator[None]:
    """A backward goes on when the blocks of each final gradient are updated, all of them."""
    add = Speculation.add

    def wait(self: Speculation, *args: Any) -> None:
        add(self, *args)
        until = time.monotonic() + PATIENCE_SECONDS
        while not self.is_idle and time.monotonic() < until:
            time.sleep(0.0002)

    with mock.patch.object(Speculation, "add", wait):
        yield


def reported(
    schedule: Schedule, update: str, *, hurried: bool = False, **options: Any
) -> tuple[Any, list[Speculated]]:
    """What a schedule comes to, and what each of its steps says of updates in backward.

    hurried: nobody waits for these, and most are cut off by the step.
    """
    reports: list[Speculated] = []

    def told(model: Any, optimizer: Any) -> Iterator[None]:
        for _ in schedule(model, optimizer):
            reports.append(optimizer.last_report.speculation)
            yield

    waits = nullcontext() if hurried else patient()
    with waits, run(told, update, **options) as (model, optimizer, _):
        return everything(model, optimizer), reports


def serial(schedule: Schedule, **options: Any) -> dict[str, Any]:
    """What it comes to with serial steps."""
    with run(schedule, "serial", **options) as (model, optimizer, _):
        return everything(model, optimizer)


def same(
    schedule: Schedule, updates: Sequence[str] = UPDATES, hurried: bool = False, **options: Any
) -> list[list[Speculated]]:
    """What each step of each update says of updates in backward; the bits are those of serial."""
    want, found = serial(schedule, **options), []
    for update in updates:
        got, reports = reported(schedule, update, hurried=hurried, **options)
        assert differences(got, want) == [], update
        assert all(r.speculated == r.held + r.redone for r in reports)
        found.append(reports)
    return found


def num_early(optimizer: Any) -> int:
    """Blocks that may be updated in backward: the others were read ahead for the step."""
    state = optimizer.targets[0].tiered_state.nvme
    return len(state.blocks) - state.num_reads_begun


class Sometimes(nn.Module):
    """Two layers, and a norm behind them that every third call leaves out. Returns [n, 17]."""

    def __init__(self) -> None:
        super().__init__()
        with seeded():
            self.first = nn.Linear(5, 257)
            self.last = nn.Linear(257, 17)
            self.norm = nn.LayerNorm(17)  # in one chunk with the bias of `last`

    def forward(self, x: Tensor, call: int) -> Tensor:
        x = self.last(self.first(x))
        out: Tensor = self.norm(x) if call % 3 else x
        return out


# -- what a user may do between backward and step --


def _weight(model: Any) -> Any:
    return model.module.get_parameter("layers.2.1.weight")


def _scales_all(model: Any, optimizer: Any) -> None:
    for param in model.parameters():
        param.grad.mul_(0.5)


def _clips_by_hand(model: Any, optimizer: Any) -> None:
    clip_grad_norm_(list(model.parameters()), 0.1)


def _writes(model: Any, optimizer: Any) -> None:
    with torch.no_grad():
        _weight(model).mul_(1.25)


def _evaluates(model: Any, optimizer: Any) -> None:
    with torch.no_grad():
        model(batches(1)[0])


def _rates(model: Any, optimizer: Any) -> None:
    optimizer.param_groups[0]["lr"] *= 0.75


def _assigns(model: Any, optimizer: Any) -> None:
    weight = _weight(model)
    weight.grad = torch.linspace(-1, 1, weight.numel()).view(weight.shape)


BETWEEN = {
    "scales one": lambda m, o: _weight(m).grad.mul_(0.5),
    "scales all": _scales_all,
    "clips by hand": _clips_by_hand,
    "clips": lambda m, o: o.clip_grad_norm_(0.1),
    "zeroes one": lambda m, o: _weight(m).grad.zero_(),
    "clamps one": lambda m, o: _weight(m).grad.clamp_(-1e-4, 1e-4),
    "assigns one": _assigns,
    "drops one": lambda m, o: setattr(_weight(m), "grad", None),
    "changes a rate": _rates,
    "writes a weight": _writes,
    "evaluates": _evaluates,
    "reads weights": lambda m, o: [param.sum() for param in m.parameters()],
    "reads masters": lambda m, o: m.state_dict(),
    "reads state": lambda m, o: o.state_dict(),
}


HELD_BY = {"evaluates", "reads weights"}  # what changes nothing that an update follows from


def interrupted(between: Any) -> Schedule:
    """In every other step, behind one without."""

    def schedule(model: Any, optimizer: Any) -> Iterator[None]:
        for step, batch in enumerate(batches(5)):
            token_loss(model, batch).backward()
            if step % 2:
                between(model, optimizer)
            optimizer.step()
            optimizer.zero_grad()
            yield

    return schedule


# -- drawn programs --


@dataclass(frozen=True)
class Iteration:
    """What happens up to one step.

    backwards: so many; synced: they reduce, else only the last one does. between: see `BETWEEN`.
    skipped: the step meets a gradient that is not finite. stepless: zero_grad instead of a step.
    broken: a forward raises first, or a backward.
    """

    backwards: int = 1
    synced: bool = True
    between: str | None = None
    skipped: bool = False
    stepless: bool = False
    broken: str | None = None


iterations = st.builds(
    Iteration,
    backwards=st.sampled_from([1, 1, 1, 2]),
    synced=st.booleans(),
    between=st.sampled_from([None, None, None, *BETWEEN]),
    skipped=st.sampled_from([False, False, False, True]),
    stepless=st.sampled_from([False, False, False, True]),
    broken=st.sampled_from([None, None, None, "forward", "backward"]),
)


def program(iterations: Sequence[Iteration]) -> Schedule:
    """They, one after the other."""
    data = batches(sum(iteration.backwards for iteration in iterations))

    def schedule(model: Any, optimizer: Any) -> Iterator[None]:
        coming = iter(data)
        for iteration in iterations:
            if iteration.broken == "forward":
                _raise_in_forward(model, data[0])
            elif iteration.broken == "backward":
                _raise_in_backward(model, data[0])
                optimizer.zero_grad()
            handle = _weight(model).register_hook(_nan) if iteration.skipped else None
            for left in reversed(range(iteration.backwards)):
                alone = left and not iteration.synced
                with model.no_sync() if alone else nullcontext():
                    token_loss(model, next(coming)).backward()
            if handle is not None:
                handle.remove()
            if iteration.between is not None:
                BETWEEN[iteration.between](model, optimizer)
            if not iteration.stepless:
                optimizer.step()
            optimizer.zero_grad()
            yield

    return schedule


def _nan(grad: Any) -> Any:
    return grad * float("nan")


def _fails(*_: Any) -> None:
    raise ZeroDivisionError


def _raise_in_backward(model: Any, batch: Any) -> None:
    handle = _weight(model).register_hook(_fails)
    try:
        token_loss(model, batch).backward()
    except ZeroDivisionError:
        pass
    finally:
        handle.remove()


def _raise_in_forward(model: Any, batch: Any) -> None:
    handle = model.module.layers[2].register_forward_hook(_fails)
    try:
        model(batch)
    except ZeroDivisionError:
        pass
    finally:
        handle.remove()
