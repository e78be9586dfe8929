"""The state of one state space: blocks in slabs (one tensor a plane) on the device or in host
memory, the rest on NVMe. Blocks may rise from the disk and from the host; nothing goes down.

A step updates blocks on disk beside their last version; then they count (`confirm`) and what is in
memory is updated, which cannot fail; or `rollback`. See `optim.step.driver`.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence, Set
from typing import Protocol

from torch import Tensor

from gemini.tickets import CopyTicket
from gemini.units import BlockId
from optim.rules.config import NvmeConfig
from optim.rules.report import Traffic
from optim.rules.state_layout import StateLayout

from .memory import Memory
from .nvme_state import NvmeState, PinnedState
from .pieces import Planes, SteppedViews, Updater
from .slabs import Slab
from .space import Block, StateSpace


class BlockViews(SteppedViews, Protocol):
    """What a step needs to know of the parameters and gradients that a block's state belongs to."""

    def save(self, block: Block, undo: Callable[[], Tensor]) -> bool:
        """Copy the block's parameters, those with a gradient, into fp32 [n] `undo()`.

        False where they need none, since they do not change before the step counts.
        """
        ...

    def restore(self, block: Block, planes: Planes) -> None:
        """Set the block's parameters from its master, or from `param_undo`."""
        ...

    def expect(self, blocks: Sequence[Block]) -> None:
        """Blocks will be updated in this order; what they need may be read ahead."""
        ...

    def end(self) -> None:
        """No block is updated any more: what was borrowed is on its way back."""
        ...

    def abandon(self) -> None:
        """The step failed: what was borrowed is taken back, and nothing of it kept."""
        ...


