"""Double of tensornvme's AsyncFileWriter, for machines where the package is not built.

As the package's: a write is under way until its ring says otherwise, the memory is read when the
disk takes it, the descriptor is looked up when the write begins, `synchronize` drops the result,
and a writer that is dropped waits for its write. A ring is an eventfd, which can be polled as the
package's can.

It cannot see what only the package and the kernel have: the form of a ring's fdinfo, memory that
direct I/O refuses, a kernel that cuts a long write, the interpreter lock that `synchronize` keeps,
and a system without io_uring. The tests of the package itself do, where it is installed.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock
from weakref import WeakValueDictionary

from nvme.engines import tensornvme


class Disk:
    """Disk whose writes end at once and well, or, if `at_once` is False, when a test says."""

    def __init__(self) -> None:
        self.at_once = True
        self.by_ring: WeakValueDictionary[int, AsyncWriter] = WeakValueDictionary()
        self.stuck: list[str] = []  # waits that would have kept the interpreter lock, or for good

    def writer(self, fd: int, n_entries: int, backend: str = "aio") -> AsyncWriter:
        assert (n_entries, backend) == (1, "uring")
        made = AsyncWriter(self, fd)
        self.by_ring[made.ring] = made
        return made

    @property
    def under_way(self) -> dict[int, AsyncWriter]:
        """Writers with a write that has not ended, by its offset."""
        writers = [writer for writer in self.by_ring.values() if writer.is_under_way]
        return {writer.offset: writer for writer in sorted(writers, key=lambda w: w.offset)}

    def result_of(self, ring: int) -> int:
        result = self.by_ring[ring].result
        assert result is not None
        return result


class AsyncWriter:
    """Writer of a `Disk`."""

    def __init__(self, disk: Disk, fd: int) -> None:
        self._disk, self._fd = disk, fd
        self.ring = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.address = self.nbytes = self.offset = 0
        self._file = -1
        self.result: int | None = None
        self.is_under_way = False

    def write(self, buffer: int, n_bytes: int, offset: int) -> None:
        assert not self.is_under_way and self.result is None
        self.address, self.nbytes, self.offset = buffer, n_bytes, offset
        self._file = os.dup(self._fd)  # the kernel holds the file, whatever becomes of the number
        self.is_under_way = True
        if self._disk.at_once:
            self.end(n_bytes)

    def end(self, result: int) -> None:
        """End the write after so many bytes, or with an errno below zero."""
        if result > 0:
            memory = (ctypes.c_char * result).from_address(self.address)  # aligned, as it came
            os.pwrite(self._file, memory, self.offset)
        os.close(self._file)
        self.result, self.is_under_way = result, False
        os.eventfd_write(self.ring, 1)

    def synchronize(self) -> None:
        if self.is_under_way:
            self._disk.stuck.append(f"write at {self.offset}")
        if self.result is not None:
            os.eventfd_read(self.ring)
        self.result = None

    def __del__(self) -> None:
        self.synchronize()
        os.close(self.ring)


@contextmanager
def doubled() -> Iterator[Disk]:
    """Disk whose `writer` an engine takes for tensornvme's."""
    disk = Disk()
    with (
        mock.patch.object(tensornvme, "rings", lambda: set(disk.by_ring)),
        mock.patch.object(tensornvme, "uncollected_result", disk.result_of),
        mock.patch.object(tensornvme, "check_rings", lambda: None),
    ):
        yield disk
