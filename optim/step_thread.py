"""A thread that signals do not interrupt, for work that must end whole or be undone.

Python delivers Ctrl-C to the main thread between any two bytecodes. An update that ran there could
stop with a buffer taken and not given back, or with half of the weights written. So the main thread
only waits; an interrupt sets a flag that the work may look at where stopping is safe.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


class StepThread:
    """One thread, and the flag that says that an interrupt came."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="step")
        self._interrupted = threading.Event()

    @property
    def interrupted(self) -> bool:
        return self._interrupted.is_set()

    def run(self, work: Callable[[], T]) -> T:
        """`work`'s result. An interrupt is raised only when `work` has ended."""
        self._interrupted.clear()
        return wait_all([self._pool.submit(work)], on_interrupt=self._interrupted.set)[0]

    def close(self) -> None:
        self._pool.shutdown(wait=True)


def wait_all(
    futures: Sequence[Future[T]], on_interrupt: Callable[[], object] = lambda: None
) -> list[T]:
    """Results in order. Waits for all of them before it raises, an interrupt included."""
    first_error: BaseException | None = None
    results: list[T] = []
    for future in futures:
        while True:
            try:
                results.append(future.result())
            except KeyboardInterrupt as interrupt:
                first_error = interrupt  # before any error that it caused
                on_interrupt()
                if not future.done():
                    continue
            except Exception as error:
                first_error = first_error or error
            break
    if first_error is not None:
        raise first_error
    return results
