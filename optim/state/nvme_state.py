"""State blocks on disk, and the executor of their moves: `optim.state.machine` chooses these.

Updates see a block's planes; all others see it with whole masters (`optim.state.disk.forms`).

[Note: undo] A step with state on disk can fail in its middle: a read comes up short, a checksum
does not match. State is safe, because every block keeps its last version. A 16-bit parameter is
restored from the weight or the master in that version, or from memory where that version was read
before the step began, since the file may have been lost meanwhile. Where there is no master, the
parameter is updated in place, and its value of before goes to disk with the new state: 4 bytes an
element that are written (8 in float64) and, but for a failure, never read.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence, Set
from contextlib import contextmanager
from functools import partial

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
    settle,
)
from gemini.optim.rules.config import NvmeConfig
from gemini.optim.rules.state_layout import ALL_COLUMNS, MASTER, Columns, StateLayout
from gemini.ranges import named
from gemini.units import BlockId, format_bytes

from .deferred_signals import DeferredSignals
from .disk.forms import BlockForms
from .disk.pinned_state import PinnedState
from .disk.state_version import StateVersion
from .disk.transfers import BlockTransfers, open_store
from .machine import (
    ENDS_WITH,
    Do,
    Event,
    Phase,
    Row,
    Stage,
    State,
    next_action,
    note,
    num_buffers,
)
from .pieces import Planes
from .space import Block, StateSpace


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
        that are updated before their step. num_waiting: for blocks that wait for others of the
        step. columns: which planes a block has."""
        self.blocks = _in_order(blocks)
        self._layout = layout
        self._forms = BlockForms(space.blocks, layout, split, undo=undo, columns=columns)
        digest, there = space.digest() + self._forms.name, self._forms.in_file(blocks)
        self.store = open_store(digest, self._forms.nbytes, config, label, there)
        self._transfers = BlockTransfers(self.store, self._forms)
        self._step_bytes = self._transfers.bytes_of(self.blocks)
        try:
            self._check_budget(config.write_budget)
        except ValueError:
            self.store.close()
            raise
        self._num_ahead, self._num_waiting, self._pin = num_ahead, num_waiting, pin
        self.state = State([Row(block) for block in self.blocks], config.depth)
        self._reserve()
        self._undo: dict[BlockId, Tensor] = {}  # [n] fp32, what weights were; see [Note: undo]
        self._undo_slab = torch.empty(0)  # [depth, N] fp32
        self._lost: list[NvmeError] = []  # of an undo
        self._in_order = True  # the next step begins with the first block
        self.stalled_seconds = 0.0  # waited for the disk so far

    def _set_blocks(self, blocks: Collection[Block]) -> None:
        """Set which blocks are on disk, and their buffers. Nothing is under way."""
        # two pools of staging would pass the host's budget
        self._pool.empty()
        self.blocks = _in_order(blocks)
        self._step_bytes = self._transfers.bytes_of(self.blocks)
        state = self.state
        known = {row.id: row for row in state.rows}
        state.rows = [known.get(block.id) or Row(block) for block in self.blocks]
        there = {block.id for block in self.blocks}
        kept = [row for row in state.order if row.id in there]
        state.order = kept + [row for row in state.rows if row.id not in known]
        self._reserve()

    def _reserve(self) -> None:
        """Reserve buffers for the blocks that are there: as many and as large as they need."""
        num_blocks = len(self.blocks)
        count = num_buffers(self.state.depth, num_blocks) + self._num_ahead
        count += min(self._num_waiting, num_blocks)
        self._pool = BufferPool(count, self._forms.buffer_nbytes(self.blocks), self._pin)
        self._transfers.forget_views()
        # The machine does not have the buffer for weights that do not count yet: it is asked for
        # whatever rows are doing.
        self._spare = [self._pool.take() for _ in range(1 if self._num_ahead else 0)]
        self.state.free = [self._pool.take() for _ in range(count - len(self._spare))]

    @property
    def num_in_use(self) -> int:
        """Number of buffers that hold a block."""
        return self._pool.count - len(self._spare) - len(self.state.free)

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

    @property
    def held_share(self) -> float:
        """Share of a step's traffic that is left where all blocks were written before it."""
        return self._transfers.held_share(self.blocks)

    def _check_budget(self, budget: int | None) -> None:
        if budget is not None and budget < self.written_bytes_per_step:
            raise ValueError(
                f"nvme_write_budget={format_bytes(budget)} is below the "
                f"{format_bytes(self.written_bytes_per_step)} that one step writes; raise it, or "
                "offload a smaller fraction"
            )

    def initialise(self, fill: Callable[[Block, Planes], None]) -> None:
        """Write every block's first version. `fill` gets zeroed planes."""
        self._write_all(self.blocks, fill, 0, is_new=True)

    def _write_all(
        self,
        blocks: Sequence[Block],
        fill: Callable[[Block, Planes], None],
        step: int,
        *,
        is_new: bool,
    ) -> None:
        """Write the next version of blocks, and commit it as that of `step`."""
        with self._lent() as writes:
            try:
                for block in blocks:
                    with DeferredSignals():  # Ctrl-C comes between two blocks
                        self._rewrite(block, fill, writes, is_new=is_new)
                with DeferredSignals():
                    self._count(step, writes)
            except BaseException:
                with DeferredSignals():
                    self.store.rollback()
                raise

    # -- moves; see `optim.state.machine` --

    def carry_out(self, do: Do, row: Row) -> None:
        """Begin a transfer, wait for one, or forget a version. Errors are noted, not raised."""
        if do is Do.WAIT:
            self.end(row)
            return
        # What goes wrong is an event and not an exception: in the middle of a step other transfers
        # use buffers, and only the machine knows what must end first.
        try:
            if do is Do.READ:
                with named("read", "block", row.id):
                    row.ticket = self._transfers.read(row.block, row.buffer)
            elif do is Do.FETCH:
                with named("read", "block", row.id):
                    row.ticket = self._transfers.read_written(row.block, row.buffer, row.checksum)
            elif do is Do.WRITE:
                with named("write", "block", row.id):
                    row.ticket = self._transfers.write(
                        row.block, row.buffer, with_undo=not row.is_early
                    )
            else:
                assert do is Do.DROP
                self._transfers.take_back(row.block)
        except BaseException as error:
            note(self.state, Event.FAILED, row, error)

    def end(self, row: Row) -> None:
        """Wait for a row's transfer."""
        assert row.ticket is not None
        started = time.perf_counter()
        event, error = ENDS_WITH[row.stage], None
        try:
            with named("wait for", "block", row.id):
                row.ticket.wait()
        except BaseException as raised:
            event, error = Event.FAILED, raised
        self.stalled_seconds += time.perf_counter() - started
        note(self.state, event, row, error)

    def collect(self) -> None:
        """End writes that have ended, in their order. Never waits."""
        # in order, up to the first that is not ready: an older failure must be told first
        for row in list(self.state.under_way):
            if row.stage is Stage.WRITING:
                if row.ticket is None or not row.ticket.ready():
                    return
                self.end(row)

    def prefetch(self) -> None:
        """Begin to read the first blocks of the next step. Never waits."""
        with DeferredSignals():
            note(self.state, Event.AHEAD)
            self._go_on()

    def drop_early(self) -> None:
        """Drop what was done before the step. Waits for what is under way of it."""
        if self.state.error is None and not any(row.is_early for row in self.state.rows):
            return
        with DeferredSignals():
            note(self.state, Event.DROPPED)
            self._go_on()

    def _look(self) -> None:
        """Bring the state to rest: nothing is under way, and no buffer holds a block."""
        self.store.check_process()
        with DeferredSignals():
            note(self.state, Event.LOOK)
            self._go_on()
            self._check_at_rest(in_use=True)

    def _check_at_rest(self, *, in_use: bool = False) -> None:
        """Raise RuntimeError where something has cut a step or a read off in its middle."""
        self._take_back()
        held = self.num_in_use if in_use else 0
        if held or self.state.phase is not Phase.PASS:
            raise RuntimeError(
                "a step or a read of state on disk was cut off in its middle "
                f"({self.state.phase.name}, {held} buffers in use), by an exception that another "
                "thread raised in this one, say; the disk has the last whole step: close the "
                "optimizer with keep_masters=False, make another and load a checkpoint"
            )

    def _take_back(self) -> None:
        """Take buffers back that a signal kept a read from giving back: it came on the way out."""
        while self._pool.num_free:
            self.state.free.append(self._pool.take())

    def _go_on(self) -> None:
        """Carry out actions between steps: reads and drops, and the end of what does not count."""
        self._check_at_rest()
        while (action := next_action(self.state)) is not None:
            do, row, _ = action
            assert row is not None
            self.carry_out(do, row)

    def check_step(self) -> None:
        """Check the write budget. Raises WriteBudgetError where a step has no room."""
        with DeferredSignals():
            self._take_back()
        self.store.check_step(self.written_bytes_per_step)

    def planes(self, row: Row) -> Planes:
        """Planes of a row that was read, as an update takes them; where masters are split, with
        room for its new `WEIGHT`."""
        return self._transfers.planes(row.block, row.buffer)

    def fetched(self, row: Row) -> Tensor:
        """[n]: its new weights, or masters."""
        if self._forms.is_split(row.block):
            return self._transfers.undo_plane(row.block, row.buffer)
        return self._transfers.planes(row.block, row.buffer)[MASTER]

    def save(self, row: Row, save: Callable[[Block, Callable[[], Tensor]], bool]) -> None:
        """Save parameters before their update: `save` copies them into [n] that holds their values,
        and answers whether they need to be restored when the step fails."""
        if self._forms.has_undo:
            save(row.block, partial(self._transfers.undo_plane, row.block, row.buffer))
            row.is_touched = True
        else:
            undo = partial(self._early_undo, row.block)
            row.is_touched = not row.was_read or save(row.block, undo)

    def save_weight(self, row: Row, save: Callable[[Block, Callable[[], Tensor]], bool]) -> None:
        """Save weights after their update: where masters are split they are written with the
        state."""
        if self._forms.is_split(row.block):
            save(row.block, partial(self._transfers.undo_plane, row.block, row.buffer))

    def remember(self, row: Row) -> None:
        """Remember a checksum before an early write: the step knows by this what it reads again."""
        row.checksum = self._transfers.checksum(row.block, row.buffer)

    def flush(self) -> None:
        """Wait until all writes are on disk. Raises what went wrong."""
        started = time.perf_counter()
        with named("wait for", "writes"):
            self.store.flush()
        self.stalled_seconds += time.perf_counter() - started

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
        self._in_order = in_order
        note(self.state, Event.COMMITTED, None, in_order)

    def restore(self, row: Row, restore: Callable[[Block, Planes], None]) -> None:
        """Restore the weights of a row: `restore` gets its planes as the last commit left them, or
        only `param_undo`."""
        # Memory before the disk: the failure that is undone may be the disk's.
        known = self._undo.get(row.id)
        if known is None and self._forms.has_undo and row.buffer is not None:
            known = self._transfers.undo_plane(row.block, row.buffer)
        if known is not None:
            restore(row.block, {"param_undo": known})
            return
        # The machine is undoing, so nothing is under way and some buffer is free.
        lent = row.buffer is None
        if lent:
            row.buffer = self.state.free.pop()
        try:
            restore(row.block, self._transfers.read_undo(row.block, row.buffer))
        except NvmeError as error:
            self._lost.append(error)
        if lent:
            self.state.free.append(row.buffer)
            row.buffer = None

    def rollback(self) -> None:
        """Forget all that was written. Raises RollbackError if the parameters of some block could
        not be read back."""
        self.store.rollback()
        self._undo.clear()
        note(self.state, Event.ROLLED_BACK)
        lost, self._lost = self._lost, []
        if lost:
            raise RollbackError(
                f"the step failed, and so did reading back the weights of {len(lost)} of "
                f"{len(self.blocks)} blocks: they are those of the step that failed. Load a "
                f"checkpoint. First error: {lost[0]}"
            ) from lost[0]

    def has_room_for_early(self, also_bytes: int) -> bool:
        """Whether the write budget has room for blocks that are written twice, for `also_bytes`
        elsewhere, and for the step; such blocks have a master."""
        nbytes = 2 * self.written_bytes_per_step + also_bytes
        return not self._forms.has_undo and self.store.has_room_for(nbytes)

    @property
    def spare(self) -> Buffer:
        """Buffer for weights that do not count yet, of blocks that are updated before their
        step."""
        return self._spare[0]

    def _early_undo(self, block: Block) -> Tensor:
        """Memory for the parameters of a block that was read before the step began."""
        if not self._undo_slab.numel():
            largest = max(block.numel for block in self.blocks)
            depth = self.state.depth
            self._undo_slab = torch.empty(depth, largest, dtype=DTYPES[self._layout.dtype])
        self._undo[block.id] = self._undo_slab[len(self._undo)][: block.numel]
        return self._undo[block.id]

    # -- between steps --

    @contextmanager
    def _lent(self) -> Iterator[WriteBehind]:
        """All buffers, for blocks that pass through them one after the other."""
        self._look()
        pool, free = self._pool, self.state.free
        writes = WriteBehind(pool)
        # The machine's buffers go to the pool and back whole: signals in between would lose one
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
        with self._lent():
            reads = read_ahead(self._pool, blocks, partial(self._transfers.read_all, at=at))
            try:
                while True:
                    # Ctrl-C comes between two blocks, else a buffer is lost
                    with DeferredSignals():
                        read = next(reads, None)
                    if read is None:
                        return
                    block, buffer, _ = read
                    visit(block, self._forms.shown(buffer, block))
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
        with self._lent():
            buffer = self._pool.take()
            try:
                for block in self.blocks if self._forms.has_undo else ():
                    if self._transfers.read_weights(block, buffer, commits):
                        visit(block, self._transfers.undo_plane(block, buffer))
            finally:
                self._pool.give(buffer)

    def version(self, index: Index) -> StateVersion:
        """Version of all blocks at this commit."""
        blocks = tuple((block.numel, self._forms.is_split(block)) for block in self.blocks)
        paths = tuple(str(path) for path in self.store.paths)
        columns = self._forms.columns_of(self.blocks)
        return StateVersion(paths, index, self._layout, blocks, self._forms.has_undo, columns)

    def rewind(self, steps: int) -> None:
        """Make the commit of `steps` steps before the last one again; no block is written."""
        self._look()
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
        """Overwrite blocks; `fill` gets the committed planes and changes them, or zeros where it
        sets the `whole` of them.

        On an error every block keeps what it had.
        """
        self.check_step()
        self._write_all(blocks, fill, step, is_new=whole)

    def _rewrite(
        self,
        block: Block,
        fill: Callable[[Block, Planes], None],
        writes: WriteBehind,
        *,
        is_new: bool,
    ) -> None:
        """Write the next version of a block. is_new: no use is made of the last one, and `fill`
        gets zeros."""
        buffer = writes.take()
        try:
            if not is_new:
                self._transfers.read_all(block, buffer).wait()
            self._forms.change(buffer, block, fill, is_new=is_new)
            ticket = self._transfers.write(block, buffer, with_undo=False)
        except BaseException:
            self._pool.give(buffer)
            raise
        writes.add(ticket, buffer)

    def _count(self, step: int, writes: WriteBehind) -> None:
        """Commit what was written. The next step begins with the first block."""
        writes.drain()
        self.flush()
        self.commit(step, in_order=True)
        note(self.state, Event.RESIDENT)

    def forget(self, blocks: Sequence[Block]) -> None:
        """Forget blocks that live elsewhere from now on: their space on disk is given back."""
        self._look()
        self.store.forget(self._forms.in_file(blocks))
        gone = {block.id for block in blocks}
        self._set_blocks([block for block in self.blocks if block.id not in gone])

    def take_in(self, blocks: Sequence[Block], fill: Callable[[Block, Planes], None]) -> None:
        """Take in blocks that lived elsewhere, and write only these; `fill` as in `initialise`.

        Between steps. On an error nothing has changed.
        """
        self._look()
        self.store.check_step(self._transfers.bytes_of(blocks), "state that leaves memory")
        before = self.blocks
        self.store.remember(self._forms.in_file(blocks))
        try:
            self._set_blocks([*before, *blocks])
            self._write_all(blocks, fill, self.store.committed_step, is_new=True)
        except BaseException:
            with DeferredSignals():
                self.forget(blocks)
            raise

    def has_place_for(self, blocks: Sequence[Block]) -> bool:
        """Whether blocks are of the space that this was made for."""
        return all(block in self._forms for block in blocks)

    def pin(self) -> PinnedState:
        """Pin all blocks as they were committed last, until they have been shown."""
        self.store.check_process()
        # the step after the next writes over them, in this order
        order = self.state.order if self._in_order else self.state.order[::-1]
        blocks = [row.block for row in order]
        parts = [part for block in blocks for part in self._forms.committed_ids(block)]
        return PinnedState(blocks, self._forms, self.store.pin(parts))

    def empty_staging(self) -> None:
        """Forget what was read ahead and give the memory of the buffers back to the system."""
        self._look()
        self._undo_slab = torch.empty(0)
        self._pool.empty()

    def close(self) -> None:
        """Wait for transfers and remove the files."""
        if self.store.is_ours:
            for row in self.state.under_way:
                settle(row.ticket)
        self.store.close()
