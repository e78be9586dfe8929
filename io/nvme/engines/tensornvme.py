"""tensornvme's writes as an engine, where it is installed.

Writes are those of its `AsyncFileWriter`: into our files at our offsets, each a whole buffer,
submitted to an io_uring. A ticket is done when the ring says so, and fails as the kernel said.

Reads are `ThreadEngine`'s. The package reads through its `Offloader` alone, and no ticket can be
made of that without a write: a read takes the key and its space away when it begins, so a block
that is needed again (a step that is undone, a save) could not be read, and the next write would go
over the committed version; only another write brings both back. A key that is written again
without a read between loses its space. Nor has its file our offsets.

[Note: what a writer does not say] Three things are missing in `AsyncFileWriter`, and the kernel's
view of its ring has them:

* How a write ended. It drops the result, so a full disk, a failing one and half a write look like
  success. `/proc/self/fdinfo` of a ring lists results that were not collected yet: bytes or an
  errno. A construction tries that once.
* Whether a write has ended. Only `synchronize` tells, which waits for all writes and holds the
  interpreter lock meanwhile. A ring can be polled, which lets go of the lock; after that
  `synchronize` returns at once.
* Which file. It is made for a descriptor, so that descriptor is a duplicate of its own, which is
  aimed (`dup2`) at the file of each write, and at /dev/null between writes: then no file stays
  open, or locked, for it.

So a lane, a writer whose ring has one entry, does one write at a time. One thing stays unseen: a
submission that the kernel refuses, for want of memory for it, is dropped without a result, and its
ticket does not end.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import select
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from gemini.tickets import Done, Ticket

from ..errors import NvmeError, cause_of, check_process, transfer_error
from ..layout import crc32
from . import Transfer
from .threads import ThreadEngine

MOST_LANES = 64  # writes at a time; each has three descriptors
MOST_BYTES = 1 << 30  # of one submission; the kernel cuts at 2 GiB less a page
# The kernel drops work that a thread queued and did not live to see.
AGAIN = frozenset({-errno.ECANCELED, -errno.EINTR})

_RESULT = re.compile(r"^\s*\d+: user_data:\d+, res:(-?\d+)", re.MULTILINE)
_libc = ctypes.CDLL(None, use_errno=True)
_IO_URING_SETUP = 425  # on every architecture but alpha
_making = threading.Lock()  # of writers: each is told from the others by the ring that came


def rings() -> set[int]:
    """Descriptors of this process's rings of io_uring."""
    found = set()
    for name in sorted(os.listdir("/proc/self/fd")):
        with suppress(OSError):  # the folder's own is closed by now
            if os.readlink(f"/proc/self/fd/{name}") == "anon_inode:[io_uring]":
                found.add(int(name))
    return found


def set_up_ring() -> int:
    """Descriptor of a ring of one entry, or an errno below zero."""
    parameters = ctypes.create_string_buffer(120)  # struct io_uring_params
    ring = int(_libc.syscall(_IO_URING_SETUP, 1, parameters))
    return -ctypes.get_errno() if ring < 0 else ring


def check_rings() -> None:
    """Raise NvmeError if this process may have no ring: tensornvme would use one all the same, and
    end the process."""
    ring = set_up_ring()
    if ring < 0:
        raise NvmeError(
            f"tensornvme needs io_uring, which this system refuses ({cause_of(-ring)}): "
            'use NvmeConfig(engine="threads")'
        )
    os.close(ring)


def result_in(said: str) -> int | None:
    """Result of the only write that a ring's fdinfo lists: bytes, or an errno below zero. None if
    it lists none, which is also what it does while the kernel has the ring locked."""
    found = _RESULT.search(said)
    return int(found[1]) if found else None


