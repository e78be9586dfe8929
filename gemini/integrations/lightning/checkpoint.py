"""Checkpoints of Lightning: a folder of ours with Lightning's own state in it, or one file.

A folder is committed at once: what Lightning saves beside weights and optimizer (loops, callbacks,
schedulers, hyperparameters) is rank 0's `extra` in it, as bytes of torch.save.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gemini.checkpoint.load import load_checkpoint
from gemini.checkpoint.save import save_checkpoint
from gemini.ddp import GeminiDDP
from gemini.integrations.parts import by_position
from gemini.optim.base import TieredOptimizer

from .shared import inner

_KEY = "lightning"


class Streamed(dict[str, Any]):
    """Stands for weights or state that a sharded save streams, and that no rank holds."""

    def __missing__(self, key: str) -> Any:
        raise KeyError(
            f"{key}: a sharded checkpoint holds no whole weights in memory; read them from the "
            'folder it becomes, or give the strategy checkpoint="full"'
        )

    def __reduce__(self) -> Any:
        raise ValueError(
            "a hook or callback has put what a sharded save streams under another key of the "
            'checkpoint; expected it under its own (or give the strategy checkpoint="full")'
        )


def save_folder(
    path: Path,
    model: nn.Module,
    optimizer: TieredOptimizer | None,
    rest: Mapping[str, Any],
    *,
    is_writer: bool,
) -> None:
    """All ranks call. `is_writer`: this rank's `rest` is saved (rank 0)."""
    data = io.BytesIO()
    torch.save(dict(rest), data)  # on every rank: what cannot be saved is an error of all
    blob = torch.frombuffer(bytearray(data.getbuffer()), dtype=torch.uint8)
    save_checkpoint(path, model, optimizer, extra={_KEY: blob} if is_writer else {})


def load_folder(
    path: Path, model: nn.Module, optimizer: TieredOptimizer | None, *, strict: bool
) -> torch.Tensor | None:
    """Weights and state in place; on rank 0 the bytes of the rest (`decoded`). All ranks call."""
    extra = load_checkpoint(path, model, optimizer, strict=strict)
    return extra.get(_KEY) if isinstance(extra, dict) else None


def decoded(blob: torch.Tensor | None, path: Path, weights_only: bool | None) -> dict[str, Any]:
    """What Lightning had saved. Raises ValueError where a folder has none of it."""
    if blob is None:
        raise ValueError(
            f"{path} has nothing of Lightning's; expected a checkpoint that a Trainer or Fabric "
            "saved with a Gemini strategy (gemini.load_checkpoint loads others)"
        )
    data = io.BytesIO(blob.numpy().tobytes())
    found: dict[str, Any] = torch.load(data, map_location="cpu", weights_only=weights_only)
    return found


def refuse_changed(checkpoint: Mapping[str, Any], key: str) -> None:
    """Raise ValueError where a hook put values in the place of what is streamed."""
    found = checkpoint.get(key, ())
    for part in found if isinstance(found, (list, tuple)) else (found,):
        if isinstance(part, Streamed) and not part:
            continue
        raise ValueError(
            f"a hook or callback has put its own values into checkpoint[{key!r}], which a sharded "
            'save streams; expected it unchanged (give the strategy checkpoint="full")'
        )


def full_optimizer_state(optimizer: Any) -> dict[str, Any]:
    """As torch.optim's: by position, so that a plain optimizer loads it. All ranks call.

    Whole on rank 0; elsewhere what `state_dict()` has there.
    """
    found = inner(optimizer).state_dict()
    names = [name for group in found["param_groups"] for name in group["params"]]
    if all(isinstance(name, int) for name in names):
        return found
    return found | by_position(found, names)


def full_weights(model: nn.Module) -> dict[str, Any]:
    """On rank 0, fp32 masters in the dtypes they had before, on the CPU; all ranks call."""
    if isinstance(model, GeminiDDP):
        return model.state_dict()
    return {name: value.detach().cpu() for name, value in model.state_dict().items()}


def pop(state: MutableMapping[str, Any], *keys: str) -> dict[str, Any]:
    """A copy without some keys."""
    return {key: value for key, value in state.items() if key not in keys}
