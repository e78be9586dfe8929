"""Every schedule with every update, wherever model data is, beside what serial steps come to.

Schedules in which something happens between backward and step, too, and drawn programs: what one
iteration does, as a value.
"""

from __future__ import annotations

import copy
import functools
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.utils import clip_grad_norm_

import gemini
from bench.shared.models import Tower, seeded, token_loss
from gemini import AutoPlacement
from gemini.runtime.step.early import Committing, EarlySpans
from optim import NvmeConfig
from optim.step.triton_step import TritonStep
from tests.support.apart import Apart
from tests.support.loops.budgets import MIXED, SHARED, in_files, within
from tests.support.loops.tails import (
    Schedule,
    batches,
    differences,
    everything,
    has_tail,
    on_host,
    one_step,
    rank,
    run,
)

ENOUGH, RISING = "2MiB", "400KiB"  # with the second, parameters rise from files when traced


class Little(Tower):
    """`Tower` with a quarter of its elements, for kernels in the interpreter."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__(depth=depth, width=9, wide=37)


def by_kernels(**placed: Any) -> dict[str, Any]:
    """`on_host` beside a device whose kernels update: a small module in chunks of one block."""
    small = {"min_chunk_size_m": 900 / 2**20, "nvme": NvmeConfig(block_numel=1024)}
    return {"module": Little, **small, **on_host("stream", **placed)}


# Beside a device: what is there too, and what is on disk
PLACED: dict[str, dict[str, Any]] = {
    "": {},
    ", parameters": {"params": 1.0},
    ", some parameters": {"params": 0.5},
    ", gradients": {"grads": True},
    ", all": {"params": 1.0, "grads": True},
    ", partly": {"state": 0.6},
    " and disk": {"state": 0.8, "disk": 0.4},
    ", disk": {"disk": 1.0},
    ", disk, all": {"disk": 1.0, "params": 1.0, "grads": True},
}
ON_HOST: Homes = {f"host{where}": partial(on_host, "cpu", **how) for where, how in PLACED.items()}
KERNELS: Homes = {f"kernels{where}": partial(by_kernels, **how) for where, how in PLACED.items()}
Homes = dict[str, Callable[[], dict[str, Any]]]
# Where model data is: by name, the options of `tests.support.loops.tails.wrapped`
MEMORY: Homes = {
    "resident": lambda: {"fraction": 0.0},
    "disk": dict,
    "partly on disk": lambda: {"fraction": 0.4},
    "enough": lambda: {"placement_policy": AutoPlacement(ENOUGH)},
    "rising": lambda: {"placement_policy": AutoPlacement(RISING)},
    "files": within,
    "some files": lambda: within(MIXED),
    **ON_HOST,
}
HOMES: Homes = {
    **MEMORY,
    **KERNELS,
    # with state on the device
    "host, resident": lambda: on_host("cpu", state=0.0),
    "host, parameters alone": lambda: on_host("cpu", state=0.0, params=1.0),
    "kernels, resident": lambda: by_kernels(state=0.0),
    "kernels, parameters alone": lambda: by_kernels(state=0.0, params=1.0),
    # of several ranks
    "shared files": lambda: within(SHARED),
    "budget": lambda: {"placement_policy": AutoPlacement("4MiB")},
    "untimed": lambda: {"placement_policy": "zero3"},  # passes that no plan has seen
    "replicas": lambda: {
        "mesh": init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    },
}
# where a tail goes on behind the next forward
BEHIND = {home for home in HOMES if not home.endswith(("resident", "alone"))}


@dataclass(frozen=True)
class Outcome:
    """What a schedule comes to. tails: of its steps, which had one; early: see `counting`."""

    values: dict[str, Any]
    tails: list[bool]
    skipped_steps: int
    in_files: tuple[int, int]
    early: Counter[str]


@contextmanager
def counting() -> Iterator[Counter[str]]:
    """Spans that backward begins to update, that a step commits, and steps that are as backward
    expected them, or otherwise."""
    counts: Counter[str] = Counter()
    update, decided, commit = EarlySpans.update, TritonStep.decided_as, Committing.update_block

    def updated(self: Any, block: Any, gradient: Any, changes: Any) -> None:
        before = self._early.get(block.id)
        update(self, block, gradient, changes)
        counts["begun"] += self._early.get(block.id) is not before

    def decided_as(self: Any, expected: Any) -> Any:
        found = decided(self, expected)
        counts["as expected" if found else "otherwise"] += 1
        return found

    def update_block(self: Any, block: Any, planes: Any, views: Any) -> Any:
        counts["committed"] += block.id in self._early
        return commit(self, block, planes, views)

    with (
        mock.patch.object(EarlySpans, "update", updated),
        mock.patch.object(TritonStep, "decided_as", decided_as),
        mock.patch.object(Committing, "update_block", update_block),
    ):
        yield counts


def outcome(
    schedule: Schedule, update: str, home: str = "disk", *, apart: bool = False, **options: Any
) -> Outcome:
    """apart: no operator may be given memory of the device and of the host."""
    tails: list[bool] = []
    placed = {**HOMES[home](), **options}

    def told(model: Any, optimizer: Any) -> Iterator[None]:
        for _ in schedule(model, optimizer):
            tails.append(has_tail(optimizer))
            yield

    with (
        Apart(placed["device"]) if apart else nullcontext() as watched,
        counting() as early,
        run(told, update, **placed) as (model, optimizer, _),
    ):
        values = everything(model, optimizer)
        assert watched is None or watched.operators > 100
        if "device" in placed:
            placed["device"].check()
        return Outcome(values, tails, optimizer.skipped_steps, in_files(model), early)


def reference(home: str) -> str:
    """Where serial steps have the bits that those of a home should have."""
    if home == "replicas":  # its shards are others
        return home
    return "kernels, resident" if home.startswith("kernels") else "resident"


def serial(schedule: Schedule, home: str = "disk", **options: Any) -> Outcome:
    """Of serial steps: once for each schedule, home and rank."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    return _serial(schedule, home, tuple(sorted(options.items())), (rank(), world))