class TieredState:
    """State of `space`: blocks `on_nvme` and `on_host`, the rest on the device of `memory`."""

    def __init__(
        self,
        space: StateSpace,
        layout: StateLayout,
        *,
        on_nvme: Set[BlockId],
        on_host: Set[BlockId] = frozenset(),
        nvme: NvmeConfig,
        memory: Memory,
        label: str = "",
    ) -> None:
        self.space = space
        self.layout = layout
        self._memory = memory
        self._leaving: Sequence[CopyTicket] = ()  # of the last step, to host slabs
        disk_blocks = [block for block in space.blocks if block.id in on_nvme]
        self._config, self._label = nvme, label
        self.nvme = self._on_disk(disk_blocks, space) if disk_blocks else None
        self._written_before = 0  # to files that are gone
        in_memory = [block for block in space.blocks if block.id not in on_nvme]
        self.device_slabs = self._first_planes([b for b in in_memory if b.id not in on_host])
        self.host_slabs = self._first_planes([b for b in in_memory if b.id in on_host], host=True)
        self._slab_of = self._index()

    def _on_disk(self, blocks: Sequence[Block], space: StateSpace) -> NvmeState:
        return NvmeState(
            blocks,
            self.layout,
            self._config,
            digest=space.digest(),
            undo=not self.layout.has_master,
            label=self._label,
            pin=self._memory.pin,
        )

    def _slabs(self, blocks: Sequence[Block], *, host: bool = False) -> list[Slab]:
        if not blocks:
            return []
        return [Slab(blocks, self.layout, self._memory, on_host=host).complete()]

    def _first_planes(self, blocks: Sequence[Block], *, host: bool = False) -> list[Slab]:
        """For `initialise`: what fills the masters goes as they come, and the rest comes then."""
        return [Slab(blocks, self.layout, self._memory, on_host=host)] if blocks else []

    def _index(self) -> dict[BlockId, Slab]:
        slabs = (*self.device_slabs, *self.host_slabs)
        return {block.id: slab for slab in slabs for block in slab.blocks}

    @property
    def resident(self) -> tuple[Block, ...]:
        """On the device."""
        return tuple(block for slab in self.device_slabs for block in slab.blocks)

    @property
    def host(self) -> tuple[Block, ...]:
        """In host memory, where that is not the device's."""
        return tuple(block for slab in self.host_slabs for block in slab.blocks)

    def planes(self, block: Block) -> Planes:
        """Views of the state of a block that is in memory."""
        self._settle()
        return self._slab_of[block.id].planes(block)

    def _settle(self) -> None:
        """The host reads or writes what the last step may still be copying."""
        leaving, self._leaving = self._leaving, ()
        for ticket in leaving:
            ticket.settle()

    def resident_run(self, offset: int, numel: int) -> Planes | None:
        """Views of elements [offset, offset + numel) of the space, or None where they are not
        together on the device."""
        first = bisect_right(self.space.blocks, offset, key=lambda block: block.offset) - 1
        last = bisect_left(self.space.blocks, offset + numel, key=lambda block: block.offset)
        blocks = self.space.blocks[first:last]
        slab = self._slab_of.get(blocks[0].id)
        if slab is None or slab in self.host_slabs:
            return None
        return slab.run(blocks, offset, numel)

    def rise(self, *, on_nvme: Set[BlockId], on_host: Set[BlockId]) -> None:
        """Leave only these blocks on disk and in host memory, and bring the others up.

        Between steps. On an error of the disk every block is where it was.
        """
        self._settle()
        disk = () if self.nvme is None else self.nvme.blocks
        from_disk = [block for block in disk if block.id not in on_nvme]
        from_host = [block for block in self.host if block.id not in on_host]
        rising = (*from_host, *from_disk)
        new_device = self._slabs([block for block in rising if block.id not in on_host])
        new_host = self._slabs([block for block in from_disk if block.id in on_host], host=True)
        place = {block.id: slab for slab in (*new_device, *new_host) for block in slab.blocks}

        def take(block: Block, planes: Planes) -> None:
            for name, plane in place[block.id].planes(block).items():
                plane.copy_(planes[name])

        self.visit(take, rising)
        if self.nvme is not None and from_disk:
            if len(from_disk) < len(disk):
                self.nvme.forget(from_disk)
            else:
                self._written_before += self.nvme.store.traffic.written_bytes
                self.nvme.close()
                self.nvme = None
        for slab in self.host_slabs if from_host else ():
            slab.keep(on_host)
        self.device_slabs += new_device
        self.host_slabs = [slab for slab in self.host_slabs if slab.blocks] + new_host
        self._slab_of = self._index()
        if self.nvme is not None:
            self.nvme.prefetch()

    def extend(
        self,
        space: StateSpace,
        fill: Callable[[Block, Planes], None],
        *,
        on_nvme: Set[BlockId],
        on_host: Set[BlockId],
    ) -> None:
        """Take the blocks that `space` has behind those of today; `fill` as in `initialise`.

        Between steps. On disk the blocks of today go into a file with the new ones, beside which
        theirs stays until it is complete; on an error nothing has changed.
        """
        new = space.blocks[len(self.space.blocks) :]
        memory = [block for block in new if block.id not in on_nvme]
        device = self._slabs([block for block in memory if block.id not in on_host])
        host = self._slabs([block for block in memory if block.id in on_host], host=True)
        to_disk = [block for block in new if block.id in on_nvme]
        if to_disk:
            self._extend_disk(space, to_disk, fill)
        self.space = space
        self.device_slabs += device
        self.host_slabs += host
        self._slab_of = self._index()
        for block in memory:
            fill(block, self.planes(block))

    def _extend_disk(
        self, space: StateSpace, new: Sequence[Block], fill: Callable[[Block, Planes], None]
    ) -> None:
        before = self.nvme
        known = () if before is None else before.blocks
        after = self._on_disk([*known, *new], space)

        def take(block: Block, planes: Planes) -> None:
            if before is None or block in new:
                fill(block, planes)
                return

            def copy(_: Block, old: Planes) -> None:
                for name, plane in planes.items():
                    plane.copy_(old[name])

            before.load([block], copy)

        try:
            if before is not None:
                before.empty_staging()
            after.initialise(take)
        except BaseException:
            after.close()
            raise
        if before is not None:
            self._written_before += before.store.traffic.written_bytes
            before.close()
        self.nvme = after
        after.prefetch()

    def initialise(self, fill: Callable[[Block, Planes], None]) -> None:
        """`fill` sets what does not start at zero (the masters, the first plane) by block."""
        for block in (*self.resident, *self.host):
            fill(block, self.planes(block))
        for slab in (*self.device_slabs, *self.host_slabs):
            slab.complete()
        if self.nvme is not None:
            self.nvme.initialise(fill)
            self.nvme.prefetch()

    def visit(
        self, look: Callable[[Block, Planes], None], blocks: Sequence[Block] | None = None
    ) -> None:
        """Show the state of blocks (None: all); what comes from disk must be copied to be kept."""
        resident, on_disk = self._split(blocks)
        for block in resident:
            look(block, self.planes(block))
        if self.nvme is not None and on_disk:
            self.nvme.load(on_disk, look)
            self.nvme.prefetch()

    @property
    def visit_order(self) -> tuple[Block, ...]:
        """All blocks, as `visit` shows them."""
        resident, on_disk = self._split(None)
        return (*resident, *on_disk)

    def pin(self) -> PinnedState | None:
        """Keep the blocks on disk as they are now until they were shown; None where none is."""
        return self.nvme.pin() if self.nvme is not None else None

    def overwrite(
        self, fill: Callable[[Block, Planes], None], blocks: Sequence[Block] | None = None
    ) -> None:
        """Change the state of blocks (None: all) in place; on disk it is committed at once."""
        resident, on_disk = self._split(blocks)
        for block in resident:
            fill(block, self.planes(block))
        if self.nvme is not None and on_disk:
            self.nvme.replace(fill, self.nvme.store.committed_step, on_disk)
            self.nvme.prefetch()

    def _split(self, blocks: Sequence[Block] | None) -> tuple[list[Block], list[Block]]:
        """Those in memory, and those on disk."""
        if blocks is None:
            blocks = self.space.blocks
        resident = [block for block in blocks if block.id in self._slab_of]
        return resident, [block for block in blocks if block.id not in self._slab_of]

    def confirm(self, step: int) -> None:
        """What was updated on disk counts; then read ahead for the next step."""
        if self.nvme is not None:
            self.nvme.commit(step)
            self.nvme.prefetch()

    def update_in_memory(self, updater: Updater, views: BlockViews) -> None:
        """Update what is not on disk, which cannot fail."""
        views.expect([*self.host, *views.borrowed(self.resident)])
        for slab in self.host_slabs:
            blocks = [(block, slab.planes(block)) for block in slab.blocks]
            self._leaving = [*self._leaving, *updater.update_host(blocks, views)]
        for slab in self.device_slabs:
            updater.update_resident(slab, views)
        views.end()

    def rollback(self, views: BlockViews) -> None:
        """Put parameters and state back to the last committed step."""
        if self.nvme is not None:
            self.nvme.rollback(views.restore)

    def movable(self) -> Sequence[Tensor]:
        """State in memory. Staging buffers are emptied, and read again by the next step."""
        self._settle()
        if self.nvme is not None:
            self.nvme.empty_staging()
        slabs = (*self.device_slabs, *self.host_slabs)
        return [tensor for slab in slabs for tensor in slab.tensors.values()]

    def traffic(self) -> Traffic:
        """Bytes moved since this state was made."""
        if self.nvme is None:
            return Traffic()
        moved = self.nvme.store.traffic
        return Traffic(nvme_read=moved.read_bytes, nvme_write=moved.written_bytes)

    @property
    def nvme_written_total(self) -> int:
        """Bytes written to disk since this state was made: what wears it."""
        now = self.nvme.store.traffic.written_bytes if self.nvme is not None else 0
        return self._written_before + now

    @property
    def stalled_seconds(self) -> float:
        return self.nvme.stalled_seconds if self.nvme is not None else 0.0

    @property
    def nvme_bytes(self) -> int:
        """Bytes allocated on disk."""
        return self.nvme.store.file_bytes if self.nvme is not None else 0

    def close(self) -> None:
        if self.nvme is not None:
            self.nvme.close()
