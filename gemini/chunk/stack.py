"""Chunk of a stack of experts [E, n, m] that is frozen, whose rows are read as they are used.

A gather of such a chunk from a file reads nothing. A call that says which rows it uses waits for
those; whoever else waits for the gather waits for all. A row is in place, or is missing: only who
waited for it may use it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from typing import Any

from gemini.optim.state.deferred_signals import DeferredSignals
from gemini.tickets import Ticket
from gemini.units import FROZEN_BLOCK_BYTES, PAGE_BYTES, ChunkId

from .layout import ITEMSIZE, ChunkLayout, ChunkSpec
from .storage import Chunk

_MOST_BLOCKS = 4  # of a row, as a multiple of the fewest


@dataclass(frozen=True, slots=True)
class RowCut:
    """Cut of a stack's file: rows, each of as many whole blocks. Both in elements."""

    row_numel: int
    block_numel: int

    def num_rows(self, numel: int) -> int:
        """Rows of a shard; its padding is one more."""
        return -(-numel // self.row_numel)

    def fill(self, numel: int, read: Callable[[Sequence[int]], Ticket[None]]) -> RowFill:
        """Fill of a shard, whose blocks `read` begins to read."""
        return RowFill(lambda rows: read(self.blocks_of(rows, numel)), self.num_rows(numel))

    def blocks_of(self, rows: Iterable[int], numel: int) -> list[int]:
        """Numbers of the blocks of these rows, in a shard of `numel` elements."""
        in_row, num_blocks = self.row_numel // self.block_numel, -(-numel // self.block_numel)
        return [
            block
            for row in rows
            for block in range(row * in_row, min((row + 1) * in_row, num_blocks))
        ]


def row_cuts(layout: ChunkLayout) -> dict[ChunkId, RowCut]:
    """Cuts of the frozen chunks whose rows may be read alone: one stack each, whole on this rank.

    Rows are whole pages, so the file has no byte more than one that is not cut.
    """
    found = {}
    for chunk in layout.chunks:
        cut = _cut_of(layout, chunk)
        if cut is not None:
            found[chunk.id] = cut
    return found


def _cut_of(layout: ChunkLayout, chunk: ChunkSpec) -> RowCut | None:
    spec = layout.params[chunk.slots[0].param]
    is_stack = len(spec.shape) == 3 and spec.shape[0] > 1 and spec.form is None
    if chunk.trainable or chunk.num_shards > 1 or len(chunk.slots) > 1 or not is_stack:
        return None
    row_numel = prod(spec.shape[1:])
    pages, rest = divmod(row_numel * ITEMSIZE[chunk.dtype], PAGE_BYTES)
    fewest = -(-pages * PAGE_BYTES // FROZEN_BLOCK_BYTES)
    if rest or not fewest:
        return None
    # blocks of one size: a row has as many as leave whole pages in each
    counts = range(fewest, _MOST_BLOCKS * fewest + 1)
    count = next((count for count in counts if pages % count == 0), None)
    return None if count is None else RowCut(row_numel, row_numel // count)


class RowFill:
    """A ticket: a payload whose rows are read as they are asked for; `wait` reads the rest.

    read: begins to read rows.
    """

    def __init__(self, read: Callable[[Sequence[int]], Ticket[None]], num_rows: int) -> None:
        self._read = read
        self._missing = dict.fromkeys(range(num_rows))

    def ready(self) -> bool:
        return not self._missing

    def wait(self) -> None:
        self.fill(tuple(self._missing))

    def fill(self, rows: Iterable[int]) -> None:
        """Read those of these rows that are missing. Raises NvmeError; then they still are, and
        nothing is under way."""
        wanted = [row for row in rows if row in self._missing]
        if not wanted:
            return
        ticket: Ticket[None] | None = None
        try:
            with DeferredSignals():  # Ctrl-C finds a ticket wherever a read has begun
                ticket = self._read(wanted)
            ticket.wait()
        except BaseException:
            if ticket is not None:
                with suppress(Exception):
                    ticket.wait()
            raise
        for row in wanted:
            del self._missing[row]


class StackChunk(Chunk):
    """Chunk of one stack. While `pending` is a `RowFill`, rows of the payload are missing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._used: Sequence[int] | None = None  # by the call that begins

    def use(self, rows: Sequence[int] | None) -> None:
        """Who waits from now on waits for these rows alone; None: for all."""
        self._used = rows

    def wait_gathered(self) -> None:
        """Wait for all rows, or for those in use. Raises NvmeError: then rows that are in place
        stay, as a call may be using them, and the next wait reads the others."""
        fill = self.pending
        if not isinstance(fill, RowFill):
            super().wait_gathered()
            return
        if self._used is None:
            fill.wait()
        else:
            fill.fill(self._used)
        if fill.ready():
            self.pending = None

    def release(self) -> None:
        if isinstance(self.pending, RowFill):
            self.pending = None  # nothing is under way
        super().release()
