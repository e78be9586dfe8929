"""The state of one state space: blocks in slabs (one tensor a plane) on the device or in host
memory, the rest on NVMe.

A step is `prepare` (blocks on disk are updated beside their last version), then either `commit`
(they count, and resident blocks are updated, which cannot fail) or `rollback`. So with several
ranks nothing resident changes before all ranks know that every disk did its part.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence, Set
from typing import Protocol

import torch
from torch import Tensor

from gemini.pages import zeros
from gemini.units import BlockId

from .config import NvmeConfig
from .cpu_path import Piece
from .nvme_state import DTYPES, NvmeState, PinnedState
from .pinning import pin_slab
from .report import Traffic
from .space import Block, StateSpace
from .state_layout import StateLayout
from .updaters import Planes, Updater


class BlockViews(Protocol):
    """What a step needs to know of the parameters and gradients that a block's state belongs to."""

    def pieces(self, block: Block, planes: Planes) -> Sequence[Piece]:
        """The runs of this block that have a gradient; empty where none has."""
        ...

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

    def updated(self, block: Block) -> None:
        """`pieces` of this block are not used any more."""
        ...


class TieredState:
    """State of `space`: blocks `on_nvme` and `on_host`, the rest on `device`."""

    def __init__(
        self,
        space: StateSpace,
        layout: StateLayout,
        *,
        on_nvme: Set[BlockId],
        on_host: Set[BlockId] = frozenset(),
        nvme: NvmeConfig,
        device: torch.device,
        label: str = "",
    ) -> None:
        self.space = space
        self.layout = layout
        self._on_host = on_host
        self.resident = tuple(
            block for block in space.blocks if block.id not in on_nvme and block.id not in on_host
        )
        self.host = tuple(block for block in space.blocks if block.id in on_host)
        disk_blocks = [block for block in space.blocks if block.id in on_nvme]
        self.nvme = (
            NvmeState(
                disk_blocks,
                layout,
                nvme,
                digest=space.digest(),
                undo=not layout.has_master,
                label=label,
                pin=pin_slab if device.type == "cuda" else None,
            )
            if disk_blocks
            else None
        )
        self._slab_offset: dict[BlockId, int] = {}
        self.slabs = self._slabs(self.resident, device)
        self.host_slabs = self._slabs(self.host, torch.device("cpu"))
        if device.type == "cuda":
            self.host_slabs = {name: slab.pin_memory() for name, slab in self.host_slabs.items()}

    def _slabs(self, blocks: Sequence[Block], device: torch.device) -> Planes:
        end = 0
        for block in blocks:
            self._slab_offset[block.id] = end
            end += block.numel
        return {
            plane.name: zeros(end, DTYPES[plane.dtype])
            if device.type == "cpu"
            else torch.zeros(end, dtype=DTYPES[plane.dtype], device=device)
            for plane in self.layout.planes
        }

    def planes(self, block: Block) -> Planes:
        """Views of the state of a block that is in memory."""
        start = self._slab_offset[block.id]
        slabs = self.host_slabs if block.id in self._on_host else self.slabs
        return {name: slab[start : start + block.numel] for name, slab in slabs.items()}

    def resident_run(self, offset: int, numel: int) -> Planes | None:
        """Views of elements [offset, offset + numel) of the space, or None if any is on disk."""
        first = bisect_right(self.space.blocks, offset, key=lambda block: block.offset) - 1
        last = bisect_left(self.space.blocks, offset + numel, key=lambda block: block.offset)
        blocks = self.space.blocks[first:last]
        if any(b.id not in self._slab_offset or b.id in self._on_host for b in blocks):
            return None
        start = self._slab_offset[blocks[0].id] + offset - blocks[0].offset
        return {name: slab[start : start + numel] for name, slab in self.slabs.items()}

    def initialise(self, fill: Callable[[Block, Planes], None]) -> None:
        """`fill` sets what does not start at zero (the masters), block by block."""
        for block in (*self.resident, *self.host):
            fill(block, self.planes(block))
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
        resident = [block for block in blocks if block.id in self._slab_offset]
        return resident, [block for block in blocks if block.id not in self._slab_offset]

    def prepare(self, updater: Updater, views: BlockViews, stop: Callable[[], bool]) -> None:
        """Update the blocks on disk beside their last version. On an error call `rollback`."""
        if self.nvme is None:
            return

        def update(block: Block, planes: Planes) -> bool:
            changed = updater.update_staged(block, planes, views.pieces)
            views.updated(block)
            return changed

        views.expect(self.nvme.order)
        self.nvme.run(update, views.save, stop)

    def commit(self, updater: Updater, views: BlockViews, step: int) -> None:
        """Make `prepare` count and update what is resident; then read ahead for the next step."""
        if self.nvme is not None:
            self.nvme.commit(step)
            self.nvme.prefetch()
        views.expect(self.host)
        for block in self.host:
            updater.update_staged(block, self.planes(block), views.pieces)
            views.updated(block)
        resident = ((block, self.planes(block)) for block in self.resident)
        updater.update_resident(resident, self.slabs, views.pieces)

    def rollback(self, views: BlockViews) -> None:
        """Put parameters and state back to the last committed step."""
        if self.nvme is not None:
            self.nvme.rollback(views.restore)

    def movable(self) -> Sequence[Tensor]:
        """State in memory. Staging buffers are emptied, and read again by the next step."""
        if self.nvme is not None:
            self.nvme.empty_staging()
        return [*self.slabs.values(), *self.host_slabs.values()]

    def traffic(self) -> Traffic:
        """Bytes moved since this state was made."""
        if self.nvme is None:
            return Traffic()
        moved = self.nvme.store.traffic
        return Traffic(nvme_read=moved.read_bytes, nvme_write=moved.written_bytes)

    @property
    def nvme_written_total(self) -> int:
        """Bytes written to disk since this state was made: what wears it."""
        return self.nvme.store.traffic.written_bytes if self.nvme is not None else 0

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
