"""Pinned host memory without the allocator's rounding: a slab is registered with CUDA as it is."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable

import torch

log = logging.getLogger("gemini")


def pin_slab(address: int, nbytes: int) -> Callable[[], object]:
    """Page-lock [address, address + nbytes) for CUDA; the answer undoes it.

    Where the system refuses (a limit on locked memory), it says so and the memory stays pageable:
    copies are slower then, and as right.
    """
    runtime = torch.cuda.cudart()
    status = int(runtime.cudaHostRegister(address, nbytes, 0))
    if status:
        log.warning(
            "cannot pin %d bytes of staging (cudaError %d): pageable copies", nbytes, status
        )
        return lambda: None

    def unpin() -> None:
        with contextlib.suppress(Exception):  # at interpreter exit the driver may be gone
            runtime.cudaHostUnregister(address)

    return unpin
