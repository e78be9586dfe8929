"""State of one state space: blocks in slabs (one tensor a plane) on the device or in host memory,
the rest on NVMe. Blocks may move between these, between steps.

A step writes new versions of blocks on disk; then they count and what is in memory is updated,
which cannot be undone. See `optim.step.driver`.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence, Set
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gemini.optim.rules.config import NvmeConfig
from gemini.optim.rules.report import Traffic
from gemini.optim.rules.state_layout import ALL_COLUMNS, MASTER, Columns, StateLayout
from gemini.ranges import named
from gemini.tickets import CopyTicket
from gemini.units import BlockId

from .deferred_signals import DeferredSignals
from .memory import Memory
from .pieces import BlockViews, Planes, Updater
from .slabs import Slab
from .space import Block, StateSpace

if TYPE_CHECKING:
    from gemini.nvme import BlockStore

    from .disk.pinned_state import PinnedState
    from .nvme_state import NvmeState


class SplitMasters:
    """Blocks whose masters are remainders of their bf16 parameters, and these parameters."""

    def on_disk(self, block: Block) -> bool:
        """Whether masters of a block are split where its state is on disk."""
        return False

    def in_memory(self, block: Block) -> bool:
        """Whether masters of a block are split where its state is in memory, of device or host."""
        return False

    def weights(self, block: Block) -> Tensor:
        """[n]: parameters of a block that is split in memory, wherever they are; to read."""
        raise AssertionError("no masters are split")


class TieredState:
    """State of `space`: blocks `on_nvme` and `on_host`, the rest on the device of `memory`.

    layout: the logical one, with whole masters.
    """

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
        num_ahead: int = 0,
        num_waiting: int = 0,
        split: SplitMasters | None = None,
        columns: Columns = ALL_COLUMNS,
        room: int = 0,
    ) -> None:
        """num_ahead, num_waiting: see `NvmeState`. split: None where all masters are whole.
        columns: which planes a block has. room: of all slabs in host memory; see `Slab`."""
        self.space = space
        self.layout = layout
        self._memory = memory
        self._leaving: list[CopyTicket] = []  # of the last step, to host slabs
        # what has ended a step in the middle of memory, which has blocks of two steps since then
        self.torn: BaseException | None = None
        disk_blocks = [block for block in space.blocks if block.id in on_nvme]
        self.columns = columns
        self._config, self._label = nvme, label
        self._num_ahead, self._num_waiting = num_ahead, num_waiting
        self._split_masters = split or SplitMasters()
        self._layouts: dict[BlockId, StateLayout] = {}
        self.nvme = self._on_disk(disk_blocks, space) if disk_blocks else None
        self._written_before = 0  # to files that are gone
        in_memory = [block for block in space.blocks if block.id not in on_nvme]
        self.device_slabs = self._first_planes([b for b in in_memory if b.id not in on_host])
        self.host_slabs = self._first_planes(
            [b for b in in_memory if b.id in on_host], host=True, room=room
        )
        self._slab_of = self._index()

    def _on_disk(self, blocks: Sequence[Block], space: StateSpace) -> NvmeState:
        from .nvme_state import NvmeState

        return NvmeState(
            space,
            blocks,
            self.layout,
            self._config,
            undo=not self.layout.has_master,
            split=frozenset(b.id for b in space.blocks if self._split_masters.on_disk(b)),
            label=self._label,
            pin=self._memory.pin,
            num_ahead=self._num_ahead,
            num_waiting=self._num_waiting,
            columns=self.columns,
        )

    def layout_of(self, block: Block) -> StateLayout:
        """Layout of the logical planes of a block."""
        layout = self._layouts.get(block.id)
        if layout is None:
            params = {part.param for part in block.segments}
            layout = self._layouts[block.id] = self.columns.of(params, self.layout)
        return layout

    def _slabs(self, blocks: Sequence[Block], *, host: bool = False) -> list[Slab]:
        return [slab.complete() for slab in self._first_planes(blocks, host=host)]

    def _first_planes(
        self, blocks: Sequence[Block], *, host: bool = False, room: int = 0
    ) -> list[Slab]:
        """Slabs with their first planes, for `initialise`: sources of masters are freed one by
        one."""
        alike: dict[tuple[StateLayout, bool], list[Block]] = {}
        found = []
        for block in blocks:
            is_split = self._split_masters.in_memory(block)
            alike.setdefault((self.layout_of(block), is_split), []).append(block)
        for (layout, is_split), together in sorted(alike.items(), key=lambda item: item[0][1]):
            stored = (layout.with_remainder() if is_split else layout).stored()
            own_room = min(room, len(together))
            found.append(Slab(together, stored, self._memory, on_host=host, room=own_room))
            room -= own_room
        return found

    def _index(self) -> dict[BlockId, Slab]:
        slabs = (*self.device_slabs, *self.host_slabs)
        return {block.id: slab for slab in slabs for block in slab.blocks}

    def host_slab(self, block: Block) -> Slab | None:
        """Slab in host memory that has a block; None: it is elsewhere."""
        slab = self._slab_of.get(block.id)
        return slab if slab is not None and slab.is_on_host else None

    @property
    def resident(self) -> tuple[Block, ...]:
        """Blocks on the device."""
        return tuple(block for slab in self.device_slabs for block in slab.blocks)

    @property
    def host(self) -> tuple[Block, ...]:
        """Blocks in host memory, where that is not the device's."""
        return tuple(block for slab in self.host_slabs for block in slab.blocks)

    @property
    def in_memory(self) -> tuple[Block, ...]:
        """Blocks that are not on disk."""
        return (*self.resident, *self.host)

    def blocks_in_memory(self) -> list[tuple[Block, Planes, bool]]:
        """Blocks in memory, their state as an update takes it, and whether that is the host's."""
        here = [(block, self.planes(block), False) for block in self.resident]
        return here + [(block, self.planes(block), True) for block in self.host]

    def planes(self, block: Block) -> Planes:
        """Views of the state of a block that is in memory, as an update takes them."""
        self.settle()
        return self._slab_of[block.id].planes(block)

    def logical_planes(self, block: Block) -> Planes:
        """State of a block that is in memory, as `layout` says; to read."""
        from gemini.optim.rules.stored import logical_planes

        masters = self._split_masters
        weight = masters.weights(block) if masters.in_memory(block) else None
        return logical_planes(self.planes(block), self.layout_of(block), weight)

    def _change(self, block: Block, fill: Callable[[Block, Planes], None]) -> None:
        """Let `fill` write to the logical planes of a block in memory."""
        self._slab_of[block.id].drop(block)
        values = self.logical_planes(block)
        fill(block, values)
        self._store(block, self.planes(block), values)

    def _store(self, block: Block, planes: Planes, values: Planes) -> None:
        """Write `values`, logical planes, to the planes of a block in memory."""
        from gemini.optim.rules.stored import store_planes

        is_split = self._split_masters.in_memory(block)
        store_planes(planes, values, self.layout_of(block), is_split=is_split)

    def resident_run(self, offset: int, numel: int) -> Planes | None:
        """Views of elements [offset, offset + numel) of the space, or None where they are not
        together on the device, or stored otherwise."""
        if self.layout.is_quantised:
            return None
        first = bisect_right(self.space.blocks, offset, key=lambda block: block.offset) - 1
        last = bisect_left(self.space.blocks, offset + numel, key=lambda block: block.offset)
        blocks = self.space.blocks[first:last]
        slab = self._slab_of.get(blocks[0].id)
        if slab is None or slab in self.host_slabs:
            return None
        return slab.run(blocks, offset, numel)

    def promote(self, *, on_nvme: Set[BlockId], on_host: Set[BlockId]) -> None:
        """Leave only these blocks on disk and in host memory, and bring the others up.

        Between steps. On an error of the disk every block is where it was.
        """
        self.settle()
        disk = () if self.nvme is None else self.nvme.blocks
        from_disk = [block for block in disk if block.id not in on_nvme]
        from_host = [block for block in self.host if block.id not in on_host]
        promoted = (*from_host, *from_disk)
        new_device = self._slabs([block for block in promoted if block.id not in on_host])
        new_host = self._slabs([block for block in from_disk if block.id in on_host], host=True)
        place = {block.id: slab for slab in (*new_device, *new_host) for block in slab.blocks}

        # Everything is copied before anything is given back: a disk that fails leaves each block
        # where it was.
        self.visit(lambda b, values: self._store(b, place[b.id].planes(b), values), promoted)
        if self.nvme is not None and from_disk:
            if len(from_disk) < len(disk):
                self.nvme.forget(from_disk)
            else:
                self._written_before += self.nvme.written_bytes
                self.nvme.close()
                self.nvme = None
        for slab in self.host_slabs if from_host else ():
            slab.keep(on_host)
        self.device_slabs += new_device
        self.host_slabs = [slab for slab in self.host_slabs if slab.blocks] + new_host
        self._slab_of = self._index()
        if self.nvme is not None:
            self.nvme.prefetch()

    def demote(self, *, on_nvme: Set[BlockId], on_host: Set[BlockId]) -> None:
        """Leave on the device only what is in neither, and in host memory what is not on disk.

        Between steps; the inverse of `promote`. On an error of the disk nothing has changed.
        """
        self.settle()
        to_disk = [block for block in self.in_memory if block.id in on_nvme]
        to_host = [block for block in self.resident if block.id in on_host]
        if to_disk:
            self._bring_to_disk(self.space, to_disk, self._copy_of_memory)
        for slab in self._slabs(to_host, host=True):
            for block in slab.blocks:
                for name, plane in slab.planes(block).items():
                    plane.copy_(self.planes(block)[name])
            self.host_slabs.append(slab)
        stays = {b.id for b in self.resident} - {b.id for b in (*to_disk, *to_host)}
        left = {b.id for b in self.host} - {b.id for b in to_disk}
        for slabs, kept in ((self.device_slabs, stays), (self.host_slabs, left)):
            for slab in slabs:
                if any(block.id not in kept for block in slab.blocks):
                    slab.keep(kept)
        self.device_slabs = [slab for slab in self.device_slabs if slab.blocks]
        self.host_slabs = [slab for slab in self.host_slabs if slab.blocks]
        self._slab_of = self._index()

    def _copy_of_memory(self, block: Block, planes: Planes) -> None:
        for name, value in self.logical_planes(block).items():
            planes[name].copy_(value)

    def extend(
        self,
        space: StateSpace,
        fill: Callable[[Block, Planes], None],
        *,
        on_nvme: Set[BlockId],
        on_host: Set[BlockId],
    ) -> None:
        """Take the blocks that `space` has after those of today; `fill` as in `initialise`.

        Between steps. On disk the blocks of today go into a new file with the new ones, and their
        own file stays until that is complete; on an error nothing has changed.
        """
        new = space.blocks[len(self.space.blocks) :]
        memory = [block for block in new if block.id not in on_nvme]
        device = self._slabs([block for block in memory if block.id not in on_host])
        host = self._slabs([block for block in memory if block.id in on_host], host=True)
        to_disk = [block for block in new if block.id in on_nvme]
        if to_disk:
            self._bring_to_disk(space, to_disk, fill)
        self.space = space
        self.device_slabs += device
        self.host_slabs += host
        self._slab_of = self._index()
        for block in memory:
            self._change(block, fill)

    def _bring_to_disk(
        self, space: StateSpace, new: Sequence[Block], fill: Callable[[Block, Planes], None]
    ) -> None:
        """Write blocks that are new on disk, of which `space` has those of today."""
        before = self.nvme
        if before is not None and before.has_place_for(new):
            before.take_in(new, fill)
            before.prefetch()
            return
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

        # Two pools of staging would pass the host's budget: the old one is emptied, and takes one
        # block at a time from here on.
        try:
            if before is not None:
                before.empty_staging()
            after.initialise(take)
        except BaseException:
            after.close()
            raise
        if before is not None:
            self._written_before += before.written_bytes
            before.close()
        self.nvme = after
        after.prefetch()

    def initialise(self, fill: Callable[[Block, Planes], None]) -> None:
        """Initialise: `fill` sets what does not start at zero (the masters, the first plane) by
        block."""
        # Sources of masters are freed while they are read, so the first planes are filled before
        # the others take memory. Ties wait in `ties`, as their plane is one of the others.
        ties = {block: self._begin(block, fill) for block in (*self.resident, *self.host)}
        for slab in (*self.device_slabs, *self.host_slabs):
            slab.complete()
        for block, places in ties.items():
            if places is not None:
                self.planes(block)[self.layout.tie_keeper][places] = -0.0
        if self.nvme is not None:
            self.nvme.initialise(fill)
            self.nvme.prefetch()

    def _begin(self, block: Block, fill: Callable[[Block, Planes], None]) -> Tensor | None:
        """Fill the first plane, before there are others. Returns the places of ties, where it is
        split."""
        (first,) = self.planes(block).values()
        is_split, has_ties = self._split_masters.in_memory(block), not self.layout.is_quantised
        if not is_split and (has_ties or not self.layout.has_master):
            fill(block, self.planes(block))
            return None
        from gemini.optim.rules.split_master import remainder_of, tie_sign, untied

        master = first
        if is_split:
            master = torch.zeros(block.numel, dtype=torch.float32, device=first.device)
        fill(block, {MASTER: master})
        if not has_ties:
            master.copy_(untied(master))
        if is_split:
            first.copy_(remainder_of(master))
        return tie_sign(master).nonzero().flatten() if is_split and has_ties else None

    def visit(
        self, look: Callable[[Block, Planes], None], blocks: Sequence[Block] | None = None
    ) -> None:
        """Show the state of blocks (None: all); what comes from disk must be copied to be kept."""
        resident, on_disk = self._split(blocks)
        for block in resident:
            look(block, self.logical_planes(block))
        if self.nvme is not None and on_disk:
            self.nvme.load(on_disk, look)
            with DeferredSignals():
                self.nvme.prefetch()

    @property
    def visit_order(self) -> tuple[Block, ...]:
        """All blocks in the order of `visit`."""
        resident, on_disk = self._split(None)
        return (*resident, *on_disk)

    def pin(self) -> PinnedState | None:
        """Pin the blocks on disk as they are now until they were shown; None where none is on
        disk."""
        return self.nvme.pin() if self.nvme is not None else None

    def overwrite(
        self,
        fill: Callable[[Block, Planes], None],
        blocks: Sequence[Block] | None = None,
        *,
        whole: bool = False,
    ) -> None:
        """Change the state of blocks (None: all) in place; on disk it is committed at once.

        whole: `fill` sets every element, so blocks on disk are not read, and it gets any values.
        """
        resident, on_disk = self._split(blocks)
        for block in resident:
            self._change(block, fill)
        if self.nvme is not None and on_disk:
            self.nvme.replace(fill, self.nvme.store.committed_step, on_disk, whole=whole)
            with DeferredSignals():
                self.nvme.prefetch()

    def _split(self, blocks: Sequence[Block] | None) -> tuple[list[Block], list[Block]]:
        """Blocks in memory, and blocks on disk."""
        if blocks is None:
            blocks = self.space.blocks
        resident = [block for block in blocks if block.id in self._slab_of]
        return resident, [block for block in blocks if block.id not in self._slab_of]

    def update_in_memory(self, updater: Updater, views: BlockViews) -> Iterator[Block]:
        """Update blocks in the order of `in_memory`, each when it is asked for; see `torn_by`."""
        return self.torn_by(self._update_in_memory(updater, views))

    def torn_by(self, updates: Iterator[Block]) -> Iterator[Block]:
        """Carry out any updates in memory. An error that ends them is `torn`."""
        # Ctrl-C too: blocks of two steps are in memory from here on, and only a load mends that
        try:
            yield from updates
        except BaseException as error:
            self.torn = error
            raise

    def _update_in_memory(self, updater: Updater, views: BlockViews) -> Iterator[Block]:
        for slab in self.device_slabs:
            with named("update", "resident blocks from", slab.blocks[0].id):
                updater.update_resident(slab, views)
            yield from slab.blocks
        for slab in self.host_slabs:
            for block in slab.blocks:
                copies = None
                if views.touches(block):
                    copies = updater.update_block(block, slab.planes(block), views)
                self.put(copies)
                yield block

    def put(self, copies: CopyTicket | None) -> None:
        """Note the copies that bring a block in memory back, which is updated."""
        if copies is not None:
            self._leaving = [ticket for ticket in self._leaving if not ticket.ready()]
            self._leaving.append(copies)

    def settle(self) -> None:
        """Wait for copies of the last step before the host reads or writes host slabs."""
        leaving, self._leaving = self._leaving, []
        for ticket in reversed(leaving):  # they end in order: one wait is for all before it, too
            if not ticket.ready():
                ticket.settle()

    def movable(self) -> Sequence[Tensor]:
        """State in memory. Staging buffers are emptied, and read again by the next step."""
        self.settle()
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
        now = self.nvme.written_bytes if self.nvme is not None else 0
        return self._written_before + now

    @property
    def committed_step(self) -> int:
        """Step of the last commit of blocks on disk; 0 where there are none."""
        return 0 if self.nvme is None else self.nvme.store.committed_step

    @property
    def stalled_seconds(self) -> float:
        return self.nvme.stalled_seconds if self.nvme is not None else 0.0

    @property
    def stores(self) -> tuple[BlockStore, ...]:
        return () if self.nvme is None else (self.nvme.store,)

    @property
    def nvme_bytes(self) -> int:
        """Bytes allocated on disk."""
        return sum(store.file_bytes for store in self.stores)

    def close(self) -> None:
        if self.nvme is not None:
            self.nvme.close()
