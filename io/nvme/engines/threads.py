"""Default engine: `preadv` and `pwritev` from a few threads, 4 MiB at a time.

Python threads suffice because the calls and `crc32` release the interpreter lock; the rest of a
piece is some 20 us of Python for about a millisecond of disk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from gemini.tickets import Ticket

from ..layout import PIECE_BYTES, combine, crc32
from . import Transfer


@dataclass(slots=True)
class Checksum:
    """Ticket of a transfer, whose result is one checksum of its pieces, however threads share them.

    `wait` waits for all pieces, then raises the first error: then the buffer may be reused. A store
    keeps tickets of what was written until the next commit, one a block, so one that has its result
    lets go of the futures, which take 1 KiB each.
    """

    pieces: Sequence[Future[int]]
    _found: int | None = None

    def ready(self) -> bool:
        return all(map(Future.done, self.pieces))

    def wait(self) -> int:
        pieces = self.pieces  # before the look: another thread that waits may let go of them
        if self._found is not None:
            return self._found
        checksums: list[int] = []
        first_error: Exception | None = None
        for piece in pieces:
            try:
                checksums.append(piece.result())
            except Exception as error:
                first_error = first_error or error
        if first_error is not None:
            raise first_error
        self._found, self.pieces = combine(checksums), ()
        return self._found


class ThreadEngine:
    """Engine of `num_threads` transfers at a time over all files; ValueError for less than one."""

    name = "threads"

    def __init__(self, num_threads: int = 4) -> None:
        if num_threads < 1:
            raise ValueError(f"num_threads={num_threads}; expected at least 1")
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="nvme")

    def read(self, transfer: Transfer) -> Ticket[int]:
        return self.submit(_read_piece, transfer)

    def write(self, transfer: Transfer) -> Ticket[int]:
        return self.submit(_write_piece, transfer)

    def close(self) -> None:
        self._pool.shutdown(wait=True)

    def submit(self, work: Callable[[Transfer, int, int], int], transfer: Transfer) -> Ticket[int]:
        """Begin `work(transfer, start, end)`, which returns a checksum, for each piece."""
        length, pieces = transfer.buffer.nbytes, []
        for start in range(0, length, PIECE_BYTES):
            end = min(start + PIECE_BYTES, length)
            pieces.append(self._pool.submit(work, transfer, start, end))
        return Checksum(pieces)


def _read_piece(transfer: Transfer, start: int, end: int) -> int:
    piece = transfer.buffer[start:end]
    transfer.file.move("read", piece, transfer.offset + start)
    return crc32(piece) if transfer.checksums else 0


def _write_piece(transfer: Transfer, start: int, end: int) -> int:
    piece = transfer.buffer[start:end]
    checksum = crc32(piece) if transfer.checksums else 0
    transfer.file.move("write", piece, transfer.offset + start)
    return checksum
