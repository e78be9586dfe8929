"""Named ranges in torch's profiles: gathers, reductions, reads, updates, writes and waits.

`torch.profiler` shows them, with `profile_all_threads` also those of worker threads; NVTX has them
under `torch.autograd.profiler.emit_nvtx()`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch.autograd import profiler

OFF = nullcontext()


def named(what: str, kind: str, number: object = "") -> AbstractContextManager[object]:
    """Range `gemini: what kind number`; `OFF` if no profiler runs.

    Code that every layer runs asks `profiler._is_profiler_enabled` itself, which saves this call.
    """
    if not profiler._is_profiler_enabled:
        return OFF
    return profiler.record_function(f"gemini: {what} {kind} {number}".rstrip())
