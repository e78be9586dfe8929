"""How much memory a call takes, at most, as the system sees it."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path

MOST = 64 << 20  # bytes that reading a file may take beside what it has


def _status(name: str) -> int:
    text = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(text.split(f"{name}:")[1].split()[0]) << 10


def resident_bytes() -> int:
    """Bytes of resident memory that is in use: without what Python and glibc keep for later, which
    comes and goes by some MiB."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return _status("VmRSS")


def peak_bytes(work: Callable[[], object]) -> int:
    """Bytes of resident memory that `work` takes on top of what there is."""
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # forgets the peak so far
    before = _status("VmRSS")
    work()
    return _status("VmHWM") - before
