"""Blocks in staging buffers: read from their file, held for an update, written to it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from torch import Tensor

from gemini.tickets import Ticket, TicketGroup
from gemini.units import BlockId
from nvme import BlockStore, Buffer, BufferPool, Pin
from optim.state.pieces import Planes
from optim.state.space import Block

from .forms import BlockForms


@dataclass(slots=True)
class Staged:
    """A block in a staging buffer."""

    block: Block
    buffer: Buffer
    ticket: Ticket[object] | None = None  # None: the buffer holds the committed content


class BlockStaging:
    """The buffers of one file's blocks. One thread at a time.

    writes: blocks on their way to disk, in order. stalled_seconds: waited for the disk so far.
    """

    def __init__(self, store: BlockStore, forms: BlockForms, count: int, pin: Pin | None) -> None:
        self.writes: deque[Staged] = deque()
        self.stalled_seconds = 0.0
        self._store = store
        self._forms = forms
        self._pool = BufferPool(count, forms.buffer_nbytes, pin)
        # of a buffer, by its index, elements, and whether masters are split
        self._views: dict[tuple[int, int, bool], Planes] = {}

    @property
    def nbytes(self) -> int:
        return self._pool.nbytes

    def stage(self, block: Block) -> Staged:
        """A buffer for it. Waits for writes where none is free."""
        return Staged(block, self.take())

    def try_stage(self, block: Block) -> Staged | None:
        """None where that would wait."""
        if not self._pool.num_free and not self._reclaim():
            return None
        return Staged(block, self._pool.take())

    def take(self) -> Buffer:
        """Waits for writes where none is free."""
        while self._pool.num_free == 0:
            self.wait_for_a_write()
        return self._pool.take()

    def give(self, buffer: Buffer) -> None:
        """Back."""
        self._pool.give(buffer)

    def give_all(self, staged: Iterable[Staged]) -> None:
        """Back."""
        for one in staged:
            self._pool.give(one.buffer)

    def empty(self) -> None:
        """Give the memory of the buffers back to the system."""
        self._pool.empty()

    # -- transfers --

    def read(self, staged: Staged) -> Ticket[None]:
        """Begin to read its planes, as they were committed."""
        parts = self._forms.parts[staged.block.id]
        return self._store.read(parts.state, staged.buffer.view[: parts.state_nbytes])

    def read_all(self, staged: Staged) -> Ticket[object]:
        """Begin to read all that a committed version of it consists of."""
        forms, block = self._forms, staged.block
        parts = [self.read(staged)]
        if forms.is_split(block):
            view = forms.beside_view(staged.buffer, block)
            parts.append(self._store.read(forms.beside_id(block), view))
        return TicketGroup(parts)

    def write(self, staged: Staged, *, with_undo: bool = False) -> None:
        """Begin to write it beside its last version. with_undo: with what is beside its planes,
        also where that only undoes this step."""
        parts, view = self._forms.parts[staged.block.id], staged.buffer.view
        state = self._store.write(parts.state, view[: parts.state_nbytes])
        staged.ticket = state
        if parts.beside is not None and (parts.is_split or with_undo):
            beside = self._store.write(parts.beside, view[parts.state_nbytes : parts.nbytes])
            staged.ticket = TicketGroup((state, beside))
        self.writes.append(staged)

    def _reclaim(self) -> bool:
        """Take the buffer of the oldest write back, if that has ended."""
        if not self.writes:
            return False
        ticket = self.writes[0].ticket
        if ticket is not None:
            if not ticket.ready():
                return False
            ticket.wait()
        self._pool.give(self.writes.popleft().buffer)
        return True

    def wait_for_a_write(self) -> None:
        """The oldest, and take its buffer back."""
        self.wait_for(self.writes[0])
        self._pool.give(self.writes.popleft().buffer)

    def forget_writes(self, blocks: Collection[BlockId]) -> None:
        """Of these, whose transfers have ended."""
        self.give_all(staged for staged in self.writes if staged.block.id in blocks)
        self.writes = deque(s for s in self.writes if s.block.id not in blocks)

    def wait_for(self, staged: Staged) -> None:
        """Its transfer."""
        if staged.ticket is not None:
            self.stall(staged.ticket.wait)

    def stall(self, wait: Callable[[], object]) -> None:
        """Wait for the disk, on the clock."""
        started = time.perf_counter()
        try:
            wait()
        finally:
            self.stalled_seconds += time.perf_counter() - started

    # -- what a buffer holds --

    def planes(self, staged: Staged) -> Planes:
        """Views, as an update takes them."""
        block = staged.block
        key = staged.buffer.index, block.numel, self._forms.parts[block.id].is_split
        if key not in self._views:
            self._views[key] = self._forms.planes(staged.buffer, block)
        return dict(self._views[key])

    def beside(self, staged: Staged) -> Tensor:
        """[n], a view: see `BlockForms.beside`."""
        return self._forms.beside(staged.buffer, staged.block)
