"""Tools that old scripts take from `colossalai.utils`: timers, printing, loaders, loggers."""

from __future__ import annotations

import logging
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.multiprocessing
from torch.utils.data import DataLoader, Dataset

from gemini.api import passes_on, rank
from gemini.integrations.config import ParallelMode, global_context
from gemini.integrations.parts import dataloader

_OF_TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "TORCHELASTIC_USE_AGENT_STORE")


class Timer:
    """Timer of seconds between `start` and `stop`, with a history of the pairs to keep."""

    def __init__(self) -> None:
        self._began, self._last = 0.0, 0.0
        self._history: list[float] = []

    def start(self) -> None:
        """Begin anew, after a wait for the device's queue."""
        self._began = _now()

    def stop(self, keep_in_history: bool = False) -> float:
        """Seconds since `start`."""
        self._last = _now() - self._began
        if keep_in_history:
            self._history.append(self._last)
        return self._last

    def get_elapsed_time(self) -> float:
        """Seconds of the last pair."""
        return self._last

    def get_history_sum(self) -> float:
        return sum(self._history)

    def get_history_mean(self) -> float:
        """Mean seconds of the kept pairs; 0 without any."""
        return sum(self._history) / max(1, len(self._history))

    def reset(self) -> None:
        self._last = 0.0
        self._history.clear()


class MultiTimer:
    """Timers by name, which measure nothing if `on` is false."""

    def __init__(self, on: bool = True) -> None:
        self._on = on
        self._timers: dict[str, Timer] = {}

    def start(self, name: str) -> None:
        if self._on:
            self._timers.setdefault(name, Timer()).start()

    def stop(self, name: str, keep_in_history: bool = False) -> float:
        """Seconds since the start of the same name; 0 if timers are off."""
        return self._timers[name].stop(keep_in_history) if self._on else 0.0

    def get_timer(self, name: str) -> Timer:
        return self._timers[name]

    def reset(self, name: str | None = None) -> None:
        """Reset one timer, or all for None."""
        for key, timer in self._timers.items():
            if name in (None, key):
                timer.reset()

    def is_on(self) -> bool:
        return self._on

    def set_status(self, mode: bool) -> None:
        self._on = mode

    def __iter__(self) -> Iterator[tuple[str, Timer]]:
        return iter(self._timers.items())


def _now() -> float:
    # kernels run after their launch has returned: without a wait their time would be missing
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def print_rank_0(msg: str, logger: logging.Logger | None = None) -> None:
    """Print, or log, on the first rank alone."""
    if rank() == 0:
        if logger is None:
            sys.stdout.write(f"{msg}\n")
        else:
            logger.info(msg)


@passes_on(DataLoader)
def get_dataloader(
    dataset: Dataset[Any],
    shuffle: bool = False,
    seed: int = 1024,
    add_sampler: bool = True,
    drop_last: bool = False,
    pin_memory: bool = False,
    num_workers: int = 0,
    **kwargs: Any,
) -> DataLoader[Any]:
    """Loader of this rank's part of `dataset`, or of all of it without `add_sampler`.

    Ranks that split layers, and stages of one pipeline, see the same data, by the launch's
    configuration. kwargs: for `torch.utils.data.DataLoader`.
    """
    place: tuple[int, int] | None = None if add_sampler else (0, 1)
    if add_sampler and global_context.config.get("parallel"):
        place = tuple(of(ParallelMode.DATA) for of in (  # type: ignore[assignment]
            global_context.get_local_rank, global_context.get_world_size
        ))  # fmt: skip
    return dataloader(
        dataset, place, shuffle=shuffle, seed=seed, drop_last=drop_last, pin_memory=pin_memory,
        num_workers=num_workers, **kwargs,
    )  # fmt: skip


def disable_existing_loggers(
    include: Sequence[str] | None = None, exclude: Sequence[str] = ("gemini",)
) -> None:
    """Limit loggers to warnings: those of `include`, or all outside of `exclude`."""
    names = list(logging.root.manager.loggerDict) if include is None else list(include)
    for name in names:
        if include is not None or name.partition(".")[0] not in exclude:
            logging.getLogger(name).setLevel(logging.WARNING)


def spawn(func: Callable[..., None], nprocs: int = 1, **kwargs: Any) -> None:
    """Run `func(rank, world_size=, port=, **kwargs)` in `nprocs` processes; for 1 in this one.

    port: a free one, for `launch`.
    """
    with socket.socket() as found:
        found.bind(("localhost", 0))
        port = found.getsockname()[1]
    run = partial(func, world_size=nprocs, port=port, **kwargs)
    if nprocs == 1:
        run(0)
    else:
        # to a process that torchrun started these name torchrun's ranks and their meeting place
        own = {name: os.environ.pop(name) for name in _OF_TORCHRUN if name in os.environ}
        try:
            torch.multiprocessing.spawn(run, nprocs=nprocs)  # type: ignore[attr-defined, no-untyped-call]
        finally:
            os.environ.update(own)
