"""Pinned host memory without the allocator's rounding: exact sizes, given back when dropped.

torch's own pinned allocator takes the next power of two and never gives anything back.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
from collections.abc import Callable
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from gemini import numa

log = logging.getLogger("gemini")
_MADV_WIPEONFORK = 18  # Linux 4.14; Python has no name for it

Pin = Callable[[int, int], Callable[[], object]]  # (address, nbytes) -> undo


def pin_slab(address: int, nbytes: int) -> Callable[[], object]:
    """Page-lock [address, address + nbytes), which nobody has touched, for CUDA; on the current
    device's NUMA node. Returns what undoes it, after the device's work.

    Where the system refuses, it says so and the memory stays pageable: copies are slower then, and
    as right.
    """
    numa.place(address, nbytes)
    runtime = torch.cuda.cudart()
    status = int(runtime.cudaHostRegister(address, nbytes, 0))
    if status:
        forget_last_error()
        log.warning("cannot pin %d bytes (cudaError %d): pageable copies", nbytes, status)
        return lambda: None

    def unpin() -> None:
        with contextlib.suppress(Exception):  # at interpreter exit the driver may be gone
            torch.cuda.synchronize()  # a copy may still read or write it
            runtime.cudaHostUnregister(address)

    return unpin


def pages_of(address: int) -> PinnedPages | None:
    """Pages that begin at an address, if `pinned` made them."""
    return _pages.get(address)


def forget_last_error() -> None:
    """Clear the error that a refused call of CUDA left: torch's next check would raise it."""
    major = (torch.version.cuda or "").partition(".")[0]
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(f"libcudart.so.{major}").cudaGetLastError()


def pinned(numel: int, dtype: torch.dtype, pin: Pin = pin_slab) -> Tensor:
    """Uninitialised [numel] of its own pages, pinned until the last view of it is dropped."""
    nbytes = numel * dtype.itemsize
    if not nbytes:
        return torch.empty(numel, dtype=dtype)
    return torch.frombuffer(PinnedPages(nbytes, pin), dtype=dtype, count=numel)


class PinnedPages(mmap.mmap):
    """Pages that are unpinned before they are given back.

    A forked child finds zeros in them, so that the parent's pages are not copied under a transfer.
    """

    def __new__(cls, nbytes: int, pin: Pin) -> PinnedPages:
        made = super().__new__(cls, -1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        made.madvise(_MADV_WIPEONFORK)
        with contextlib.suppress(OSError):  # of a kernel without huge pages
            made.madvise(mmap.MADV_HUGEPAGE)
        return made

    def __init__(self, nbytes: int, pin: Pin) -> None:
        self._nbytes, self._pin = nbytes, pin
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self))
        self._unpin: Callable[[], object] | None = pin(self._address, nbytes)
        _pages[self._address] = self

    # A finalizer of `weakref` would run after the pages are unmapped: CUDA would then unpin memory
    # that may be another's.
    def __del__(self) -> None:
        if self._unpin is not None:
            self._unpin()

    def give_back(self) -> None:
        """Give the memory to the system for a while; what it held is lost."""
        # unpinned first: the system does not take pinned pages back
        if self._unpin is not None:
            self._unpin()
            self._unpin = None
            self.madvise(mmap.MADV_DONTNEED)

    def take_back(self) -> None:
        """Have it again, uninitialised. May be called again."""
        if self._unpin is None:
            self._unpin = self._pin(self._address, self._nbytes)


_pages: WeakValueDictionary[int, PinnedPages] = WeakValueDictionary()
