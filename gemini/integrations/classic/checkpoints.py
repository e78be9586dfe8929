"""`save_checkpoint` and `load_checkpoint` of Colossal-AI's utils, which count epochs."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn

from gemini.checkpoint.load import load_checkpoint as load
from gemini.checkpoint.save import save_checkpoint as save


def save_checkpoint(
    file: str | os.PathLike[str],
    epoch: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    lr_scheduler: Any = None,
) -> None:
    """`gemini.save_checkpoint` with an epoch; `file` is a folder here. All ranks call."""
    save(file, model, optimizer, lr_scheduler, extra={"epoch": epoch})


def load_checkpoint(
    file: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    lr_scheduler: Any = None,
    strict: bool = True,
) -> int:
    """The epoch with which it was saved, -1 where nobody said one. All ranks call.

    Loads what `gemini.load_checkpoint` does, and raises what that raises.
    """
    extra = load(file, model, optimizer, lr_scheduler, strict=strict)
    return int(extra.get("epoch", -1)) if isinstance(extra, dict) else -1
