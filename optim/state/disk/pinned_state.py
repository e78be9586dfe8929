"""Pinned state: blocks on disk that a save reads while steps go on."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gemini.nvme import Buffer, BufferPool, PinnedVersions, read_ahead
from gemini.optim.state.pieces import Planes
from gemini.optim.state.space import Block
from gemini.tickets import Ticket, TicketGroup

from .records import Filed


class PinnedState:
    """Blocks on disk as one commit left them, to be shown once while steps go on."""

    def __init__(self, records: Sequence[Filed], pinned: PinnedVersions) -> None:
        self._records = records
        self._pinned = pinned

    def visit(self, look: Callable[[Block, Planes], None]) -> None:
        """Show every block, reading one ahead; in any thread. The visitor copies what it keeps."""

        def read(record: Filed, buffer: Buffer) -> Ticket[tuple[int, ...]]:
            views = [(part.block, buffer.view[part.start : part.stop]) for part in record.committed]
            return TicketGroup([self._pinned.read(block, view) for block, view in views])

        pool = BufferPool(2, max((record.nbytes for record in self._records), default=0))
        for record, buffer, checksums in read_ahead(pool, self._records, read):
            for part, checksum in zip(record.committed, checksums, strict=True):
                self._pinned.check(part.block, checksum)
            look(record.block, record.logical_planes(buffer))
            for part in record.committed:
                self._pinned.let_go(part.block)

    def close(self) -> None:
        """Let go of all blocks."""
        self._pinned.close()