def uncollected_result(ring: int) -> int:
    """Result of a ring whose only write has ended. Raises NvmeError if the kernel does not say."""
    for _ in range(100):
        result = result_in(Path(f"/proc/self/fdinfo/{ring}").read_text(encoding="ascii"))
        if result is not None:
            return result
        time.sleep(0.001)
    raise NvmeError(
        "this kernel does not list an io_uring's results in /proc/self/fdinfo, and tensornvme does "
        'not say whether a write failed: use NvmeConfig(engine="threads")'
    )


Memory = ctypes.Array[ctypes.c_char]


def memory_of(buffer: memoryview) -> Memory:
    """Memory of a writable buffer, which stays while this does. Raises TypeError for others."""
    return (ctypes.c_char * buffer.nbytes).from_buffer(buffer)


class Lane:
    """Writer of one write at a time, which its owner's lock guards.

    Raises NvmeError if the writer has no ring (its backend is not io_uring).
    """

    _fd = -1
    _writer: Any = None

    def __init__(self, writer_class: Any) -> None:
        self._idle = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        self._fd = os.dup(self._idle)
        self._pid = os.getpid()
        self._held: Memory | None = None  # what is being written
        with _making:
            before = rings()
            self._writer = writer_class(self._fd, 1, "uring")
            made = rings() - before
        if len(made) != 1:
            raise NvmeError(
                "tensornvme made no io_uring of its own: unset TENSORNVME_BACKEND, or build it "
                "with liburing"
            )
        (self._ring,) = made
        self._poll = select.poll()
        self._poll.register(self._ring, select.POLLIN)

    def begin(self, fd: int, memory: Memory, start: int, offset: int) -> None:
        """Begin to write memory from `start` on, `MOST_BYTES` at most, at `offset` of a file.
        Raises OSError if its descriptor is closed."""
        os.dup2(fd, self._fd, inheritable=False)
        self._held = memory
        nbytes = min(len(memory) - start, MOST_BYTES)
        self._writer.write(ctypes.addressof(memory) + start, nbytes, offset)

    def result(self, milliseconds: int | None) -> int | None:
        """Wait so long (None: until it ends) for the write: bytes, an errno below zero, or None if
        it is under way. Raises NvmeError in a forked child, which would take its parent's."""
        check_process(self._pid)
        if not self._poll.poll(milliseconds):
            return None
        found = uncollected_result(self._ring)
        self._writer.synchronize()  # collects the result; there is nothing to wait for
        self._held = None
        os.dup2(self._idle, self._fd, inheritable=False)
        return found

    def close(self) -> None:
        """Wait for a write under way and let go of the ring."""
        writer, self._writer = self._writer, None
        if self._fd < 0:
            return
        if writer is not None and os.getpid() != self._pid:
            # A forked child shares the ring's memory: a writer that ends there with a write under
            # way would wait for the parent's result, and take it. So it never ends.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(writer))
        del writer
        for fd in (self._fd, self._idle):
            os.close(fd)
        self._fd, self._held = -1, None

    __del__ = close


class Write:
    """Ticket of a write; its result is the checksum of its pieces (0 when off)."""

    def __init__(self, engine: TensorNvmeEngine, transfer: Transfer, checksum: Ticket[int]) -> None:
        self._engine, self._transfer, self._checksum = engine, transfer, checksum
        self._memory = memory_of(transfer.buffer)
        self._lane: Lane | None = None  # while under way
        self._done = 0  # bytes
        self._error: NvmeError | None = None
        self._lock = threading.Lock()

    def begin(self, lane: Lane) -> None:
        with self._lock:
            self._lane = lane
            self._submit()

    def ready(self) -> bool:
        if not self._lock.acquire(blocking=False):
            return False  # another thread waits for it
        try:
            return self._has_ended(0) and self._checksum.ready()
        finally:
            self._lock.release()

    def wait(self) -> int:
        with self._lock:
            while not self._has_ended(None):
                pass
        # the buffer may be reused after this: nobody reads it any more
        checksum = self._checksum.wait()
        if self._error is not None:
            raise self._error
        return checksum

    def _submit(self) -> None:
        """Write what is left, or end with an error."""
        assert self._lane is not None
        transfer, done = self._transfer, self._done
        try:
            self._lane.begin(transfer.file.fd, self._memory, done, transfer.offset + done)
        except OSError as error:
            self._end(error.errno or 0)

    def _has_ended(self, milliseconds: int | None) -> bool:
        """Look, or wait, for a result and go on where the kernel stopped."""
        if self._lane is None:
            return True
        result = self._lane.result(milliseconds)
        if result is None:
            return False
        self._done += max(result, 0)
        if self._done == len(self._memory):
            self._end()
        elif result > 0 or result in AGAIN:
            self._submit()
        else:
            self._end(-result)
        return self._lane is None

    def _end(self, code: int | None = None) -> None:
        """Give the lane back. `code`: of an error; 0 if the write came up short."""
        assert self._lane is not None
        transfer, lane, self._lane = self._transfer, self._lane, None
        if code is not None:
            path, nbytes = str(transfer.file.path), transfer.buffer.nbytes
            self._error = transfer_error("write", path, transfer.offset, nbytes, code, self._done)
        self._engine.take_back(lane, self)
        # a store keeps tickets until the next commit: they let go of memory, file and engine
        del self._engine, self._transfer, self._memory