@functools.lru_cache(256)
def _serial(schedule: Schedule, home: str, options: Any, place: tuple[int, int]) -> Outcome:
    return outcome(schedule, "serial", home, **dict(options))


def same(
    schedule: Schedule,
    update: str,
    home: str = "disk",
    *,
    serially: Schedule | None = None,
    apart: bool = False,
    **options: Any,
) -> Outcome:
    """The bits are those of serial steps whose model data never leaves the device.

    serially: the schedule of these, where it is another.
    """
    want = serial(serially or schedule, reference(home), **options)
    got = outcome(schedule, update, home, apart=apart, **options)
    assert differences(got.values, want.values) == []
    return got


class Sometimes(nn.Module):
    """Two layers, and a norm behind them that every third call leaves out. Returns [n, 17]."""

    def __init__(self, width: int = 257) -> None:
        super().__init__()
        with seeded():
            self.first = nn.Linear(5, width)
            self.last = nn.Linear(width, 17)
            self.norm = nn.LayerNorm(17)  # in one chunk with the bias of `last`

    def forward(self, x: Tensor, call: int) -> Tensor:
        x = self.last(self.first(x))
        out: Tensor = self.norm(x) if call % 3 else x
        return out


class Narrow(Sometimes):
    """`Sometimes` for kernels in the interpreter."""

    def __init__(self) -> None:
        super().__init__(65)


@functools.cache
def short(schedule: Schedule, count: int = 2) -> Schedule:
    """Its first steps."""
    return lambda model, optimizer: islice(schedule(model, optimizer), count)


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


def _reads_gradients(model: Any, optimizer: Any) -> None:
    for param in model.parameters():
        if param.grad is not None:
            param.grad.clone()


def _saves(model: Any, optimizer: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        gemini.save_checkpoint(f"{folder}/saved", model, optimizer)


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
    "reads weights": lambda m, o: [param.detach().sum() for param in m.parameters()],
    "reads gradients": _reads_gradients,
    "reads masters": lambda m, o: m.state_dict(),
    "reads state": lambda m, o: o.state_dict(),
    "saves": _saves,
}


@functools.cache
def interrupted(*names: str) -> Schedule:
    """Each in turn, in every other step, behind one without."""

    def schedule(model: Any, optimizer: Any) -> Iterator[None]:
        for step, batch in enumerate(batches(2 * len(names) + 1)):
            token_loss(model, batch).backward()
            if step % 2:
                BETWEEN[names[step // 2]](model, optimizer)
            optimizer.step()
            optimizer.zero_grad()
            yield

    return schedule


def second_backwards(model: Any, optimizer: Any) -> Iterator[None]:
    """Of the same graph, and not in every step."""
    for step, batch in enumerate(batches(6)):
        loss = token_loss(model, batch)
        loss.backward(retain_graph=step % 3 == 1)
        if step % 3 == 1:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield


def loads(model: Any, optimizer: Any) -> Iterator[None]:
    """State of an earlier step, between a backward and its step."""
    data = batches(5)
    for batch in data[:3]:
        one_step(model, optimizer, batch)
        yield
    saved = copy.deepcopy(optimizer.state_dict())
    one_step(model, optimizer, data[3])
    token_loss(model, data[4]).backward()
    optimizer.load_state_dict(saved)
    optimizer.step()
    optimizer.zero_grad()
    yield


def ends_in_backward(model: Any, optimizer: Any) -> Iterator[None]:
    """No step follows the last one."""
    data = batches(4)
    for batch in data[:3]:
        one_step(model, optimizer, batch)
        yield
    token_loss(model, data[3]).backward()


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
    backwards=st.sampled_from([1, 1, 1, 2, 3]),
    synced=st.booleans(),
    between=st.sampled_from([None, None, None, *BETWEEN]),
    skipped=st.sampled_from([False, False, False, True]),
    stepless=st.sampled_from([False, False, False, True]),
    broken=st.sampled_from([None, None, None, "forward", "backward"]),
)


def program(iterations: Sequence[Iteration]) -> Schedule:
    """They, one after the other."""

    def schedule(model: Any, optimizer: Any) -> Iterator[None]:
        data = batches(sum(iteration.backwards for iteration in iterations))
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
