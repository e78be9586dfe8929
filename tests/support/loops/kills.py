"""Processes that are killed while they train, and what their files then hold."""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

import nvme
from bench.shared.models import token_loss
from bench.shared.workers import run_processes, start_process
from tests.support.loops.tails import batches, has_tail, wrapped

MAX_STEPS = 60


def digests(paths: Any, step: int | None = None) -> tuple[int, list[Any]]:
    """The last step that counts in a store's files, and its blocks."""
    with nvme.recover(paths, step) as found:
        return found.index.step, [found.block(i) for i in range(found.layout.num_blocks)]


def after_every_step(index: int, folder: str, count: int) -> dict[int, list[Any]]:
    """What is in the file after each step of a run without kills, stepped serially."""
    torch.set_num_threads(1)
    model, optimizer = wrapped("serial", folder=folder)
    optimizer.bind()
    paths = optimizer.targets[0].tiered_state.nvme.store.paths
    found = {0: digests(paths)[1]}
    for batch in batches(count):
        token_loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        step, blocks = digests(paths)
        found[step] = blocks
    optimizer.close()
    return found


def train_until_killed(update: str, folder: str, count: int) -> None:
    """On a disk that takes its time, so that kills fall into updates."""
    torch.set_num_threads(1)
    from nvme.files import calls

    write = calls.pwritev

    def slow(*args: Any) -> int:
        time.sleep(0.001)
        return write(*args)

    calls.pwritev = slow
    model, optimizer = wrapped(update, folder=folder)
    for batch in batches(count):
        token_loss(model, batch).backward()
        if update != "tail":
            time.sleep(0.01)  # in which blocks are updated
        optimizer.step()
        optimizer.zero_grad()
    assert has_tail(optimizer)
    time.sleep(60)


def kill(update: str, folder: Path, seed: int, expected: dict[int, list[Any]]) -> int:
    """One run; the step that is left, whole."""
    rng = random.Random(seed)
    folder.mkdir()
    process = start_process(train_until_killed, update, str(folder), MAX_STEPS)
    deadline = time.monotonic() + 60
    while True:
        assert process.is_alive() and time.monotonic() < deadline
        try:
            digests(list(folder.iterdir()))
            break
        except (ValueError, nvme.NvmeError):  # no file, or none that holds a commit
            time.sleep(0.005)
    time.sleep(1.2 * rng.random())
    process.kill()
    process.join()
    step, blocks = digests(list(folder.iterdir()))
    assert blocks == expected[step], (seed, step)
    shutil.rmtree(folder)
    return step


def kills(update: str, folder: Path, seeds: Iterable[int]) -> list[int]:
    """The steps that are left, each with the bits of a serial run."""
    (folder / "serial").mkdir()
    (expected,) = run_processes(after_every_step, 1, str(folder / "serial"), MAX_STEPS)
    return [kill(update, folder / str(seed), seed, expected) for seed in seeds]
