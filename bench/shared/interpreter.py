"""Triton's interpreter with several threads: ranks, and tails of steps."""

from __future__ import annotations

import functools
import threading
from typing import Any

from triton.runtime.interpreter import GridExecutor


@functools.cache
def one_kernel_at_a_time() -> None:
    """Let an interpreted kernel wait for the one before: the grid of the interpreter is global."""
    launch, lock = GridExecutor.__call__, threading.Lock()

    @functools.wraps(launch)
    def one_at_a_time(*args: Any, **kwargs: Any) -> None:
        with lock:
            launch(*args, **kwargs)

    GridExecutor.__call__ = one_at_a_time
