"""I/O engines: the protocol that every one speaks, and the transfers they are given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from gemini.nvme.files.file import OpenFile
from gemini.tickets import Ticket


@dataclass(frozen=True, slots=True)
class Transfer:
    """One contiguous read into, or write from, page-aligned memory.

    `buffer` is written by a read. Offset and length are multiples of PAGE_BYTES.
    """

    file: OpenFile
    offset: int
    buffer: memoryview
    checksums: bool


class Engine(Protocol):
    """Engine that carries out transfers in any order. Callers wait before they reuse a buffer."""

    name: str

    def read(self, transfer: Transfer) -> Ticket[int]:
        """Fill the buffer. The ticket's result is the checksum of its pieces (0 when off)."""
        ...

    def write(self, transfer: Transfer) -> Ticket[int]:
        """Write the buffer. The ticket's result is the checksum of its pieces (0 when off)."""
        ...

    def close(self) -> None:
        """Wait for transfers under way and release threads and rings."""
        ...
