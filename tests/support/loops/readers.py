"""Threads that read weights, gradients and state while another one trains.

Whatever they read is of the last step, and training has the bits that it has without them.
"""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

READS: dict[str, Callable[[Any, Any], object]] = {
    "detach": lambda m, o: [p.detach().float().sum() for p in m.parameters()],
    "data": lambda m, o: [p.data.float().sum() for p in m.parameters()],
    "gradients": lambda m, o: [p.grad is None for p in m.parameters()],
    "weights": lambda m, o: m.state_dict(),
    "state": lambda m, o: o.state_dict(),
    "runs": lambda m, o: o.visit_state(lambda run: None),
    "digest": lambda m, o: m.digest(),
    "reports": lambda m, o: (str(m.memory_report()), m.explain("layers.0.weight"), o.skipped_steps),
    "last report": lambda m, o: o.last_report and o.last_report.as_dict(),
}
INTERVALS = (1e-6, 1e-5, 1e-4, 1e-3, 5e-3)  # between two threads, in seconds; the last is Python's


@dataclass
class Readers:
    """errors: each with the name of the read."""

    errors: list[tuple[str, BaseException]] = field(default_factory=list)
    num_reads: int = 0


@contextmanager
def readers(
    run: Any,
    *,
    count: int = 2,
    interval: float = INTERVALS[-1],
    seed: int = 0,
    reads: Sequence[str] = tuple(READS),
) -> Iterator[Readers]:
    """Threads that read one after the other of `reads`, drawn, until the body ends.

    run: has a `model` and an `optimizer`, which may be closed and be another one meanwhile.
    """
    stop, found, before = threading.Event(), Readers(), sys.getswitchinterval()

    def read(number: int) -> None:
        rng = random.Random(f"{seed} {number}")
        while not stop.is_set():
            what = rng.choice(reads)
            try:
                READS[what](run.model, run.optimizer)
            except BaseException as error:
                if "this optimizer was closed" in str(error):
                    continue
                found.errors.append((what, error))
                return
            found.num_reads += 1

    threads = [threading.Thread(target=read, args=(i,)) for i in range(count)]
    sys.setswitchinterval(interval)
    for thread in threads:
        thread.start()
    try:
        yield found
    finally:
        stop.set()
        for thread in threads:
            thread.join()
        sys.setswitchinterval(before)


def in_a_thread(work: Callable[[], Any]) -> Any:
    """What `work` returns in a thread of its own. Raises what it raises."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(work())
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if isinstance(found[0], BaseException):
        raise found[0]
    return found[0]


def values_of(model: Any) -> dict[str, torch.Tensor]:
    """Copies of all weights, as an operator reads them."""
    return {name: p.detach().clone() for name, p in model.module.named_parameters()}
