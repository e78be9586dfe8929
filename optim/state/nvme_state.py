"""State blocks on disk and the pipeline that updates them: read i+1, update i, write i-1.

One step is `begin_step`, then for every block `bring` and `take_back` (it is written beside its old
version), then `flush`, and `commit` or `rollback`. Nothing counts before `commit`;
`rollback` restores the parameters that were updated. Who owns the loop is `optim.step.driver`.

Updates see a block's planes; all others see it with whole masters (`optim.state.disk.forms`).

A block may be read, updated and written before its step begins (`read_early`, `write_early`): then
the step reads what has become of its weight or its master, and nothing else of it.

[Note: undo] A step with state on disk can fail in its middle: a read comes up short, a checksum
does not match. State is safe, because every block keeps its last version. A 16-bit parameter is
restored from the weight or the master in that version, or from memory where that version was read
before the step began, since the file may have been lost meanwhile. Where there is no master, the
parameter is updated in place, and what it was before goes to disk beside the new state: 4 bytes an
element that are written (8 in float64) and, but for a failure, never read.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence, Set
from functools import partial

import torch
from torch import Tensor

from gemini.dtypes import DTYPES
from gemini.nvme import (
    BlockStore,
    Buffer,
    BufferPool,
    NvmeError,
    Pin,
    RollbackError,
    StoreLayout,
    WriteMeter,
    check_folder,
    default_folder,
    settle,
)
from gemini.optim.rules.config import NvmeConfig
from gemini.optim.rules.state_layout import WEIGHT, StateLayout
from gemini.ranges import named
from gemini.tickets import Ticket
from gemini.units import BlockId, format_bytes

from .disk.forms import BlockForms
from .disk.pinned_state import PinnedState
from .disk.transfers import BlockTransfers, Staged
from .disks import measure_disks
from .held_signals import HeldSignals
from .pieces import Planes
from .space import Block


class NvmeState:
    """The blocks of a state space that live on disk, all planes of each together.

    `undo`: parameters are updated in place, so what they were goes to disk too ([Note: undo]).
    `split`: blocks whose masters are kept as what their parameters lack, which are in memory.
    One thread at a time.
    """

    def __init__(
        self,
        blocks: Sequence[Block],
        layout: StateLayout,
        config: NvmeConfig,
        *,
        digest: str,
        undo: bool = False,
        split: Set[BlockId] = frozenset(),
        label: str = "",
        pin: Pin | None = None,
        num_ahead: int = 0,
    ) -> None:
        """num_ahead: buffers more, for blocks that are updated before their step."""
        self.blocks = tuple(blocks)
        self._layout = layout
        self._depth = config.depth
        self._forms = BlockForms(blocks, layout, split, undo=undo)
        folders = [check_folder(f, allow_ram=config.allow_ram) for f in config.folders]
        disks = measure_disks(folders or [default_folder()], config)
        self.store = BlockStore(
            disks.folders,
            StoreLayout.plan(digest + self._forms.name, self._forms.nbytes, disks.weights),
            engine=disks.engine,
            checksums=config.checksums,
            allow_ram=config.allow_ram,
            label=label,
            meter=config.meter or WriteMeter(config.write_budget),
        )
        self._transfers = BlockTransfers(self.store, self._forms, layout)
        self._step_bytes = self._transfers.bytes_of(self.blocks)
        try:
            self._check_budget(config.write_budget)
        except ValueError:
            self.store.close()
            raise
        self._pool = BufferPool(
            min(config.depth + 2, len(blocks) + 1) + num_ahead, self._forms.buffer_nbytes, pin
        )
        self._order = self.blocks  # of the next update
        self._in_order = False  # it does not alternate
        self._next_read = 0  # index into _order
        self._reads: deque[Staged] = deque()  # waiting for their update, in order
        self._current: Staged | None = None  # being updated
        self._writes: deque[Staged] = deque()  # updated, on their way to disk
        self._read_before: set[BlockId] = set()  # blocks that were read before the step began
        self._is_touched = True  # the current block's parameters may need to be restored
        self._touched: list[Block] = []  # whose parameters this step has changed
        self._early: dict[BlockId, Tensor] = {}  # [n] fp32, what they were; see [Note: undo]
        self._early_slab = torch.empty(0)  # [depth, N] fp32
        # blocks written before their step began, and the checksum of what a whole master's pages
        # hold
        self._early_written: dict[BlockId, int] = {}
        self._held: frozenset[BlockId] = frozenset()  # of these, what this step has no more to do
        self._done: frozenset[BlockId] = frozenset()  # of those, what it need not even read
        self.stalled_seconds = 0.0  # waited for the disk so far

    @property
    def order(self) -> Sequence[Block]:
        """Of the next update."""
        return self._order

    @property
    def num_in_use(self) -> int:
        """Buffers that hold a block, or are lent."""
        return self._pool.count - self._pool.num_free

    @property
    def staging_bytes(self) -> int:
        return self._pool.nbytes + self._early_slab.nbytes

    @property
    def written_bytes_per_step(self) -> int:
        return self._step_bytes

    @property
    def held_share(self) -> float:
        """Of a step's traffic, what is left where all blocks were written before it."""
        return self._transfers.held_share(self.blocks)

    def _check_budget(self, budget: int | None) -> None:
        if budget is not None and budget < self.written_bytes_per_step:
            raise ValueError(
                f"nvme_write_budget={format_bytes(budget)} is below the "
                f"{format_bytes(self.written_bytes_per_step)} that one step writes; raise it, or "
                "offload a smaller fraction"
            )

    def initialise(self, fill: Callable[[Block, Planes], None]) -> None:
        """Write every block's first version. `fill` gets zeroed planes.

        The first step begins with the first block, which may have a tail, and finds it in memory.
        """
        for block in reversed(self._order):
            staged = Staged(block, self._take(), None)
            for plane in self.planes_of(staged).values():
                plane.zero_()
            self._forms.change(staged.buffer, block, fill)
            self._submit_write(staged, with_undo=False)
        self.commit(step=0, in_order=True)

    def prefetch(self) -> None:
        """Begin to read the next blocks, as far as buffers allow. Never waits."""
        while self._writes:  # take back the buffers of those that have ended
            ticket = self._writes[0].ticket
            if ticket is not None:
                if not ticket.ready():
                    break
                ticket.wait()
            self._pool.give(self._writes.popleft().buffer)
        while (
            self._next_read < len(self._order)
            and len(self._reads) < self._depth
            and self._pool.num_free
        ):
            block = self._order[self._next_read]
            read = self._transfers.read
            if block.id in self._held:
                read = partial(self._transfers.read_written, checksum=self._early_written[block.id])
            self._reads.append(self._begin(read, Staged(block, self._pool.take(), None)))
            self._next_read += 1
            if self._done:
                self._pass_done()

    def _pass_done(self) -> None:
        """To the next block that is to be read."""
        while self._next_read < len(self._order) and self._order[self._next_read].id in self._done:
            self._next_read += 1

    def _begin(self, read: Callable[[Staged], Ticket[None]], staged: Staged) -> Staged:
        """Its read, or the buffer is free again: what is read may have failed to be written."""
        try:
            with named("read", "block", staged.block.id):
                staged.ticket = read(staged)
        except BaseException:
            self._pool.give(staged.buffer)
            raise
        return staged

    def begin_step(
        self,
        held: frozenset[BlockId] = frozenset(),
        done: frozenset[BlockId] = frozenset(),
    ) -> None:
        """Every block is to be brought, updated and taken back, then `flush`, and then `commit`;
        or `rollback`, wherever an error comes. Raises WriteBudgetError.

        held: blocks that `write_early` has written, and that are not to be updated again. done: of
        these, those that are not to be brought.
        """
        assert done <= held <= self._early_written.keys()
        self.store.check_step(self.written_bytes_per_step)
        self._held, self._done = held, done
        self._pass_done()
        self._read_before = {staged.block.id for staged in self._reads}

    @property
    def num_reads_begun(self) -> int:
        """Blocks that wait for their update, or for their read."""
        return len(self._reads)

    @property
    def has_more(self) -> bool:
        """Whether a block of this step is to be brought."""
        return bool(self._reads) or self._next_read < len(self._order)

    def bring(
        self, save: Callable[[Block, Callable[[], Tensor]], bool]
    ) -> tuple[Block, Planes] | None:
        """The next block in `order`, for its update; None where all were. `take_back` follows.

        Waits for it, and reads ahead. `save` copies its parameters into [n] that holds their
        values, and answers whether they need to be restored when the step fails. Of a block that
        is held, only a whole master is as it was written, or there is the plane `WEIGHT` alone.
        """
        self.prefetch()
        while not self._reads:
            if self._next_read == len(self._order):
                return None
            self._wait_for_a_write()
            self.prefetch()
        current = self._current = self._reads.popleft()
        self._settle(current)
        block, self._is_touched = current.block, True
        if self._forms.has_undo:
            save(block, partial(self._transfers.beside, current))
        elif block.id in self._read_before:
            self._is_touched = save(block, partial(self._early_undo, block))
        if self._is_touched:
            self._touched.append(block)
        if block.id in self._held and self._forms.is_split(block):
            return block, {WEIGHT: self._transfers.beside(current)}
        return block, self._transfers.planes(current)

    def take_back(self, changed: bool, save: Callable[[Block, Callable[[], Tensor]], bool]) -> None:
        """The block that was brought is updated; what did not change is not written, nor what is
        there already. `save`: as of `bring`."""
        current = self._current
        assert current is not None
        if current.block.id in self._held:
            self._pool.give(current.buffer)
        elif changed:
            if self._forms.is_split(current.block):
                save(current.block, partial(self._transfers.beside, current))
            self._submit_write(current, with_undo=True)
        else:
            if self._is_touched:
                self._touched.pop()
            self._pool.give(current.buffer)
        self._current = None

    def flush(self) -> None:
        """Wait until all that was taken back is on disk. Raises what went wrong."""
        started = time.perf_counter()
        with named("wait for", "writes"):
            self.store.flush()
        self.stalled_seconds += time.perf_counter() - started

    def commit(self, step: int, *, in_order: bool = False) -> None:
        """Make the step count: all blocks at once, and durably. Does not raise after a `flush`.

        in_order: the next step begins with the first block; else with the one that is in memory,
            which this one has updated last.
        """
        started = time.perf_counter()
        self.store.commit(step)
        self.stalled_seconds += time.perf_counter() - started
        self._touched.clear()
        self._early.clear()
        self._end_early()
        self._order, self._in_order = self.blocks if in_order else self._order[::-1], in_order
        self._next_read = 0
        # what was written last is the first of the next step, and still in memory
        while self._writes:
            staged = self._writes.pop()
            first = self._order[self._next_read]
            if staged.block is first and len(self._reads) < self._depth:
                self._reads.append(Staged(staged.block, staged.buffer, None))
                self._next_read += 1
            else:
                self._pool.give(staged.buffer)

    def rollback(self, restore: Callable[[Block, Planes], None]) -> None:
        """Undo the step as far as it came, reading what is needed back from disk.

        `restore` gets each touched block: its planes as the last commit left them, or only
        `param_undo`. Raises RollbackError if some block's parameters could not be had back.
        """
        self.store.check_process()
        # one may be twice among these: written before the step, and read again by it
        updated = [s for s in (*self._writes, self._current) if s is not None]
        for staged in (*self._reads, *updated):
            settle(staged.ticket)
        self._give_all(self._reads)
        self._reads.clear()
        known = dict(self._early)
        if self._forms.has_undo:
            known |= {staged.block.id: self._transfers.beside(staged) for staged in updated}
        from_disk = [block for block in self._touched if block.id not in known]
        for block in self._touched:
            if block.id in known:
                restore(block, {"param_undo": known[block.id]})
        self._give_all(updated)
        buffer = self._pool.take()
        lost: list[NvmeError] = []
        for block in from_disk:
            try:
                restore(block, self._transfers.read_undo(Staged(block, buffer, None)))
            except NvmeError as error:
                lost.append(error)
        self._pool.give(buffer)
        self.store.rollback()
        self._writes.clear()
        self._current = None
        self._touched.clear()
        self._early.clear()
        self._end_early()
        self._next_read = 0
        if lost:
            raise RollbackError(
                f"the step failed, and so did reading back the weights of {len(lost)} of "
                f"{len(self.blocks)} blocks: they are those of the step that failed. Load a "
                f"checkpoint. First error: {lost[0]}"
            ) from lost[0]

    # -- blocks that are updated before their step begins --

    def can_be_early(self, blocks: Sequence[Block]) -> list[Block]:
        """Those of these on disk that no buffer holds for the step already."""
        coming = {staged.block.id for staged in self._reads}
        return [b for b in blocks if b in self._forms and b.id not in coming]

    def has_room_for_early(self, also_bytes: int) -> bool:
        """Whether what is written twice, and so much elsewhere, leaves room for the step; such
        blocks have a master."""
        nbytes = 2 * self.written_bytes_per_step + also_bytes
        return not self._forms.has_undo and self.store.has_room_for(nbytes)

    def borrow(self) -> Buffer:
        """A buffer, until `give_back`. Waits for writes where none is free."""
        return self._take()

    def give_back(self, buffer: Buffer) -> None:
        self._pool.give(buffer)

    def read_early(self, block: Block) -> Staged:
        """Begin to read a block; `write_early` or `let_go` follows. Waits for a buffer."""
        return self._begin(self._transfers.read, Staged(block, self._take(), None))

    def planes_of(self, staged: Staged) -> Planes:
        """Of a block that was read. Where masters are split, with room for its new `WEIGHT`."""
        return self._transfers.planes_for_update(staged)

    def write_early(self, staged: Staged, *, read_again: bool = True) -> None:
        """Begin to write what was read and updated beside its last version. read_again: the step
        reads of it what its parameters become."""
        checksum = self._transfers.checksum(staged) if read_again else 0
        self._submit_write(staged, with_undo=False)
        self._early_written[staged.block.id] = checksum

    def let_go(self, staged: Staged) -> None:
        """What was read is not needed."""
        settle(staged.ticket)
        self._pool.give(staged.buffer)

    def drop_early(self, but: frozenset[BlockId] = frozenset()) -> None:
        """What was written early does not count, with these exceptions."""
        dropped = self._early_written.keys() - but
        if not dropped:
            return
        with HeldSignals():  # else Ctrl-C may leave a buffer to two blocks
            for block in self.blocks:
                if block.id in dropped:
                    self._transfers.take_back(block)
                    del self._early_written[block.id]
            self._give_all(staged for staged in self._writes if staged.block.id in dropped)
            self._writes = deque(s for s in self._writes if s.block.id not in dropped)

    def _end_early(self) -> None:
        self._early_written.clear()
        self._held = self._done = frozenset()

    def _early_undo(self, block: Block) -> Tensor:
        """Memory for the parameters of a block that was read before the step began."""
        if not self._early_slab.numel():
            largest = max(block.numel for block in self.blocks)
            self._early_slab = torch.empty(self._depth, largest, dtype=DTYPES[self._layout.dtype])
        self._early[block.id] = self._early_slab[len(self._early)][: block.numel]
        return self._early[block.id]

    def load(self, blocks: Sequence[Block], visit: Callable[[Block, Planes], None]) -> None:
        """Read committed blocks one after the other; `visit` must copy what it keeps."""
        with HeldSignals():
            self._drop_reads()
        for block in blocks:
            with HeldSignals():  # Ctrl-C comes between blocks: each buffer is in one hand
                staged = Staged(block, self._take(), None)
                try:
                    self._transfers.read_all(staged).wait()
                    visit(block, self._forms.shown(staged.buffer, block))
                finally:
                    self._pool.give(staged.buffer)

    def replace(
        self, fill: Callable[[Block, Planes], None], step: int, blocks: Sequence[Block]
    ) -> None:
        """Overwrite blocks; `fill` gets the committed planes and changes them.

        On an error every block keeps what it had.
        """
        with HeldSignals():
            self._drop_reads()
        self.store.check_step(self.written_bytes_per_step)
        try:
            for block in blocks:
                with HeldSignals():  # as in `load`
                    self._current = Staged(block, self._take(), None)
                    self._transfers.read_all(self._current).wait()
                    self._forms.change(self._current.buffer, block, fill)
                    self._submit_write(self._current, with_undo=False)
                    self._current = None
            with HeldSignals():
                self.store.flush()
                self.commit(step)
        except BaseException:
            self.rollback(lambda block, planes: None)
            raise

    def forget(self, blocks: Sequence[Block]) -> None:
        """These blocks live elsewhere from now on: give their space on disk back."""
        self._drop_reads()
        self.store.forget(self._transfers.in_file(blocks))
        self._step_bytes -= self._transfers.bytes_of(blocks)
        gone = {block.id for block in blocks}
        self.blocks = tuple(block for block in self.blocks if block.id not in gone)
        self._order = tuple(block for block in self._order if block.id not in gone)

    def pin(self) -> PinnedState:
        """Keep all blocks as they were committed last until they have been shown."""
        self.store.check_process()
        # the step after the next writes over them, in this order
        blocks = self._order if self._in_order else self._order[::-1]
        parts = [part for block in blocks for part in self._forms.committed_ids(block)]
        return PinnedState(blocks, self._forms, self.store.pin(parts))

    def empty_staging(self) -> None:
        """Forget what was read ahead and give the memory of the buffers back to the system."""
        self._drop_reads()
        self._early_slab = torch.empty(0)
        self._pool.empty()

    def close(self) -> None:
        """Wait for transfers and remove the files."""
        if self.store.is_ours:
            for staged in self._reads:
                settle(staged.ticket)
        self.store.close()

    def _submit_write(self, staged: Staged, *, with_undo: bool) -> None:
        with named("write", "block", staged.block.id):
            self._transfers.write(staged, with_undo=with_undo)
        self._writes.append(staged)

    def _wait_for_a_write(self) -> None:
        self._settle(self._writes[0])
        self._pool.give(self._writes.popleft().buffer)

    def _take(self) -> Buffer:
        while self._pool.num_free == 0:
            self._wait_for_a_write()
        return self._pool.take()

    def _settle(self, staged: Staged) -> None:
        if staged.ticket is not None:
            started = time.perf_counter()
            try:
                with named("wait for", "block", staged.block.id):
                    staged.ticket.wait()
            finally:
                self.stalled_seconds += time.perf_counter() - started

    def _drop_reads(self) -> None:
        """Forget what was read ahead."""
        self.store.check_process()
        for staged in self._reads:
            settle(staged.ticket)
        self._give_all(self._reads)
        self._reads.clear()
        self._next_read = 0

    def _give_all(self, staged: Iterable[Staged]) -> None:
        for one in staged:
            self._pool.give(one.buffer)
