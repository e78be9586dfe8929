"""Processes that end at a call on their disk, as one that is killed does: nothing is tidied up.

What was asked of a disk is `nvme.files.calls`. The n-th of these calls is not made.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import torch

import nvme
from bench.shared.models import token_batches
from bench.shared.workers import start_process
from gemini import AutoPlacement
from nvme.files import calls
from tests.support.checkpoints import train
from tests.support.spilled import LEAST, N, homes, wrapped

KILLED = 77  # exit status
CHANGES = (
    "open_file", "close", "pwritev", "allocate", "truncate", "punch", "fsync", "fdatasync",
    "mkdir", "rmdir", "unlink", "rename", "exchange", "symlink",
)  # fmt: skip


def die_at(number: int) -> None:
    """This process ends at that call from now on, counted from 0 over all threads."""
    lock, seen = threading.Lock(), [0]

    def double(real: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            with lock:
                if seen[0] == number:
                    os._exit(KILLED)
                seen[0] += 1
            return real(*args, **kwargs)

        return call

    for name in CHANGES:
        setattr(calls, name, double(getattr(calls, name)))


def two_steps(folder: str, number: int) -> None:
    """Of a model whose parameters and state are in files, behind one that counts."""
    torch.set_num_threads(1)
    batches = token_batches(3, 1)
    model, optimizer = wrapped(AutoPlacement(LEAST.device_budget, nvme_dir=folder))
    assert homes(model)[0] == {N} == homes(model)[2]
    train(model, optimizer, batches[:1])
    die_at(number)
    train(model, optimizer, batches[1:])
    os._exit(0)  # files are left as they are in a run that goes on


def left_by_kill(folder: Path, number: int) -> int | None:
    """The step that is whole in all files after a kill there; None where the run ends before it."""
    folder.mkdir()
    process = start_process(two_steps, str(folder), number)
    process.join()
    assert process.exitcode in (0, KILLED)
    step, parameters, masters = masters_and_parameters(folder)
    assert torch.equal(parameters, masters), (number, step)
    return step if process.exitcode else None


def masters_and_parameters(folder: Path) -> tuple[int, torch.Tensor, torch.Tensor]:
    """16-bit parameters and rounded fp32 masters of the last step that both files have."""
    (params,) = folder.glob("*parameters*")
    (state,) = (p for p in folder.iterdir() if "parameters" not in p.name and
                "gradients" not in p.name)  # fmt: skip
    with nvme.recover([params]) as mine, nvme.recover([state]) as other:
        step = min(mine.index.step, other.index.step)
        assert mine.index.step - step <= 1 and other.index.step == step
    with nvme.recover([params], step) as mine, nvme.recover([state], step) as other:
        shards = [mine.block(i) for i in range(mine.layout.num_blocks)]
        masters = [other.block(i) for i in range(other.layout.num_blocks)]
    values = [torch.frombuffer(bytearray(b), dtype=torch.bfloat16) for b in shards]
    rounded = [
        torch.frombuffer(bytearray(b), dtype=torch.float32)[: len(b) // 12].bfloat16()
        for b in masters
    ]
    return step, torch.cat(values), torch.cat(rounded)
