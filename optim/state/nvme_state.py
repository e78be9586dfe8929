"""State blocks on disk and the pipeline that updates them: read i+1, update i, write i-1.

One step is `begin_step`, then for every block `bring` and `take_back` (it is written beside its old
version), then `flush`, and `commit` or `rollback`. Nothing counts before `commit`;
`rollback` restores the parameters that were updated. Who owns the loop is `optim.step.driver`.

[Note: undo] A step with state on disk can fail in its middle: a read comes up short, a checksum
does not match. State is safe, because every block keeps its last version. A 16-bit parameter is
restored from the master in that version, or from memory where that version was read before the
step began, since the file may have been lost meanwhile. Where there is no master, the parameter is
updated in place, and what it was before goes to disk beside the new state: 4 bytes an element that
are written (8 in float64) and, but for a failure, never read.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from gemini.dtypes import DTYPES
from gemini.tickets import Ticket, Together
from gemini.units import PAGE_BYTES, BlockId, align_up, format_bytes
from nvme import (
    BlockStore,
    Buffer,
    BufferPool,
    NvmeError,
    Pin,
    PinnedVersions,
    RollbackError,
    StoreLayout,
    WriteMeter,
    check_folder,
    default_folder,
)
from optim.rules.config import NvmeConfig
from optim.rules.state_layout import StateLayout

from .disks import measure_disks
from .pieces import Planes
from .space import Block


@dataclass(slots=True)
class _Staged:
    """A block in a staging buffer."""

    block: Block
    buffer: Buffer
    ticket: Ticket[object] | None  # None: the buffer holds the committed content


class NvmeState:
    """The blocks of a state space that live on disk, all planes of each together.

    `undo`: parameters are updated in place, so what they were goes to disk too ([Note: undo]).
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
        label: str = "",
        pin: Pin | None = None,
    ) -> None:
        self.blocks = tuple(blocks)
        self._layout = layout
        self._has_undo = undo
        self._undo_dtype = DTYPES[layout.dtype]  # holds every value of a parameter
        self._depth = config.depth
        self._file_id = {block.id: BlockId(i) for i, block in enumerate(blocks)}
        self._num_states = len(blocks)  # in the file; what undoes them comes behind
        nbytes = [layout.block_nbytes(block.numel) for block in blocks]
        if undo:
            nbytes += [block.numel * layout.undo_itemsize for block in blocks]
        folders = [check_folder(f, allow_ram=config.allow_ram) for f in config.folders]
        disks = measure_disks(folders or [default_folder()], config)
        self.store = BlockStore(
            disks.folders,
            StoreLayout.plan(digest, nbytes, disks.weights),
            engine=disks.engine,
            checksums=config.checksums,
            allow_ram=config.allow_ram,
            label=label,
            meter=config.meter or WriteMeter(config.write_budget),
        )
        of_file = self.store.buffer_nbytes
        self._view_nbytes = {block: of_file(file_id) for block, file_id in self._file_id.items()}
        self._step_bytes = self._bytes_of(self.blocks)
        try:
            self._check_budget(config.write_budget)
        except ValueError:
            self.store.close()
            raise
        self._state_nbytes = max(align_up(n, PAGE_BYTES) for n in nbytes)
        self._views: dict[tuple[int, int], Planes] = {}  # of a buffer, by its index and elements
        undo_nbytes = max(nbytes[len(blocks) :], default=0)
        self._pool = BufferPool(
            min(config.depth + 2, len(blocks) + 1), self._state_nbytes + undo_nbytes, pin
        )
        self._order = self.blocks  # of the next update; alternates each step
        self._next_read = 0  # index into _order
        self._reads: deque[_Staged] = deque()  # waiting for their update, in order
        self._current: _Staged | None = None  # being updated
        self._writes: deque[_Staged] = deque()  # updated, on their way to disk
        self._read_before: set[BlockId] = set()  # blocks that were read before the step began
        self._is_touched = True  # the current block's parameters may need to be restored
        self._touched: list[Block] = []  # whose parameters this step has changed
        self._early: dict[BlockId, Tensor] = {}  # [n] fp32, what they were; see [Note: undo]
        self._early_slab = torch.empty(0)  # [depth, N] fp32
        self.stalled_seconds = 0.0  # waited for the disk so far

    @property
    def order(self) -> Sequence[Block]:
        """Of the next update."""
        return self._order

    @property
    def staging_bytes(self) -> int:
        return self._pool.nbytes + self._early_slab.nbytes

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
        for block in self._order:
            staged = _Staged(block, self._take(), None)
            planes = self._planes(staged)
            for plane in planes.values():
                plane.zero_()
            fill(block, planes)
            self._submit_write(staged, with_undo=False)
        self.commit(step=0)

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
            staged = _Staged(block, self._pool.take(), None)
            view = staged.buffer.view[: self._view_nbytes[block.id]]
            staged.ticket = self.store.read(self._file_id[block.id], view)
            self._reads.append(staged)
            self._next_read += 1

    def begin_step(self) -> None:
        """Every block is to be brought, updated and taken back, then `flush`, and then `commit`;
        or `rollback`, wherever an error comes. Raises WriteBudgetError."""
        self.store.check_step(self.written_bytes_per_step)
        self._read_before = {staged.block.id for staged in self._reads}

    @property
    def has_more(self) -> bool:
        """Whether a block of this step is to be brought."""
        return bool(self._reads) or self._next_read < len(self._order)

    def bring(
        self, save: Callable[[Block, Callable[[], Tensor]], bool]
    ) -> tuple[Block, Planes] | None:
        """The next block in `order`, for its update; None where all were. `take_back` follows.

        Waits for it, and reads ahead. `save` copies its parameters into [n] of fp32 or wider, and
        answers whether they need to be restored when the step fails.
        """
        self.prefetch()
        while not self._reads:
            if self._next_read == len(self._order):
                return None
            self._wait_for_a_write()
            self.prefetch()
        current = self._current = self._reads.popleft()
        if current.ticket is not None:
            started = time.perf_counter()
            try:
                current.ticket.wait()
            finally:
                self.stalled_seconds += time.perf_counter() - started
        block, self._is_touched = current.block, True
        if self._has_undo:
            save(block, partial(self._undo, current))
        elif block.id in self._read_before:
            self._is_touched = save(block, partial(self._early_undo, block))
        if self._is_touched:
            self._touched.append(block)
        views = self._views.get((current.buffer.index, block.numel))
        return block, self._planes(current) if views is None else dict(views)

    def take_back(self, changed: bool) -> None:
        """The block that was brought is updated; what did not change is not written."""
        current = self._current
        assert current is not None
        if changed:
            self._submit_write(current, with_undo=self._has_undo)
        else:
            if self._is_touched:
                self._touched.pop()
            self._pool.give(current.buffer)
        self._current = None

    def flush(self) -> None:
        """Wait until all that was taken back is on disk. Raises what went wrong."""
        started = time.perf_counter()
        self.store.flush()
        self.stalled_seconds += time.perf_counter() - started

    def commit(self, step: int) -> None:
        """Make the step count: all blocks at once, and durably. Does not raise after a `flush`."""
        started = time.perf_counter()
        self.store.commit(step)
        self.stalled_seconds += time.perf_counter() - started
        self._touched.clear()
        self._early.clear()
        self._order = self._order[::-1]
        self._next_read = 0
        # what was written last is the first of the next step, and still in memory
        while self._writes:
            staged = self._writes.pop()
            first = self._order[self._next_read]
            if staged.block is first and len(self._reads) < self._depth:
                self._reads.append(_Staged(staged.block, staged.buffer, None))
                self._next_read += 1
            else:
                self._pool.give(staged.buffer)

    def rollback(self, restore: Callable[[Block, Planes], None]) -> None:
        """Undo the step as far as it came, reading what is needed back from disk.

        `restore` gets each touched block: its planes as the last commit left them, or only
        `param_undo`. Raises RollbackError if some block's parameters could not be had back.
        """
        self.store.check_process()
        held = {s.block.id: s for s in (*self._writes, self._current) if s is not None}
        for staged in (*self._reads, *held.values()):
            _settle_quietly(staged.ticket)
        self._give_all(self._reads)
        self._reads.clear()
        known = dict(self._early)
        if self._has_undo:
            known |= {block_id: self._undo(staged) for block_id, staged in held.items()}
        from_disk = [block for block in self._touched if block.id not in known]
        for block in self._touched:
            if block.id in known:
                restore(block, {"param_undo": known[block.id]})
        self._give_all(held.values())
        buffer = self._pool.take()
        lost: list[NvmeError] = []
        for block in from_disk:
            try:
                restore(block, self._read_undo(_Staged(block, buffer, None)))
            except NvmeError as error:
                lost.append(error)
        self._pool.give(buffer)
        self.store.rollback()
        self._writes.clear()
        self._current = None
        self._touched.clear()
        self._early.clear()
        self._next_read = 0
        if lost:
            raise RollbackError(
                f"the step failed, and so did reading back the weights of {len(lost)} of "
                f"{len(self.blocks)} blocks: they are those of the step that failed. Load a "
                f"checkpoint. First error: {lost[0]}"
            ) from lost[0]

    def _read_undo(self, staged: _Staged) -> Planes:
        """What `restore` needs of a block that is no longer in memory."""
        file_id = self._file_id[staged.block.id]
        if not self._has_undo:
            self.store.read(file_id, self._state_view(staged)).wait()
            return self._planes(staged)
        undo_id = BlockId(file_id + self._num_states)
        self.store.read_uncommitted(undo_id, self._undo_view(staged)).wait()
        return {"param_undo": self._undo(staged)}

    def _early_undo(self, block: Block) -> Tensor:
        """Memory for the parameters of a block that was read before the step began."""
        if not self._early_slab.numel():
            largest = max(block.numel for block in self.blocks)
            self._early_slab = torch.empty(self._depth, largest, dtype=self._undo_dtype)
        self._early[block.id] = self._early_slab[len(self._early)][: block.numel]
        return self._early[block.id]

    def load(self, blocks: Sequence[Block], visit: Callable[[Block, Planes], None]) -> None:
        """Read committed blocks one after the other; `visit` must copy what it keeps."""
        self._drop_reads()
        staged = _Staged(blocks[0], self._take(), None) if blocks else None
        try:
            for block in blocks:
                assert staged is not None
                staged.block = block
                self.store.read(self._file_id[block.id], self._state_view(staged)).wait()
                visit(block, self._planes(staged))
        finally:
            if staged is not None:
                self._pool.give(staged.buffer)

    def replace(
        self, fill: Callable[[Block, Planes], None], step: int, blocks: Sequence[Block]
    ) -> None:
        """Overwrite blocks; `fill` gets the committed planes and changes them.

        On an error every block keeps what it had.
        """
        self._drop_reads()
        self.store.check_step(self.written_bytes_per_step)
        try:
            for block in blocks:
                self._current = _Staged(block, self._take(), None)
                self.store.read(self._file_id[block.id], self._state_view(self._current)).wait()
                fill(block, self._planes(self._current))
                self._submit_write(self._current, with_undo=False)
                self._current = None
            self.store.flush()
        except BaseException:
            self.rollback(lambda block, planes: None)
            raise
        self.commit(step)

    def forget(self, blocks: Sequence[Block]) -> None:
        """These blocks live elsewhere from now on: give their space on disk back."""
        self._drop_reads()
        self.store.forget(self._in_file(blocks))
        self._step_bytes -= self._bytes_of(blocks)
        gone = {block.id for block in blocks}
        self.blocks = tuple(block for block in self.blocks if block.id not in gone)
        self._order = tuple(block for block in self._order if block.id not in gone)

    def _bytes_of(self, blocks: Sequence[Block]) -> int:
        """That a step writes of these."""
        return sum(map(self.store.buffer_nbytes, self._in_file(blocks)))

    def _in_file(self, blocks: Sequence[Block]) -> list[BlockId]:
        """All that the file has of these blocks."""
        found = [self._file_id[block.id] for block in blocks]
        if self._has_undo:
            found += [BlockId(i + self._num_states) for i in found]
        return found

    def pin(self) -> PinnedState:
        """Keep all blocks as they were committed last until they have been shown."""
        self.store.check_process()
        # the step after the next writes over them, in the order of this one's reversed
        blocks = self._order[::-1]
        pinned = self.store.pin([self._file_id[block.id] for block in blocks])
        return PinnedState(blocks, self._file_id, self._layout, pinned, self._state_nbytes)

    def empty_staging(self) -> None:
        """Forget what was read ahead and give the memory of the buffers back to the system."""
        self._drop_reads()
        self._early_slab = torch.empty(0)
        self._pool.empty()

    def close(self) -> None:
        """Wait for transfers and remove the files."""
        if self.store.is_ours:
            for staged in self._reads:
                _settle_quietly(staged.ticket)
        self.store.close()

    def _submit_write(self, staged: _Staged, *, with_undo: bool) -> None:
        file_id = self._file_id[staged.block.id]
        view = staged.buffer.view[: self._view_nbytes[staged.block.id]]
        staged.ticket = self.store.write(file_id, view)
        if with_undo:
            undo_id = BlockId(file_id + self._num_states)
            undo = self.store.write(undo_id, self._undo_view(staged))
            staged.ticket = Together((staged.ticket, undo))
        self._writes.append(staged)

    def _wait_for_a_write(self) -> None:
        self._settle(self._writes[0])
        self._pool.give(self._writes.popleft().buffer)

    def _take(self) -> Buffer:
        while self._pool.num_free == 0:
            self._wait_for_a_write()
        return self._pool.take()

    def _settle(self, staged: _Staged) -> None:
        if staged.ticket is not None:
            started = time.perf_counter()
            try:
                staged.ticket.wait()
            finally:
                self.stalled_seconds += time.perf_counter() - started

    def _drop_reads(self) -> None:
        """Forget what was read ahead."""
        self.store.check_process()
        for staged in self._reads:
            _settle_quietly(staged.ticket)
        self._give_all(self._reads)
        self._reads.clear()
        self._next_read = 0

    def _give_all(self, staged: Iterable[_Staged]) -> None:
        for one in staged:
            self._pool.give(one.buffer)

    def _state_view(self, staged: _Staged) -> memoryview:
        return staged.buffer.view[: self._view_nbytes[staged.block.id]]

    def _undo_view(self, staged: _Staged) -> memoryview:
        undo_id = BlockId(self._file_id[staged.block.id] + self._num_states)
        start = self._state_nbytes
        return staged.buffer.view[start : start + self.store.buffer_nbytes(undo_id)]

    def _undo(self, staged: _Staged) -> Tensor:
        return torch.frombuffer(
            staged.buffer.view,
            dtype=self._undo_dtype,
            count=staged.block.numel,
            offset=self._state_nbytes,
        )

    def _planes(self, staged: _Staged) -> Planes:
        key = staged.buffer.index, staged.block.numel
        if key not in self._views:
            self._views[key] = _planes_in(staged.buffer, staged.block, self._layout)
        return dict(self._views[key])


