"""How runs with state on disk go on and end: by steps, from a checkpoint, on a disk that fails."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from typing import Any

from torch import Tensor

import gemini
from bench.shared.models import token_loss
from tests.support.loops.tails import everything, wrapped


def one_step(model: Any, optimizer: Any, batch: Tensor) -> None:
    token_loss(model, batch).backward()
    optimizer.step()
    optimizer.zero_grad()


def resumed(update: str, folder: PathLike[str], data: Sequence[Tensor]) -> dict[str, Any]:
    """What another module comes to that is loaded from a checkpoint and takes these steps."""
    model, optimizer = wrapped(update)
    gemini.load_checkpoint(folder, model, optimizer)
    for batch in data:
        one_step(model, optimizer, batch)
    found = everything(model, optimizer)
    optimizer.close()
    return found


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


def check_told(found: Sequence[tuple[list[str], list[str]]]) -> None:
    """(what was said of each fault, what was wrong behind it) of two ranks, guilty in turn: the
    guilty one has its disk's error, the other one that names it, and nothing was wrong."""
    assert [wrong for _, wrong in found] == [[], []]
    assert len(found[0][0]) > 8
    for number, said in enumerate(zip(*(said for said, _ in found), strict=True)):
        guilty = number % 2
        assert said[guilty].startswith("TransferError:"), said
        assert said[1 - guilty].startswith(f"RuntimeError: the disks of ranks [{guilty}] failed")
        assert "EIO" in said[0] and "EIO" in said[1]
