"""Pinned state: blocks on disk that a save reads while steps go on."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gemini.nvme import Buffer, BufferPool, PinnedVersions, read_ahead
from gemini.optim.state.pieces import Planes
from gemini.optim.state.space import Block
from gemini.tickets import Ticket, TicketGroup

from .forms import BlockForms


class PinnedState:
    """Blocks on disk as one commit left them, to be shown once while steps go on."""

    def __init__(self, blocks: Sequence[Block], forms: BlockForms, pinned: PinnedVersions) -> None:
        self._blocks = blocks
        self._forms = forms
        self._pinned = pinned

    def visit(self, look: Callable[[Block, Planes], None]) -> None:
        """Show every block, reading one ahead; in any thread. The visitor copies what it keeps."""
        forms = self._forms

        def read(block: Block, buffer: Buffer) -> Ticket[tuple[int, ...]]:
            parts = [self._pinned.read(forms.state_id(block), forms.state_view(buffer, block))]
            if forms.is_split(block):
                weight = forms.undo_view(buffer, block)
                parts.append(self._pinned.read(forms.undo_id(block), weight))
            return TicketGroup(parts)

        pool = BufferPool(2, forms.buffer_nbytes(self._blocks))
        for block, buffer, checksums in read_ahead(pool, self._blocks, read):
            ids = forms.committed_ids(block)
            for part, checksum in zip(ids, checksums, strict=True):
                self._pinned.check(part, checksum)
            look(block, forms.shown(buffer, block))
            for part in ids:
                self._pinned.let_go(part)

    def close(self) -> None:
        """Let go of all blocks."""
        self._pinned.close()
