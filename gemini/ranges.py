"""Named ranges in a profile of torch's: what is gathered, reduced, read, updated, written, awaited.

`torch.profiler` shows them, with `profile_all_threads` also those of worker threads; NVTX has them
under `torch.autograd.profiler.emit_nvtx()`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch.autograd import profiler

OFF = nullcontext()


def named(what: str, kind: str, number: object = "") -> AbstractContextManager[object]:
    """A range `gemini: what kind number`; nothing where nobody profiles.

    What every layer does asks `profiler._is_profiler_enabled` first, and takes `OFF`: a call less.
    """
    if not profiler._is_profiler_enabled:
        return OFF
    return profiler.record_function(f"gemini: {what} {kind} {number}".rstrip())