class PinnedState:
    """Blocks on disk as one commit left them, to be shown once while steps go on."""

    def __init__(
        self,
        blocks: Sequence[Block],
        file_id: Mapping[BlockId, BlockId],
        layout: StateLayout,
        pinned: PinnedVersions,
        buffer_nbytes: int,
    ) -> None:
        self._blocks = blocks
        self._file_id = file_id
        self._layout = layout
        self._pinned = pinned
        self._buffer_nbytes = buffer_nbytes

    def visit(self, look: Callable[[Block, Planes], None]) -> None:
        """Show every block, reading one ahead; in any thread. What is to be kept is copied."""
        pool = BufferPool(2, self._buffer_nbytes)
        ahead: deque[tuple[Block, Buffer, Ticket[int]]] = deque()
        coming = iter(self._blocks)
        try:
            while True:
                while pool.num_free and (block := next(coming, None)) is not None:
                    buffer = pool.take()
                    ticket = self._pinned.read(self._file_id[block.id], buffer.view)
                    ahead.append((block, buffer, ticket))
                if not ahead:
                    return
                block, buffer, ticket = ahead.popleft()
                self._pinned.check(self._file_id[block.id], ticket.wait())
                look(block, _planes_in(buffer, block, self._layout))
                self._pinned.let_go(self._file_id[block.id])
                pool.give(buffer)
        finally:
            for _, _, ticket in ahead:
                _settle_quietly(ticket)

    def close(self) -> None:
        """Let go of all blocks."""
        self._pinned.close()


def _planes_in(buffer: Buffer, block: Block, layout: StateLayout) -> Planes:
    """A block's planes as views of the buffer that holds it."""
    offsets = layout.offsets(block.numel)
    return {
        plane.name: torch.frombuffer(
            buffer.view, dtype=DTYPES[plane.dtype], count=block.numel, offset=offset
        )
        for plane, offset in zip(layout.planes, offsets, strict=True)
    }


def _settle_quietly(ticket: Ticket[object] | None) -> None:
    """Wait for a transfer whose outcome is raised elsewhere, or no longer matters."""
    if ticket is None:
        return
    try:
        ticket.wait()
    except NvmeError:
        return
