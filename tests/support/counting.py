"""Work that is counted and not timed, so that it is the same on every machine, however busy.

Lines of ours that ran on this thread; bytes that Python was asked for, which show the loops that
run in C (a copy of a list is one line); bytes that torch's allocator gave and took back.
"""

from __future__ import annotations

import gc
import itertools
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from torch.profiler import ProfilerActivity, profile

_ROOT = Path(__file__).resolve().parents[2]
_OURS = tuple(f"{_ROOT / part}/" for part in ("gemini", "optim", "kernels_triton", "io/nvme"))
LINEAR = 2.05  # what twice as many may cost: tables grow in steps


class _Traced:
    """`seen` is called at every line of ours."""

    def __init__(self, seen: Callable[[], None]) -> None:
        self._seen = seen

    def _trace(self, frame: FrameType, event: str, arg: object) -> Any:
        if not frame.f_code.co_filename.startswith(_OURS):
            return None
        if event == "line":
            self._seen()
        return self._trace

    def run(self, work: Callable[[], object]) -> None:
        gc.collect()
        gc.disable()
        sys.settrace(self._trace)
        try:
            work()
        finally:
            sys.settrace(None)
            gc.enable()


def lines(work: Callable[[], object]) -> int:
    """Lines of ours that `work` runs."""
    found = 0

    def seen() -> None:
        nonlocal found
        found += 1

    _Traced(seen).run(work)
    return found


def python_bytes(work: Callable[[], object]) -> int:
    """Bytes that it asks Python's allocators for, given back or not."""
    found = held = 0

    def seen() -> None:
        nonlocal found, held
        now, peak = tracemalloc.get_traced_memory()
        found += max(0, peak - held)
        held = now
        tracemalloc.reset_peak()

    tracemalloc.start(1)
    try:
        _Traced(seen).run(work)
        seen()
    finally:
        tracemalloc.stop()
    return found


def growth(
    make: Callable[[int], Callable[[], object]],
    n: int,
    count: Callable[[Callable[[], object]], int] = lines,
) -> float:
    """How many times as much `make(2n)()` counts as `make(n)()`."""
    half, whole = make(n), make(2 * n)
    return count(whole) / count(half)


@dataclass(frozen=True)
class Allocated:
    """Bytes of torch's allocator of the CPU, beyond what there was before: at most, and at last."""

    peak: int
    left: int


def allocated(work: Callable[[], object]) -> Allocated:
    """What kernels make for themselves is counted, too."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=False) as seen:
        work()
        gc.collect()
    result: Any = seen.profiler
    sizes = [
        event.extra_fields.alloc_size
        for event in sorted(
            _all(result.kineto_results.experimental_event_tree()), key=lambda e: e.start_time_ns
        )
        if event.tag.name == "Allocation"
    ]
    sums = [0, *itertools.accumulate(sizes)]
    return Allocated(max(sums), sums[-1])


def _all(events: Any) -> Iterator[Any]:
    for event in events:
        yield event
        yield from _all(event.children)
