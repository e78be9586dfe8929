"""What torch's state dicts have no place for: counters, schedulers, random numbers, buffers, extra,
and which files of a run's stores are on disk.

Each is one uint8 tensor, written by torch.save and read with `weights_only`. Numpy's generator is
kept as plain numbers.

Killed processes of a run leave files on disk, and a checkpoint knows them all by name. Who goes on
from one removes those that hold no later step than it does. A store counts the steps of its own
process, so a checkpoint says what each began at.
"""

from __future__ import annotations

import io
import random
from collections.abc import Mapping
from typing import Any

import numpy
import torch
from torch import Tensor

from gemini.checkpoint.dcp.ranks import Ranks
from gemini.checkpoint.format.errors import CheckpointError, CorruptError
from gemini.checkpoint.untrusted.torch_files import safe_load
from gemini.optim.base import TieredOptimizer


def encode(what: str, value: Any) -> Tensor:
    """uint8 [n]. Raises CheckpointError for what `weights_only` would not load again."""
    data = io.BytesIO()
    try:
        torch.save(value, data)
        data.seek(0)
        torch.load(data, map_location="cpu", weights_only=True)
    except Exception as error:
        first = str(error).strip().splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(
            f"{what} holds something that a checkpoint cannot hold; expected tensors, numbers, "
            f"strings, and lists, tuples and dicts of them ({first})"
        ) from error
    return torch.frombuffer(bytearray(data.getbuffer()), dtype=torch.uint8)


def decode(value: Tensor, what: str) -> dict[str, Any]:
    """The dict that was encoded. Raises CorruptError."""
    found = safe_load(io.BytesIO(value.numpy().tobytes()), what)
    if not isinstance(found, dict):
        raise CorruptError(f"{what} cannot be read: it is a {type(found).__name__}")
    return found


def random_state() -> dict[str, Any]:
    """Of this process: torch, the CUDA device in use, numpy and Python."""
    name, keys, position, has_gauss, gauss = numpy.random.get_state(legacy=True)
    state = {
        "torch": torch.get_rng_state(),
        "numpy": [name, [int(key) for key in keys], int(position), int(has_gauss), float(gauss)],
        "python": random.getstate(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: Mapping[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    name, keys, *rest = state["numpy"]
    numpy.random.set_state((name, numpy.array(keys, dtype=numpy.uint32), *rest))
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def known_stores(optimizer: torch.optim.Optimizer | None, ranks: Ranks) -> dict[str, Any]:
    """What a checkpoint says of the stores of all ranks, see `stores_of_run`. Collective."""
    mine: tuple[dict[str, int], int | None] = {}, None
    if isinstance(optimizer, TieredOptimizer):
        mine = optimizer.stores_of_run()
    found = ranks.gather(mine)
    began = {name: at for stores, _ in found for name, at in stores.items()}
    return {"began": began, "step": min((n for _, n in found if n is not None), default=0)}


def take_over_stores(saved: Mapping[str, Any], optimizer: TieredOptimizer) -> None:
    """The optimizer goes on from where these were `known_stores`; empty: nothing was."""
    if saved:
        began = {str(name): int(at) for name, at in saved["began"].items()}
        optimizer.go_on_from(int(saved["step"]), began)
