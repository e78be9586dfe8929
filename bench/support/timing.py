"""Interleaved timing: variants in turn, round after round, so that all see the same machine."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import torch


def interleaved(
    variants: Mapping[str, Callable[[], object]],
    rounds: int,
    device: torch.device,
    after_round: Callable[[Mapping[str, list[float]]], None] = lambda _: None,
) -> dict[str, list[float]]:
    """Seconds of every variant in every round, after one round that does not count.

    after_round: is given what there is so far.
    """
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for turn in range(rounds + 1):
        for name, run in variants.items():
            spent = _timed(run, device)
            if turn:
                seconds[name].append(spent)
        if turn:
            after_round(seconds)
    return seconds


def _timed(run: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def median_ratio(seconds: Mapping[str, list[float]], name: str, base: str) -> float:
    """Median over rounds of `name`'s time over `base`'s in the same round."""
    pairs = zip(seconds[name], seconds[base], strict=True)
    return statistics.median(a / b for a, b in pairs)
