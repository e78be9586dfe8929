"""Which of torch's own functions calls, up the stack: they expect another answer than a user."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import Any

MAX_FRAMES = 20  # between torch's function and a module below the one that it was given
_WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel", "replicate", "fully_shard")
_CHECKPOINTS = "torch.distributed.checkpoint.state_dict"


def torchs_wrapper() -> str | None:
    """The name of torch's own wrapper whose constructor calls."""
    for frame in _callers():
        name, _, method = frame.f_code.co_qualname.partition(".")
        if name == "contract" and method.endswith("wrapper"):  # around replicate and fully_shard
            name, method = getattr(frame.f_locals.get("func"), "__name__", ""), "__init__"
        if method == "__init__" and name in _WRAPPERS:
            return name
    return None


def torch_averages() -> bool:
    """Whether `torch.optim.swa_utils.AveragedModel` calls, which copies its module."""
    return any(frame.f_code.co_qualname == "AveragedModel.__init__" for frame in _callers())


def wants_dtensors() -> bool:
    """Whether `get_state_dict` or the like of torch.distributed.checkpoint calls: it takes every
    rank's part of a value, and makes whole ones of them itself where it was asked to."""
    return _in_checkpointing() is not None


def flat_optimizer_state() -> Mapping[str, Any] | None:
    """What `set_optimizer_state_dict` of torch.distributed.checkpoint was given, where that is flat
    and it calls: it hands on the planes that `optimizer.state` shows, which need not be all."""
    frame = _in_checkpointing()
    given = None if frame is None else frame.f_locals.get("state_dict")
    return given if given and "state" not in given else None


def _in_checkpointing() -> FrameType | None:
    frames = (f for f in _callers() if f.f_globals.get("__name__") == _CHECKPOINTS)
    return next(frames, None)


def _callers() -> Iterator[FrameType]:
    """The nearest first."""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(MAX_FRAMES):
        if frame is None:
            return
        yield frame
        frame = frame.f_back
