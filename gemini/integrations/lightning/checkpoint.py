"""Checkpoints of Lightning: a folder of ours with Lightning's own state in it, or one file.

A folder is committed at once: Lightning's other state (loops, callbacks, schedulers,
hyperparameters) is rank 0's `extra` in it, as bytes of torch.save.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gemini import GeminiDDP, load_checkpoint, save_checkpoint
from gemini.api import TieredOptimizer
from gemini.checkpoint.untrusted.torch_files import safe_load
from gemini.checkpoint.whole_files import by_position

from .shared import inner

_KEY = "lightning"


class Streamed(dict[str, Any]):
    """Empty stand-in for weights or state that a sharded save streams, and no rank has whole."""

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
    """Save model, optimizer and Lightning's other state in one folder. All ranks call.

    is_writer: this rank's `rest` is saved (rank 0).
    """
    data = io.BytesIO()
    # on every rank, though one writes it: so a value that cannot be saved is an error on all
    torch.save(dict(rest), data)
    blob = torch.frombuffer(bytearray(data.getbuffer()), dtype=torch.uint8)
    save_checkpoint(path, model, optimizer, extra={_KEY: blob} if is_writer else {})


def load_folder(
    path: Path, model: nn.Module, optimizer: TieredOptimizer | None, *, strict: bool
) -> torch.Tensor | None:
    """Load weights and state in place; rank 0 returns bytes for `decoded`. All ranks call."""
    extra = load_checkpoint(path, model, optimizer, strict=strict)
    return extra.get(_KEY) if isinstance(extra, dict) else None


def decoded(blob: torch.Tensor | None, path: Path, weights_only: bool | None) -> dict[str, Any]:
    """Lightning's other state, from its bytes. Raises ValueError for a folder without any."""
    if blob is None:
        raise ValueError(
            f"{path} has nothing of Lightning's; expected a checkpoint that a Trainer or Fabric "
            "saved with a Gemini strategy (gemini.load_checkpoint loads others)"
        )
    data = io.BytesIO(blob.numpy().tobytes())
    found: dict[str, Any]
    if weights_only is False:  # as the caller asks
        found = torch.load(data, map_location="cpu", weights_only=False)
    else:
        found = safe_load(data, f"{path}, what Lightning saved,")
    return found


def refuse_changed(checkpoint: Mapping[str, Any], key: str) -> None:
    """Raise ValueError if a hook put its own values in the place of streamed ones."""
    found = checkpoint.get(key, ())
    for part in found if isinstance(found, (list, tuple)) else (found,):
        if isinstance(part, Streamed) and not part:
            continue
        raise ValueError(
            f"a hook or callback has put its own values into checkpoint[{key!r}], which a sharded "
            'save streams; expected it unchanged (give the strategy checkpoint="full")'
        )


def full_optimizer_state(optimizer: Any) -> dict[str, Any]:
    """State dict by position, so that an optimizer of torch loads it. All ranks call.

    It is whole on rank 0; on other ranks it has what `state_dict()` returns there.
    """
    found = inner(optimizer).state_dict()
    names = [name for group in found["param_groups"] for name in group["params"]]
    if all(isinstance(name, int) for name in names):
        return found
    return found | by_position(found, names)


def full_weights(model: nn.Module) -> dict[str, Any]:
    """Whole weights on rank 0's CPU: fp32 masters in the dtypes before wrapping. All ranks call."""
    if isinstance(model, GeminiDDP):
        return model.state_dict()
    return {name: value.detach().cpu() for name, value in model.state_dict().items()}


def pop(state: MutableMapping[str, Any], *keys: str) -> dict[str, Any]:
    """Copy of `state` without some keys."""
    return {key: value for key, value in state.items() if key not in keys}
