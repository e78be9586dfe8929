"""io_uring through the `liburing` package, where it is installed and the kernel allows it.

One ring; submissions under a lock; one thread that sleeps on an eventfd and ends transfers. (The
package's own waiting calls hold the interpreter lock.) Pieces as in the default engine.
"""

from __future__ import annotations

import errno
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from gemini.tickets import Ticket

from ..errors import NvmeError, transfer_error
from ..layout import PIECE_BYTES, crc32
from . import Transfer
from .threads import Checksum

RING_ENTRIES = 64


@dataclass(slots=True)
class _Submission:
    kind: str  # "read" or "write"
    transfer: Transfer
    start: int  # bytes into the transfer
    end: int
    done: int
    checksum: int
    future: Future[int]

    @property
    def left(self) -> int:
        """Bytes that have not been moved."""
        return self.end - self.start - self.done


class UringEngine:
    """Raises NvmeError where io_uring cannot be used, with the reason."""

    name = "uring"

    def __init__(self, entries: int = RING_ENTRIES) -> None:
        self._ring = _Ring(entries)
        # the ring's thread keeps the ring and not this: dropped without `close`, it ends too
        self._finalizer = weakref.finalize(self, self._ring.close)

    def read(self, transfer: Transfer) -> Ticket[int]:
        return self._ring.submit("read", transfer)

    def write(self, transfer: Transfer) -> Ticket[int]:
        return self._ring.submit("write", transfer)

    def close(self) -> None:
        self._finalizer()


class _Ring:
    """The ring, and the thread that reaps it."""

    def __init__(self, entries: int) -> None:
        try:
            import liburing
        except ImportError as error:
            raise NvmeError("liburing is not installed: pip install liburing==2024.5.3") from error
        if not hasattr(liburing, "io_uring"):
            raise NvmeError(
                f"liburing {getattr(liburing, '__version__', '?')} has another interface than the "
                "one this engine was written for; pip install liburing==2024.5.3"
            )
        self._lib: Any = liburing
        self._ring = liburing.io_uring()
        try:
            liburing.io_uring_queue_init(entries, self._ring, 0)
        except OSError as error:
            raise NvmeError(
                f"the kernel refuses io_uring ({error.strerror}): containers often forbid it; "
                "use the default engine"
            ) from error
        self._entries = entries
        self._lock = threading.Lock()
        self._event = os.eventfd(0)
        liburing.io_uring_register_eventfd(self._ring, self._event)
        self._under_way: dict[int, _Submission] = {}
        self._waiting: deque[_Submission] = deque()
        self._next_id = 1
        self._closed = False
        self._thread = threading.Thread(target=self._reap_forever, name="nvme-uring", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Once."""
        with self._lock:
            self._closed = True
        os.eventfd_write(self._event, 1)
        self._thread.join()
        self._lib.io_uring_queue_exit(self._ring)
        os.close(self._event)

    def submit(self, kind: str, transfer: Transfer) -> Ticket[int]:
        length = transfer.buffer.nbytes
        pieces = []
        for start in range(0, length, PIECE_BYTES):
            end = min(start + PIECE_BYTES, length)
            checksum = 0
            if kind == "write" and transfer.checksums:
                checksum = crc32(transfer.buffer[start:end])
            pieces.append(_Submission(kind, transfer, start, end, 0, checksum, Future()))
        with self._lock:
            self._waiting.extend(pieces)
            self._fill_ring()
        return Checksum([piece.future for piece in pieces])

    def _fill_ring(self) -> None:
        """Hand waiting pieces to the kernel while the ring has room. The lock is held."""
        lib, added = self._lib, False
        while self._waiting and len(self._under_way) < self._entries:
            piece = self._waiting.popleft()
            entry = lib.io_uring_get_sqe(self._ring)
            view = piece.transfer.buffer[piece.start + piece.done : piece.end]
            offset = piece.transfer.offset + piece.start + piece.done
            prepare: Callable[..., None] = (
                lib.io_uring_prep_read if piece.kind == "read" else lib.io_uring_prep_write
            )
            prepare(entry, piece.transfer.file.fd, view, view.nbytes, offset)
            lib.io_uring_sqe_set_data64(entry, self._next_id)
            self._under_way[self._next_id] = piece
            self._next_id += 1
            added = True
        if added:
            lib.io_uring_submit(self._ring)

    def _reap_forever(self) -> None:
        lib = self._lib
        entry = lib.io_uring_cqe()
        while True:
            os.eventfd_read(self._event)
            ended: list[tuple[_Submission, int]] = []
            with self._lock:
                for _ in range(lib.io_uring_cq_ready(self._ring)):
                    lib.io_uring_peek_cqe(self._ring, entry)
                    piece, moved = self._under_way.pop(entry.user_data), entry.res
                    lib.io_uring_cqe_seen(self._ring, entry)
                    piece.done += max(moved, 0)
                    if moved == -errno.EINTR or (moved > 0 and piece.left):
                        self._waiting.append(piece)  # interrupted or short: the rest goes again
                    else:
                        ended.append((piece, moved))
                self._fill_ring()
                stop = self._closed and not self._under_way
            for piece, moved in ended:
                self._end(piece, moved)
            if stop:
                return

    def _end(self, piece: _Submission, moved: int) -> None:
        """Checksum and answer, outside the lock. `moved`: bytes of the last part, or -errno."""
        transfer = piece.transfer
        if piece.left:
            piece.future.set_exception(
                transfer_error(
                    piece.kind,
                    str(transfer.file.path),
                    transfer.offset + piece.start,
                    piece.end - piece.start,
                    max(-moved, 0),
                    piece.done,
                )
            )
            return
        if piece.kind == "read" and transfer.checksums:
            piece.checksum = crc32(transfer.buffer[piece.start : piece.end])
        piece.future.set_result(piece.checksum)
