"""Work that is counted and not timed, so that it is the same on every machine, however busy.

Lines of ours that ran on this thread; bytes that Python was asked for, which show the loops that
run in C (a copy of a list is one line); bytes of the tensors that operators made.
"""

from __future__ import annotations

import gc
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

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


class Made(TorchDispatchMode):
    """Bytes of the tensors that operators make, in all; in place and as a view they make none."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes: int = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = {_storage(tensor) for tensor in _tensors((args, kwargs))}
        out = func(*args, **(kwargs or {}))
        for tensor in _tensors(out):
            if _storage(tensor) not in given:
                self.nbytes += tensor.untyped_storage().nbytes()
        return out


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _storage(tensor: Tensor) -> int:
    address: int = tensor.untyped_storage()._cdata
    return address


def tensor_bytes(work: Callable[[], object]) -> int:
    with Made() as made:
        work()
    nbytes: int = made.nbytes
    return nbytes
