"""Gradients as a step measures them: run by run, wherever each of them waits."""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from gemini.optim.state.pieces import GradSegment
from gemini.units import ParamId

Bits = tuple[int, Tensor]  # of a run's gradient: its id, the sum of its words; int64 0-d


class RunGradient(Protocol):
    """Gradient of one run, which has one."""

    shard: Tensor | None  # [n], where updates run; None: it waits elsewhere
    found: Any  # what was measured of it when it left, as long as it waits elsewhere

    def load(self) -> Tensor:
        """Gradient [n] where updates run: itself, or a copy if it waits elsewhere."""
        ...


@dataclass(frozen=True, slots=True)
class GradientRun:
    """Elements [n] of parameters, whose gradient is measured by their place.

    dtype: of the weights; on a device, runs of one dtype are measured together.
    parts: by parameter, in order.
    counts: whether this rank adds them to sums over ranks.
    has_replicas: other ranks have the same run, and must come to the same gradient.
    """

    id: int
    dtype: str
    parts: tuple[GradSegment, ...]
    gradient: RunGradient
    counts: bool = True
    has_replicas: bool = False


@dataclass(frozen=True, slots=True)
class Measured:
    """Measures of gradients on this rank.

    Sum of |g|^p of the runs that it speaks for, the first parameter that is not finite, and a
    checksum of the bits that replicas must have, too.
    """

    power_sum: float = 0.0
    first_nonfinite: ParamId | None = None
    checksum: int = 0


def bits_of(runs: Sequence[GradientRun], grads: Sequence[Tensor]) -> list[Bits]:
    """Sums of words of runs that have replicas: one changed bit shows. Waits for nothing."""
    return [
        (run.id, grad.view(torch.int64).sum())
        for run, grad in zip(runs, grads, strict=True)
        if run.has_replicas
    ]


def checksum(bits: Sequence[Bits]) -> int:
    """Checksum of runs that have replicas, in any order; 32 bits. Waits for the device."""
    if not bits:
        return 0
    runs, sums = zip(*sorted(bits, key=lambda pair: pair[0]), strict=True)
    words = array("q", [*runs, *torch.stack(sums).tolist()])
    return zlib.crc32(words.tobytes())
