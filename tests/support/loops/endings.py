"""How runs with state on disk go on and end: by steps, from a checkpoint, on a disk that fails."""

from __future__ import annotations

import errno
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from bench.shared.models import token_loss
from gemini.placement.tiers import Tier
from tests.support.disks.faults import failing
from tests.support.loops.budgets import stores
from tests.support.loops.schedules import HOMES
from tests.support.loops.tails import (
    batches,
    differences,
    everything,
    one_step,
    stepped,
    wrapped,
)


def serially(data: Sequence[Tensor], **options: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """What serial steps come to: all but the last of them, and all."""
    model, optimizer = wrapped("serial", **options)
    for batch in data[:-1]:
        one_step(model, optimizer, batch)
    before = everything(model, optimizer)
    one_step(model, optimizer, data[-1])
    after = everything(model, optimizer)
    optimizer.close()
    return before, after


@functools.cache
def behind_steps(count: int, **options: Any) -> dict[str, Any]:
    """What so many serial steps come to, on a disk."""
    model, optimizer = stepped("serial", count, **options)
    found = everything(model, optimizer)
    optimizer.close()
    return found


def transfers(model: Any, optimizer: Any) -> list[tuple[str, str, int]]:
    """Every call of a step that may fail: part of the path, the call, and its number."""
    tiered = optimizer.targets[0].tiered_state
    named, state, space = stores(model, optimizer), tiered.nvme, tiered.space
    in_file = named["state"].layout.num_blocks  # a place for every block, and for each to undo
    reads = len(state.blocks) - len(state.flow.reads)  # what was read ahead is not read again
    counts = {
        ("state", "preadv"): reads,
        ("state", "pwritev"): in_file // len(space.blocks) * len(state.blocks),
        ("state", "fdatasync"): 1,
    }
    if "parameters" in named:
        files = [s.chunk for s in model.engine.plan.shards if s.param_home is Tier.NVME]
        chunks = [model.engine.plan.chunks[chunk] for chunk in files]
        counts["parameters", "pwritev"] = sum(len(chunk.blocks) for chunk in chunks)
        counts["parameters", "fdatasync"] = 1
    if "gradients" in named:
        counts["gradients", "preadv"] = 2  # one is read before the step returns
    return [
        (named[kind].paths[0].name, call, at)
        for (kind, call), count in counts.items()
        for at in range(count)
    ]


@dataclass
class Faults:
    """Of each: what was said, in which call, and what was wrong then."""

    said: list[str] = field(default_factory=list)
    told_by: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    @property
    def all_told(self) -> bool:
        told = [text.startswith("TransferError:") and "EIO" in text for text in self.said]
        return all(told) and len(told) > 4


def faults(
    update: str,
    home: str = "disk",
    *,
    every: int = 1,
    guilty: Callable[[int], bool] = lambda number: True,
    cases: Callable[..., list[tuple[str, str, int]]] = transfers,
    **options: Any,
) -> Faults:
    """Transfers of a step fail, one after the other: it is undone, and can be taken again.

    guilty: of a fault's number, whether it is on this rank.
    """
    placed = {**HOMES[home](), **options}
    *_, coming, other = batches(3)
    before, after = serially(batches(2), **{**HOMES[home](), **options})
    model, optimizer = stepped(update, 1, **placed)
    found = Faults(wrong=differences(everything(model, optimizer), before))
    for number, (part, call, at) in enumerate(cases(model, optimizer)[::-every]):
        part, where = part if guilty(number) else "of no file", "backward before it"
        with failing(call, errno.EIO, part, after=at, times=1) as failed:
            try:
                token_loss(model, coming).backward()
                where = "step"
                optimizer.step()
                report = optimizer.last_report
                optimizer.zero_grad()
                where = "forward"
                loss = token_loss(model, other)  # it may be of weights of any kind
                where = "backward"
                loss.backward()
                found.said.append("nothing")
            except Exception as error:
                found.said.append(f"{type(error).__name__}: {error}")
        found.told_by.append(where)
        fault = f"{part} {call} {at}"
        if len(failed) != guilty(number) or (where == "backward" and report.committed):
            found.wrong.append(f"{fault}: {len(failed)} failed")
        optimizer.zero_grad()
        found.wrong += [f"{fault}: {n}" for n in differences(everything(model, optimizer), before)]
    one_step(model, optimizer, coming)
    found.wrong += differences(everything(model, optimizer), after)
    optimizer.close()
    return found


def check_told(found: Sequence[Faults]) -> None:
    """Of two ranks, guilty in turn: the guilty one has its disk's error, the other one that names
    it, and nothing was wrong."""
    assert [one.wrong for one in found] == [[], []]
    assert len(found[0].said) > 8
    for number, said in enumerate(zip(*(one.said for one in found), strict=True)):
        guilty = number % 2
        assert said[guilty].startswith("TransferError:"), said
        assert said[1 - guilty].startswith(f"RuntimeError: the disks of ranks [{guilty}] failed")
        assert "EIO" in said[0] and "EIO" in said[1]
