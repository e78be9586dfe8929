"""What this process asks of CUDA, as the stub that is preloaded counts it."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Row = dict[str, Any]  # of a case in bench/results/cuda-stub.json
ROOT = Path(__file__).resolve().parents[2]
OURS = tuple(f"{ROOT / folder}{os.sep}" for folder in ("gemini", "optim", "kernels_triton", "io"))
FRAMES = 3  # of ours, in the place of a wait


@dataclass
class Asked:
    """Launches, copies, bytes, events and waits, by what each is. `waits`: by function of ours, of
    the loop. `apart`: those of threads of ours, which hold nobody up."""

    counts: dict[str, int] = field(default_factory=dict)
    waits: Counter[str] = field(default_factory=Counter)
    apart: Counter[str] = field(default_factory=Counter)


@contextmanager
def asked() -> Iterator[Asked]:
    """All that is asked for in here, by any thread."""
    stub, found = ctypes.CDLL(None), Asked()
    stub.stub_counts.restype = ctypes.c_char_p

    @ctypes.CFUNCTYPE(None, ctypes.c_char_p)
    def observer(what: bytes) -> None:
        thread = threading.current_thread()
        is_ours = type(thread) is threading.Thread  # and not of torch's backward
        (found.apart if is_ours else found.waits)[f"{what.decode()} in {place()}"] += 1

    stub.stub_reset()
    stub.stub_observe(observer)
    try:
        yield found
    finally:
        stub.stub_observe(None)
    lines = stub.stub_counts().decode().splitlines()
    found.counts = {what: int(times) for what, times in (line.split("\t") for line in lines)}


def counted(row: Row) -> Row:
    """Numbers of a row. Names of kernels, and of functions that wait, are notes on them: these
    change with the code."""
    launches = sorted(row.get("launches", {}).values())
    return {**{what: n for what, n in row.items() if isinstance(n, int)}, "launches": launches}


def place() -> str:
    """The innermost functions of ours; not their lines, which move."""
    frame, names = sys._getframe(1), []
    while frame is not None and len(names) < FRAMES:
        file = frame.f_code.co_filename
        if file.startswith(OURS):
            names.append(f"{Path(file).relative_to(ROOT)} {frame.f_code.co_qualname}")
        frame = frame.f_back
    return " < ".join(names) or "no function of ours"
