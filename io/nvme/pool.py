"""Staging buffers: one slab of page-aligned memory, cut into equal buffers, reserved once."""

from __future__ import annotations

import ctypes
import mmap
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass

from gemini.units import PAGE_BYTES, align_up

_HUGE_PAGE_BYTES = 2 << 20
_MADV_WIPEONFORK = 18  # Linux 4.14; Python has no name for it
Pin = Callable[[int, int], Callable[[], object]]  # (address, nbytes) -> undo


@dataclass(frozen=True, slots=True, eq=False)
class Buffer:
    """Staging buffer; `view` is its writable memory, page-aligned."""

    index: int
    view: memoryview


class BufferPool:
    """Pool of `count` buffers of `nbytes` each. `reserve` may allocate, nothing later does.

    The memory is private: it counts where the process's does, and is given back when it is emptied.
    A forked child finds zeros in it. So a fork leaves the parent's pages as they are: copies of
    pages under direct I/O would take what the disk sends to the wrong process (open(2)).

    `pin` is called once with (address, nbytes) of the slab, to register it with a device; its
    result is called before the slab is given back.
    """

    def __init__(self, count: int, nbytes: int, pin: Pin | None = None) -> None:
        self.count = count
        self.buffer_nbytes = align_up(nbytes, PAGE_BYTES)
        private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._slab = mmap.mmap(-1, count * self.buffer_nbytes, flags=private)
        self._slab.madvise(_MADV_WIPEONFORK)
        if self.nbytes >= _HUGE_PAGE_BYTES:  # fewer page faults while the pool warms up
            self._slab.madvise(mmap.MADV_HUGEPAGE)
        view = memoryview(self._slab)
        self._pinned = pin is not None
        if pin is not None:
            address = ctypes.addressof(ctypes.c_char.from_buffer(self._slab))
            weakref.finalize(self, pin(address, self.nbytes))
        self._free = [
            Buffer(i, view[i * self.buffer_nbytes : (i + 1) * self.buffer_nbytes])
            for i in range(count)
        ]
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return self.count * self.buffer_nbytes

    @property
    def num_free(self) -> int:
        """Number of buffers that `take` would give."""
        return len(self._free)

    def empty(self) -> None:
        """Give the memory back to the system until it is used again; pinned memory stays."""
        if not self._pinned:
            self._slab.madvise(mmap.MADV_DONTNEED)

    def take(self) -> Buffer:
        """Take a free buffer. Raises RuntimeError where there is none; no pipeline asks for
        more."""
        with self._lock:
            if not self._free:
                raise RuntimeError(f"all {self.count} staging buffers are in use")
            return self._free.pop()

    def give(self, buffer: Buffer) -> None:
        """Take a buffer back."""
        with self._lock:
            self._free.append(buffer)
