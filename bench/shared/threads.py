"""A world of several ranks in one process: a thread each, over gloo as processes have it."""

from __future__ import annotations

import ast
import functools
import gc
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.testing._internal.distributed import multi_threaded_pg as threaded

from bench.shared.interpreter import one_kernel_at_a_time

GRACE_SECONDS = 60.0  # for the others, once a rank has failed: their connections to it are closed
MOST_THREADS = 64  # of this process, before garbage is looked for: some machines have a limit
MOST_FRAMES = 12  # the innermost ones, of a rank that has not ended


def run_threads(
    work: Callable[[int], Any], world_size: int, *, backend: str = "threaded"
) -> list[Any]:
    """`work(rank)` on every rank; their results, or an error that names the ranks that failed.

    backend: `gloo`, with all that processes have, or torch's `threaded`, which takes tensors of any
    device and whose collectives have ended when they return. Kernels run in Triton's interpreter,
    one at a time.
    """
    results: list[Any] = [None] * world_size
    errors: dict[int, str] = {}  # by rank, in the order in which they failed
    groups: list[Any] = []  # the end of one waits for what is under way in it
    running = set(range(world_size))
    over: list[bool] = []  # nobody waits any more for ranks that are left
    others = _sockets()
    store = dist.HashStore()  # type: ignore[attr-defined]

    def run(rank: int) -> None:
        try:
            torch.set_num_threads(1)
            dist.init_process_group(backend, rank=rank, world_size=world_size, store=store)
            results[rank] = work(rank)
        except BaseException as error:
            if not (errors and isinstance(error, SystemExit)):  # `threaded` ends the others so
                errors[rank] = traceback.format_exc()
            threaded.ProcessLocalGroup.exception_handle(error)
            traceback.clear_frames(error.__traceback__)
            del error
            groups.extend(dist.distributed_c10d._world.pg_map)
            collect()  # what leaves a meeting tells the others, who else wait for this rank
            if not over:
                _shut(_sockets() - others)
        finally:
            if dist.is_initialized():
                groups.extend(dist.distributed_c10d._world.pg_map)
                dist.destroy_process_group()
            running.discard(rank)

    threads = [
        threading.Thread(target=run, args=(rank,), name=f"rank {rank}", daemon=True)
        for rank in range(world_size)
    ]
    with _one_world_a_thread(world_size):
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                while thread.is_alive() and not errors:
                    thread.join(0.1)
            for index, thread in enumerate(threads):
                thread.join(0 if running & set(range(index)) else GRACE_SECONDS)
        except BaseException as error:  # pytest's time-out
            error.add_note(_said(errors, running, threads))
            threaded.ProcessLocalGroup.exception_handle(error)
            raise
        finally:
            over.append(True)
            _shut(_sockets() - others)
            groups.clear()
            _forget_groups()
    if errors or running:
        raise AssertionError(_said(errors, running, threads))
    return results


def _forget_groups() -> None:
    """Drop groups that nobody asks for any more, each of which has three threads: torch's plans of
    redistributions and its cached functions hold meshes, and cycles hold engines."""
    if len(os.listdir("/proc/self/task")) <= MOST_THREADS:
        return
    tensors = "torch.distributed.tensor"
    if tensors in sys.modules:
        planners = sys.modules.get(f"{tensors}._redistribute")
        getattr(planners, "clear_redistribute_planner_cache", list)()
        for held in gc.get_objects():
            if type(held) is functools._lru_cache_wrapper and (held.__module__ or "").startswith(
                tensors
            ):
                held.cache_clear()
    collect()


def _said(errors: dict[int, str], running: set[int], threads: Sequence[threading.Thread]) -> str:
    """Errors, and where ranks are that have not ended: of a deadlock nothing else is known."""
    said = [f"rank {rank}: {text}" for rank, text in errors.items()]
    if running:
        said.append(f"did not end: {', '.join(f'rank {rank}' for rank in sorted(running))}")
    frames = sys._current_frames()
    for rank in sorted(running):
        frame = frames.get(threads[rank].ident or 0)
        stack = traceback.format_stack(frame, limit=MOST_FRAMES) if frame is not None else []
        said.append(f"rank {rank} is at:\n{''.join(stack)}")
    return "\n".join(["of threads:", *said])


