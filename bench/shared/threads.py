"""A world of several ranks in one process: threads of torch's own process group for them."""

from __future__ import annotations

import gc
import threading
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed import multi_threaded_pg as threaded
from triton.runtime.interpreter import GridExecutor


def run_threads(work: Callable[[int], Any], world_size: int) -> list[Any]:
    """`work(rank)` on every rank; their results, or the first error.

    Kernels run in Triton's interpreter, one at a time.
    """
    results: list[Any] = [None] * world_size
    errors: list[str] = []
    launch, lock = GridExecutor.__call__, threading.Lock()

    def one_at_a_time(*args: Any, **kwargs: Any) -> None:  # the interpreter's grid is global
        with lock:
            launch(*args, **kwargs)

    GridExecutor.__call__ = one_at_a_time
    c10d: Any = torch._C._distributed_c10d
    isolate = c10d._set_thread_isolation_mode
    isolate(True)
    world = threaded._install_threaded_pg()
    store = dist.HashStore()  # type: ignore[attr-defined]

    def run(rank: int) -> None:
        try:
            dist.init_process_group("threaded", rank=rank, world_size=world_size, store=store)
            results[rank] = work(rank)
        except BaseException as error:
            errors.append(traceback.format_exc())
            threaded.ProcessLocalGroup.exception_handle(error)
            del error
            gc.collect()  # what leaves a meeting tells the others, who else wait for this rank
        finally:
            if world.default_pg is not None:
                dist.destroy_process_group()

    try:
        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world_size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        threaded._uninstall_threaded_pg()
        threaded.ProcessLocalGroup.reset()
        isolate(False)
        GridExecutor.__call__ = launch
    if errors:
        raise AssertionError("in a thread:\n" + "\n".join(errors))
    return results
