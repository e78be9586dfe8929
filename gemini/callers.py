"""Search of the call stack for torch's own functions, which need another answer than a user."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import Any

MAX_FRAMES = 20  # between torch's function and a module below the one that it was given
_WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel", "replicate", "fully_shard")
_CHECKPOINTS = "torch.distributed.checkpoint.state_dict"


def torchs_wrapper() -> str | None:
    """Name of torch's wrapper whose constructor is on the stack; None if there is none."""
    for frame in _callers():
        name, _, method = frame.f_code.co_qualname.partition(".")
        if name == "contract" and method.endswith("wrapper"):  # around replicate and fully_shard
            name, method = getattr(frame.f_locals.get("func"), "__name__", ""), "__init__"
        if method == "__init__" and name in _WRAPPERS:
            return name
    return None


def torch_averages() -> bool:
    """Whether the constructor of `torch.optim.swa_utils.AveragedModel`, which copies its module, is
    on the stack."""
    return any(frame.f_code.co_qualname == "AveragedModel.__init__" for frame in _callers())


def module_conversion() -> str | None:
    """Method by which a module converts its tensors, if that is on the stack: `to_empty`, or
    `_apply`, which `half()`, `to()` and the like call."""
    methods = [frame.f_code.co_qualname for frame in _callers()]
    return next((name for name in ("to_empty", "_apply") if f"Module.{name}" in methods), None)


def wants_dtensors() -> bool:
    """Whether `get_state_dict` or the like of torch.distributed.checkpoint is on the stack: it
    takes DTensors, and makes full tensors of them itself if it was asked to."""
    return _in_checkpointing() is not None


def flat_optimizer_state() -> Mapping[str, Any] | None:
    """Flat state dict given to `set_optimizer_state_dict` of torch.distributed.checkpoint; None if
    that is not on the stack, or its state dict is nested.

    torch passes on only the planes that `optimizer.state` shows, which need not be all.
    """
    frame = _in_checkpointing()
    given = None if frame is None else frame.f_locals.get("state_dict")
    return given if given and "state" not in given else None


def _in_checkpointing() -> FrameType | None:
    frames = (f for f in _callers() if f.f_globals.get("__name__") == _CHECKPOINTS)
    return next(frames, None)


def _callers() -> Iterator[FrameType]:
    """Frames of the stack, the nearest first, at most `MAX_FRAMES`."""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(MAX_FRAMES):
        if frame is None:
            return
        yield frame
        frame = frame.f_back