def collect() -> None:
    """Garbage; `gc.collect` does nothing while another thread is at it, in a finalizer say."""
    own, ran = threading.get_ident(), list[int]()

    def note(phase: str, info: dict[str, int]) -> None:
        ran.append(threading.get_ident())

    gc.callbacks.append(note)
    try:
        while own not in ran:
            gc.collect()
            time.sleep(0.001)
    finally:
        gc.callbacks.remove(note)


def _sockets() -> set[int]:
    """Descriptors of this process that are sockets."""
    found = set()
    for path in sorted(Path("/proc/self/fd").iterdir()):
        with suppress(FileNotFoundError):
            if str(path.readlink()).startswith("socket:"):
                found.add(int(path.name))
    return found


def _shut(descriptors: set[int]) -> None:
    """End the connections between ranks, as the end of a process does: nobody waits in them."""
    for descriptor in sorted(descriptors):
        with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
            connection.getpeername()  # gloo aborts where what listens is shut
            connection.shutdown(socket.SHUT_RDWR)


_operators = threading.RLock()


def one_object_an_operator() -> None:
    """Let all threads that ask torch for an operator get one object, from now on.

    Under a dispatch mode torch keeps the address of the object that it found first, and no
    reference. Two threads that look for an operator at the same time make two objects, and
    `torch.ops` keeps the second: the first one's memory becomes somebody else's, and the operator's
    next call finds that, or ends the process with signal 11.
    """
    for owner in (torch._ops._OpNamespace, torch._ops.OpOverloadPacket):
        find = owner.__getattr__
        if hasattr(find, "__wrapped__"):
            continue

        def found(self: Any, name: str, find: Callable[[Any, str], Any] = find) -> Any:
            with _operators:
                known = vars(self)
                return known[name] if name in known else find(self, name)

        owner.__getattr__ = functools.wraps(find)(found)  # type: ignore[method-assign]


@contextmanager
def _one_world_a_thread(world_size: int) -> Iterator[None]:
    """What ranks share while they are threads; all as it was behind it."""
    one_kernel_at_a_time()
    one_object_an_operator()
    parse, parsing = ast.parse, threading.Lock()

    def one_tree_at_a_time(*args: Any, **kwargs: Any) -> Any:  # CPython 3.11 counts depth globally
        with parsing:
            return parse(*args, **kwargs)

    start, of_thread = threading.Thread.start, threaded.ThreadLocalWorld._world

    def start_in_world(thread: threading.Thread) -> None:  # a rank's own threads are of its world
        world, run = getattr(of_thread, "world", None), thread.run

        def run_in_world() -> None:
            of_thread.world = world
            run()

        if world is not None:
            thread.run = run_in_world  # type: ignore[method-assign]
        start(thread)

    c10d: Any = torch._C._distributed_c10d
    isolate = c10d._set_thread_isolation_mode
    drawn, num_threads = torch.get_rng_state(), torch.get_num_threads()
    isolate(True)
    threaded._install_threaded_pg()
    try:
        with (
            patch.object(ast, "parse", one_tree_at_a_time),
            patch.object(threading.Thread, "start", start_in_world),
            patch.dict(os.environ, LOCAL_WORLD_SIZE=str(world_size)),
        ):
            yield
        if not torch.equal(drawn, torch.get_rng_state()):
            raise AssertionError(
                "a rank drew from torch's own generator, which all threads share: what it drew "
                "depends on the others; expected a generator of its own, or"
                " `bench.shared.models.seeded`"
            )
    finally:
        torch.set_rng_state(drawn)
        torch.set_num_threads(num_threads)
        threaded._uninstall_threaded_pg()
        threaded.ProcessLocalGroup.reset()
        isolate(False)
