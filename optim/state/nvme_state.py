"""State blocks on disk: a flow of spans carried out on their store (`optim.state.flow`).

Updates see a block's planes; all others see it with whole masters (`optim.state.disk.records`).

[Note: undo] A step with state on disk can fail in its middle: a read comes up short, a checksum
does not match. State is safe, because every block keeps its last version. A 16-bit parameter is
restored from the weight or the master in that version, or from memory where that version was read
before the step began, since the file may have been lost meanwhile. Where there is no master, the
parameter is updated in place, and its value of before goes to disk with the new state: 4 bytes an
element that are written (8 in float64) and, but for a failure, never read.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator, Sequence, Set
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gemini.dtypes import DTYPES
from gemini.nvme import (
    Buffer,
    BufferPool,
    Index,
    NvmeError,
    Pin,
    RollbackError,
    WriteBehind,
    read_ahead,
)
from gemini.optim.rules.config import NvmeConfig
from gemini.optim.rules.state_layout import ALL_COLUMNS, Columns, StateLayout
from gemini.ranges import named
from gemini.units import BlockId, format_bytes

from .deferred_signals import DeferredSignals
from .disk.records import Before, Filed, Records, open_store
from .flow import Flow, Span, num_buffers
from .pieces import BlockViews, Planes
from .space import Block, StateSpace

if TYPE_CHECKING:
    from .disk.pinned_state import PinnedState
    from .disk.state_version import StateVersion


def _in_order(blocks: Collection[Block]) -> tuple[Block, ...]:
    return tuple(sorted(blocks, key=lambda block: block.id))


class NvmeState:
    """State of the blocks of a space that live on disk, all planes of each together.

    All blocks of the space have a place in the file, and may come and leave between steps.
    `undo`: parameters are updated in place, so their values of before go to disk too ([Note:
    undo]).
    `split`: blocks whose masters are remainders of their parameters, which are in memory. One
    thread at a time.
    """

    def __init__(
        self,
        space: StateSpace,
        blocks: Sequence[Block],
        layout: StateLayout,
        config: NvmeConfig,
        *,
        undo: bool = False,
        split: Set[BlockId] = frozenset(),
        label: str = "",
        pin: Pin | None = None,
        num_ahead: int = 0,
        num_waiting: int = 0,
        columns: Columns = ALL_COLUMNS,
    ) -> None:
        """blocks: those of the space that are on disk now. num_ahead: more buffers, for blocks
        that are updated after their step, or leave a device together. num_waiting: extra buffers
        for blocks whose update needs another block first. columns: which planes a block has."""
        self.blocks = _in_order(blocks)
        self._layout = layout
        self._records = Records(space.blocks, layout, split, undo=undo, columns=columns)
        digest, there = space.digest() + self._records.name, self._records.in_file(blocks)
        self.store = open_store(digest, self._records.nbytes, config, label, there)
        self._records.attach_store(self.store)
        self._step_bytes = self._bytes_of(self.blocks)
        try:
            self._check_budget(config.write_budget)
        except ValueError:
            self.store.close()
            raise
        self._more_buffers, self._num_waiting, self._pin = num_ahead, num_waiting, pin
        spans = [Span(record) for record in self._records.of(self.blocks)]
        self.flow = Flow(spans, config.depth, self._reserve(config.depth))
        self._undo: dict[BlockId, Tensor] = {}  # [n], what weights were; see [Note: undo]
        self._undo_slab = torch.empty(0)  # [depth, N] of the layout's dtype, pinned as buffers are
        self._in_order = True  # the next step begins with the first block
        self._views: BlockViews | None = None  # of the step
        self.stalled_seconds = 0.0  # waited for the disk so far

    def _set_blocks(self, blocks: Collection[Block]) -> None:
        """Set which blocks are on disk, and their buffers. Nothing is under way."""
        # two pools of staging would pass the host's budget
        self._pool.empty()
        self.blocks = _in_order(blocks)
        self._step_bytes = self._bytes_of(self.blocks)
        known = {span.id: span for span in self.flow.spans}
        spans = [known.get(record.id) or Span(record) for record in self._records.of(self.blocks)]
        self.flow.change(spans, self._reserve(self.flow.depth))

    def _reserve(self, depth: int) -> list[Buffer]:
        """Reserve buffers for the blocks that are there: as many and as large as they need."""
        num_blocks = len(self.blocks)
        count = num_buffers(depth, num_blocks, self._more_buffers) + self.num_waiting
        self._pool = BufferPool(count, self._records.buffer_nbytes(self.blocks), self._pin)
        self._records.forget_views()
        return [self._pool.take() for _ in range(count)]

    def _bytes_of(self, blocks: Sequence[Block]) -> int:
        """Bytes that a step writes of these blocks."""
        return sum(map(self.store.buffer_nbytes, self._records.in_file(blocks)))

    @property
    def num_waiting(self) -> int:
        """Most blocks that wait for others of the step at once."""
        return min(self._num_waiting, len(self.blocks))

    @property
    def num_in_use(self) -> int:
        """Number of buffers that hold a block."""
        return self._pool.count - len(self.flow.free)

    @property
    def staging_bytes(self) -> int:
        return self._pool.nbytes + self._undo_slab.nbytes

    @property
    def written_bytes(self) -> int:
        """Bytes written so far."""
        return self.store.traffic.written_bytes

    @property
    def pinned_seconds(self) -> float:
        """Seconds that steps waited for a save to read what they overwrite."""
        return self.store.pinned_seconds

    @property
    def written_bytes_per_step(self) -> int:
        return self._step_bytes

    def _check_budget(self, budget: int | None) -> None:
        if budget is not None and budget < self.written_bytes_per_step:
            raise ValueError(
                f"nvme_write_budget={format_bytes(budget)} is below the "
                f"{format_bytes(self.written_bytes_per_step)} that one step writes; raise it, or "
                "offload a smaller fraction"
            )

    def initialise(self, fill: Callable[[Block, Planes], None]) -> None:
        """Write every block's first version. `fill` gets zeroed planes."""
        self._write_all(self.blocks, fill, 0, "zero")

    def _write_all(
        self,
        blocks: Sequence[Block],
        fill: Callable[[Block, Planes], None],
        step: int,
        before: Before,
    ) -> None:
        """Write the next version of blocks, and commit it as that of `step`."""
        with self._all_buffers() as writes:
            try:
                for block in blocks:
                    with DeferredSignals():  # Ctrl-C comes between two blocks
                        self._rewrite(block, fill, writes, before)
                with DeferredSignals():
                    self._count(step, writes)
            except BaseException:
                with DeferredSignals():
                    self.store.rollback()
                raise

    # -- a step; see `optim.state.flow` --

    def next(self) -> Span[Filed] | None:
        """The next span of the step, whose buffer has the last version; None: there is none.

        Waits for it, and raises what went wrong, there or in a write before.
        """
        while (span := self.flow.waits_for()) is not None:
            self._end(span)
        return self.flow.take()

    def limit_leaving(self) -> None:
        """Wait until no more spans than the flow's window are on their way to their buffers."""
        flow = self.flow
        while len(flow.leaving) > flow.window:
            self._end(flow.leaves_last(flow.window))

    def drain(self) -> None:
        """Wait until all writes are on disk. Raises what went wrong."""
        flow = self.flow
        while flow.leaving or flow.writes:
            self._end(flow.leaves_last(len(flow.leaving)) if flow.leaving else flow.writes[0])
        started = time.perf_counter()
        with named("wait for", "writes"):
            self.store.flush()
        self.stalled_seconds += time.perf_counter() - started

    def _end(self, span: Span[Filed]) -> None:
        """Wait for a span's transfer."""
        started = time.perf_counter()
        try:
            with named("wait for", "block", span.id):
                self.flow.end(span)
        finally:
            self.stalled_seconds += time.perf_counter() - started

    def prefetch(self) -> None:
        """Begin to read the first blocks of the next step. Never waits."""
        with DeferredSignals():
            self._check_intact()
            self.flow.read_ahead()

    def _quiesce(self) -> None:
        """Quiesce the state: nothing is under way, and no buffer holds a block."""
        self.store.check_process()
        with DeferredSignals():
            self._check_intact()
            self.flow.quiesce()
            self._check_intact(in_use=True)

    def _check_intact(self, *, in_use: bool = False) -> None:
        """Raise RuntimeError where something has cut a step or a read off in its middle."""
        self._take_back()
        held = self.num_in_use if in_use else 0
        if held or self.flow.in_step:
            raise RuntimeError(
                "a step or a read of state on disk was cut off in its middle "
                f"({'in a step' if self.flow.in_step else 'between steps'}, {held} buffers in "
                "use), by an exception that another thread raised in this one, say; the disk has "
                "the last whole step: close the optimizer with keep_masters=False, make another "
                "and load a checkpoint"
            )

    def _take_back(self) -> None:
        """Take buffers back that a signal kept a read from giving back: it came on the way out."""
        while self._pool.num_free:
            self.flow.free.append(self._pool.take())

    def check_step(self) -> None:
        """Check the write budget. Raises WriteBudgetError where a step has no room."""
        with DeferredSignals():
            self._take_back()
        self.store.check_step(self.written_bytes_per_step)

    def begin(self, views: BlockViews) -> None:
        """Begin a step of all blocks, with the parameters and gradients of `views`."""
        self._views = views
        of_step = ((span.record.block, span.record.has_master) for span in self.flow.order)
        self.flow.begin(self._updated, *views.beside(of_step))

    def save(self, span: Span[Filed]) -> None:
        """Save parameters before their update: those that need to be restored when the step
        fails."""
        record, views = span.record, self._views
        assert views is not None
        if self._records.has_undo:
            views.save(record.block, lambda _=None: record.undo_plane(span.buffer))
            span.is_touched = True
        else:
            undo = partial(self._early_undo, record.block)
            span.is_touched = not span.was_read or views.save(record.block, undo)

    def _updated(self, span: Span[Filed]) -> None:
        """Take over a block whose new state is in its buffer, before it is written."""
        record, views = span.record, self._views
        assert views is not None
        if record.is_split:  # weights are written with the state
            views.show(record.block, record.undo_plane(span.buffer))
        views.updated(record.block)

    def commit(self, step: int, *, in_order: bool) -> None:
        """Make the step count: all blocks at once, and durably. Does not raise after a `flush`.

        in_order: the next step begins with the first block; else with the one that is in memory,
            which this one has updated last.
        """
        started = time.perf_counter()
        # It cannot fail: ranks have agreed, and one that failed here would be a step late
        # ([Note: commit cannot fail] in `nvme.store`).
        self.store.commit(step)
        self.stalled_seconds += time.perf_counter() - started
        self._undo.clear()
        self._views = None
        self._in_order = in_order
        self.flow.committed(in_order=in_order)

    def undo(self, restore: Callable[[Block, Planes], None]) -> None:
        """Restore parameters and state of the last step, however far this one came.

        `restore` gets the planes of a block as the last commit left them, or only `param_undo`.
        Raises RollbackError if the parameters of some block could not be read back.
        """
        self.store.check_process()
        lost: list[NvmeError] = []
        for span in self.flow.undo():
            try:
                self._restore(span, restore)
            except NvmeError as error:
                lost.append(error)
            self.flow.give(span)
        self.store.rollback()
        self._undo.clear()
        self._views = None
        self.flow.undone()
        if lost:
            raise RollbackError(
                f"the step failed, and so did reading back the weights of {len(lost)} of "
                f"{len(self.blocks)} blocks: they are those of the step that failed. Load a "
                f"checkpoint. First error: {lost[0]}"
            ) from lost[0]

    def _restore(self, span: Span[Filed], restore: Callable[[Block, Planes], None]) -> None:
        """Restore the weights of one block."""
        record = span.record
        # Memory before the disk: the failure that is undone may be the disk's.
        known = self._undo.get(span.id)
        if known is None and self._records.has_undo and span.buffer is not None:
            known = record.undo_plane(span.buffer)
        if known is not None:
            restore(record.block, {"param_undo": known})
            return
        if span.buffer is None:  # nothing is under way, so some buffer is free
            span.buffer = self.flow.free.pop()
        restore(record.block, record.read_undo(span.buffer))

    def _early_undo(self, block: Block, dtype: torch.dtype | None = None) -> Tensor:
        """Memory for the parameters of a block that was read before the step began."""
        if not self._undo_slab.numel():
            shape = self.flow.depth, max(block.numel for block in self.blocks)
            dtype_of_slab = DTYPES[self._layout.dtype]
            if self._pin is None:
                self._undo_slab = torch.empty(*shape, dtype=dtype_of_slab)
            else:
                from .pinning import pinned

                self._undo_slab = pinned(math.prod(shape), dtype_of_slab, self._pin).view(shape)
        row = self._undo_slab[len(self._undo)]
        self._undo[block.id] = row.view(dtype or row.dtype)[: block.numel]
        return self._undo[block.id]

    # -- between steps --

    @contextmanager
    def _all_buffers(self) -> Iterator[WriteBehind]:
        """Context: borrow every staging buffer for one sequential pass over blocks."""
        self._quiesce()
        pool, free = self._pool, self.flow.free
        writes = WriteBehind(pool)
        # The flow's buffers go to the pool and back whole: signals in between would lose one
        try:
            with DeferredSignals():
                while free:
                    pool.give(free.pop())
            yield writes
        finally:
            with DeferredSignals():
                writes.abandon()
                while pool.num_free:
                    free.append(pool.take())

    def load(
        self,
        blocks: Sequence[Block],
        visit: Callable[[Block, Planes], None],
        at: Index | None = None,
    ) -> None:
        """Read committed blocks one after the other; `visit` must copy what it keeps.

        at: as this commit has them.
        """
        with self._all_buffers():
            reads = read_ahead(
                self._pool, self._records.of(blocks), lambda record, b: record.read_all(b, at)
            )
            try:
                while True:
                    # Ctrl-C comes between two blocks, else a buffer is lost
                    with DeferredSignals():
                        read = next(reads, None)
                    if read is None:
                        return
                    record, buffer, _ = read
                    visit(record.block, record.logical_planes(buffer))
            finally:
                with DeferredSignals():
                    reads.close()

    # -- versions that are kept --

    @property
    def commits(self) -> Sequence[Index]:
        """Commits that `rewind` may go to, the oldest first, and the last one."""
        return (*self.store.versions.history, self.store.last)

    def check_commit(self, steps: int) -> None:
        """Read all that `rewind` would. Raises what the disk says of it."""
        self.load(self.blocks, lambda block, planes: None, self.commits[-1 - steps])
        self.load_weights(self.commits[-1 - steps :], lambda block, values: None)

    def load_weights(
        self, commits: Sequence[Index], visit: Callable[[Block, Tensor], None]
    ) -> None:
        """Show parameters without masters as they were at the first of these commits, where they
        have changed since."""
        with self._all_buffers():
            buffer = self._pool.take()
            try:
                for record in self._records.of(self.blocks) if self._records.has_undo else ():
                    if record.read_weights(buffer, commits):
                        visit(record.block, record.undo_plane(buffer))
            finally:
                self._pool.give(buffer)

    def version(self, index: Index) -> StateVersion:
        """Version of all blocks at this commit."""
        from .disk.state_version import StateVersion

        records = self._records.of(self.blocks)
        blocks = tuple((record.block.numel, record.is_split) for record in records)
        paths = tuple(str(path) for path in self.store.paths)
        columns = self._records.columns_of(self.blocks)
        return StateVersion(paths, index, self._layout, blocks, self._records.has_undo, columns)

    def rewind(self, steps: int) -> None:
        """Make the commit of `steps` steps before the last one again; no block is written."""
        self._quiesce()
        self.store.rewind(steps)

    def forget_kept(self) -> None:
        """Forget kept commits: what follows has nothing to do with them."""
        self.store.versions.clear()

    def replace(
        self,
        fill: Callable[[Block, Planes], None],
        step: int,
        blocks: Sequence[Block],
        *,
        whole: bool = False,
    ) -> None:
        """Overwrite blocks; `fill` gets the committed planes and changes them. whole: it sets every
        element, and gets any.

        On an error every block keeps what it had.
        """
        self.check_step()
        self._write_all(blocks, fill, step, "unset" if whole else "read")

    def _rewrite(
        self,
        block: Block,
        fill: Callable[[Block, Planes], None],
        writes: WriteBehind,
        before: Before,
    ) -> None:
        """Write the next version of a block. before: what `fill` gets."""
        buffer, record = writes.take(), self._records[block]
        try:
            if before == "read":
                record.read_all(buffer).wait()
            record.change(buffer, fill, before)
            ticket = record.put(buffer, record.committed)
        except BaseException:
            self._pool.give(buffer)
            raise
        writes.add(ticket, buffer)

    def _count(self, step: int, writes: WriteBehind) -> None:
        """Commit what was written. The next step begins with the first block."""
        writes.drain()
        self.drain()
        self.commit(step, in_order=True)

    def forget(self, blocks: Sequence[Block]) -> None:
        """Forget blocks that live elsewhere from now on: their space on disk is given back."""
        self._quiesce()
        self.store.forget(self._records.in_file(blocks))
        gone = {block.id for block in blocks}
        self._set_blocks([block for block in self.blocks if block.id not in gone])

    def take_in(self, blocks: Sequence[Block], fill: Callable[[Block, Planes], None]) -> None:
        """Take in blocks that lived elsewhere, and write only these; `fill` as in `initialise`.

        Between steps. On an error nothing has changed.
        """
        self._quiesce()
        self.store.check_step(self._bytes_of(blocks), "state that leaves memory")
        before = self.blocks
        self.store.remember(self._records.in_file(blocks))
        try:
            self._set_blocks([*before, *blocks])
            self._write_all(blocks, fill, self.store.committed_step, "zero")
        except BaseException:
            with DeferredSignals():
                self.forget(blocks)
            raise

    def has_place_for(self, blocks: Sequence[Block]) -> bool:
        """Whether blocks are of the space that this was made for."""
        return all(block in self._records for block in blocks)

    def pin(self) -> PinnedState:
        """Pin all blocks as they were committed last, until they have been shown."""
        from .disk.pinned_state import PinnedState

        self.store.check_process()
        # the step after the next writes over them, in this order
        order = self.flow.order if self._in_order else self.flow.order[::-1]
        records = [span.record for span in order]
        parts = [part.block for record in records for part in record.committed]
        return PinnedState(records, self.store.pin(parts))

    def empty_staging(self) -> None:
        """Forget what was read ahead and give the memory of the buffers back to the system."""
        self._quiesce()
        self._undo_slab = torch.empty(0)
        self._pool.empty()

    def close(self) -> None:
        """Wait for transfers and remove the files."""
        if self.store.is_ours:
            self.flow.settle()
        self.store.close()