class TensorNvmeEngine:
    """Engine of tensornvme's writes and our threads' reads; at most `MOST_LANES` writes at a time:
    one more waits for the oldest.

    writer_class: `AsyncFileWriter`, or what does as it does. Raises NvmeError without it, or if
    the kernel does not say how a write ended.
    """

    name = "tensornvme"

    def __init__(self, writer_class: Any = None) -> None:
        if writer_class is None:
            try:
                from tensornvme._C import AsyncFileWriter
            except ImportError as error:
                raise NvmeError(
                    "tensornvme with an AsyncFileWriter is not installed; the release 0.1.0 has "
                    "none, its repository does"
                ) from error
            writer_class = AsyncFileWriter
        check_rings()
        self._pid = os.getpid()
        self._writer_class = writer_class
        self._lock = threading.Lock()
        self._free = [Lane(writer_class)]
        self._under_way: dict[Write, None] = {}  # in the order they began
        self._try(self._free[0])
        self._threads = ThreadEngine()

    def read(self, transfer: Transfer) -> Ticket[int]:
        return self._threads.read(transfer)

    def write(self, transfer: Transfer) -> Ticket[int]:
        check_process(self._pid)
        checksum: Ticket[int] = Done(0)
        if transfer.checksums:
            checksum = self._threads.submit(piece_checksum, transfer)
        write = Write(self, transfer, checksum)
        write.begin(self._lane_for(write))
        return write

    def close(self) -> None:
        """Wait for transfers under way; in a forked child, which has none, for nothing."""
        if os.getpid() != self._pid:
            return
        for write in list(self._under_way):
            with suppress(NvmeError):
                write.wait()
        self._threads.close()
        with self._lock:
            free, self._free = self._free, []
        for lane in free:
            lane.close()

    def take_back(self, lane: Lane, write: Write) -> None:
        """End of a write."""
        with self._lock:
            self._under_way.pop(write)
            self._free.append(lane)

    def _lane_for(self, write: Write) -> Lane:
        while True:
            with self._lock:
                if self._free or len(self._under_way) < MOST_LANES:
                    lane = self._free.pop() if self._free else Lane(self._writer_class)
                    self._under_way[write] = None
                    return lane
                oldest = next(iter(self._under_way))
            with suppress(NvmeError):  # its owner is told
                oldest.wait()

    @staticmethod
    def _try(lane: Lane) -> None:
        """One byte into /dev/null. Raises NvmeError if the kernel does not list its end."""
        with Path(os.devnull).open("wb") as null:
            lane.begin(null.fileno(), memory_of(memoryview(bytearray(1))), 0, 0)
            lane.result(None)


def piece_checksum(transfer: Transfer, start: int, end: int) -> int:
    """Checksum of a part of what is written."""
    return crc32(transfer.buffer[start:end])
