"""Several ranks for a test: threads of this process, or processes from a forkserver that has torch
loaded."""

from __future__ import annotations

import io
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from bench.shared.threads import run_threads

_context = multiprocessing.get_context("forkserver")
_preloaded = [
    "torch", "torch.distributed", "gemini.ddp", "optim", "gemini.checkpoint",
    "torch._dynamo", "numpy.ma",  # what the first optimizer and the first search import: a second
]  # fmt: skip
_context.set_forkserver_preload(_preloaded)
TIMEOUT_SECONDS = 300
# By rank. Under the first two, names of mesh dimensions, planes, weights and experts in a set have
# unlike orders; under any two, half of all pairs of names have.
HASH_SEEDS = ("1", "3", "5", "8")
_unlike: list[forkserver.ForkServer] = []  # by rank, if ranks hash unlike each other


def preload(*modules: str) -> None:
    """Import these once for all processes to come, before the first of them is started."""
    _preloaded.extend(modules)
    _context.set_forkserver_preload(_preloaded)


def make_ranks_unlike() -> None:
    """From now on every rank is a process, and hashes strings in its own way, as those of torchrun
    do: what a set of names puts in order is in another order on each."""
    _unlike.extend(forkserver.ForkServer() for _ in HASH_SEEDS)


def _hashing_as(rank: int) -> AbstractContextManager[Any]:
    """Processes that start meanwhile are this rank's."""
    if not _unlike:
        return nullcontext()
    place = rank % len(HASH_SEEDS)
    server = _unlike[place]
    server.set_forkserver_preload(_preloaded)
    with patch.dict(os.environ, PYTHONHASHSEED=HASH_SEEDS[place]):
        server.ensure_running()
    return patch.object(forkserver, "connect_to_new_process", server.connect_to_new_process)


def poison_memory() -> None:
    """torch.empty is filled with NaN: what is read before it is written shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]


def run_ranks(
    work: Callable[..., Any], world_size: int, *args: Any, processes: bool = False
) -> list[Any]:
    """`work(rank, *args)` on every rank of a gloo group; their results, or an error that names the
    ranks that failed.

    Ranks are threads. processes: each is a process, for what is of one (its end, environment,
    signals, limits, generator, a library that has one state a process, a function that a rank
    replaces), and for what is measured.
    """
    if processes or _unlike:
        with tempfile.TemporaryDirectory() as folder:
            store = f"file://{folder}/store"
            return run_processes(_rank, world_size, world_size, store, work, args)
    return run_threads(lambda rank: _by_value(work(rank, *args)), world_size, backend="gloo")


def run_processes(work: Callable[..., Any], count: int, *args: Any) -> list[Any]:
    """`work(index, *args)` in `count` processes; their results, or the first error."""
    pipes = [_context.Pipe(duplex=False) for _ in range(count)]
    processes = [
        _context.Process(target=_guarded, args=(pipes[i][1], work, i, *args), daemon=True)
        for i in range(count)
    ]
    for i, process in enumerate(processes):
        with _hashing_as(i):
            process.start()
    try:
        results = []
        for i, (receiver, _) in enumerate(pipes):
            pipes[i][1].close()
            if not receiver.poll(TIMEOUT_SECONDS):
                raise TimeoutError(f"process {i} said nothing for {TIMEOUT_SECONDS} s")
            results.append(torch.load(io.BytesIO(receiver.recv_bytes()), weights_only=False))
    finally:
        for process in processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()
    errors = [f"{i}: {error}" for i, (_, error) in enumerate(results) if error is not None]
    if errors:
        raise AssertionError("of processes:\n" + "\n".join(errors))
    return [value for value, _ in results]


def start_process(work: Callable[..., Any], *args: Any) -> Any:
    """`work(*args)` in a process of its own, which the caller joins or kills."""
    process = _context.Process(target=work, args=args, daemon=True)
    process.start()
    return process


def _guarded(sender: Connection, work: Callable[..., Any], index: int, *args: Any) -> None:
    result: tuple[Any, str | None]
    try:
        result = (work(index, *args), None)
    except BaseException:
        result = (None, traceback.format_exc())
    sender.send_bytes(_saved(result))


def _saved(value: Any) -> bytes:
    data = io.BytesIO()
    torch.save(value, data)
    return data.getvalue()


def _by_value(value: Any) -> Any:
    """Tensors by value: their rank, and what it has freed, is gone when they are looked at."""
    return torch.load(io.BytesIO(_saved(value)), weights_only=False)


def _rank(
    rank: int, world_size: int, store: str, work: Callable[..., Any], args: tuple[Any, ...]
) -> Any:
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size), STORE=store
    )
    torch.set_num_threads(1)
    poison_memory()
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size)
    try:
        dist.barrier()  # one that ends at once would close what another still connects
        return work(rank, *args)
    finally:
        dist.destroy_process_group()
