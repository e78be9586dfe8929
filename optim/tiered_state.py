"""The state of one state space: some blocks in slabs (one tensor a plane), the rest on NVMe.

A step is `prepare` (blocks on disk are updated beside their last version), then either `commit`
(they count, and resident blocks are updated, which cannot fail) or `rollback`. So with several
ranks nothing resident changes before all ranks know that every disk did its part.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from gemini.units import BlockId

from .config import NvmeConfig
from .cpu_path import Piece
from .nvme_state import DTYPES, NvmeState
from .report import Traffic
from .space import Block, StateSpace, blocks_on_nvme
from .state_layout import StateLayout
from .updaters import Planes, Updater


class BlockViews(Protocol):
    """What a step needs to know of the parameters and gradients that a block's state belongs to."""

    def pieces(self, block: Block, planes: Planes) -> Sequence[Piece]:
        """The runs of this block that have a gradient; empty where none has."""
        ...

    def save(self, block: Block, undo: Tensor) -> None:
        """Copy the block's parameters into fp32 [n] `undo`."""
        ...

    def restore(self, block: Block, planes: Planes) -> None:
        """Set the block's parameters from its master, or from `param_undo`."""
        ...


class TieredState:
    """State of `space`: `nvme_fraction` of its bytes on disk, the rest on `device`."""

    def __init__(
        self,
        space: StateSpace,
        layout: StateLayout,
        *,
        nvme_fraction: float,
        nvme: NvmeConfig,
        device: torch.device,
        label: str = "",
        pin: Callable[[int, int], None] | None = None,
    ) -> None:
        self.space = space
        self.layout = layout
        on_disk = blocks_on_nvme(space.blocks, nvme_fraction)
        self.resident = tuple(block for block in space.blocks if block.id not in on_disk)
        disk_blocks = [block for block in space.blocks if block.id in on_disk]
        self.nvme = (
            NvmeState(
                disk_blocks,
                layout,
                nvme,
                digest=space.digest(),
                undo=not layout.has_master,
                label=label,
                pin=pin,
            )
            if disk_blocks
            else None
        )
        self._slab_offset: dict[BlockId, int] = {}
        end = 0
        for block in self.resident:
            self._slab_offset[block.id] = end
            end += block.numel
        self.slabs: Planes = {
            plane.name: torch.zeros(end, dtype=DTYPES[plane.dtype], device=device)
            for plane in layout.planes
        }

    def planes(self, block: Block) -> Planes:
        """Views of a resident block's state."""
        start = self._slab_offset[block.id]
        return {name: slab[start : start + block.numel] for name, slab in self.slabs.items()}

    def resident_run(self, offset: int, numel: int) -> Planes | None:
        """Views of elements [offset, offset + numel) of the space, or None if any is on disk."""
        first = bisect_right(self.space.blocks, offset, key=lambda block: block.offset) - 1
        last = bisect_left(self.space.blocks, offset + numel, key=lambda block: block.offset)
        blocks = self.space.blocks[first:last]
        if not all(block.id in self._slab_offset for block in blocks):
            return None
        start = self._slab_offset[blocks[0].id] + offset - blocks[0].offset
        return {name: slab[start : start + numel] for name, slab in self.slabs.items()}

    def initialise(self, fill: Callable[[Block, Planes], None]) -> None:
        """`fill` sets what does not start at zero (the masters), block by block."""
        for block in self.resident:
            fill(block, self.planes(block))
        if self.nvme is not None:
            self.nvme.initialise(fill)
            self.nvme.prefetch()

    def visit(self, look: Callable[[Block, Planes], None]) -> None:
        """Show every block's state; what comes from disk must be copied to be kept."""
        for block in self.resident:
            look(block, self.planes(block))
        if self.nvme is not None:
            self.nvme.load(self.nvme.blocks, look)
            self.nvme.prefetch()

    def overwrite(self, fill: Callable[[Block, Planes], None]) -> None:
        """Change every block's state in place; what lies on disk is committed at once."""
        for block in self.resident:
            fill(block, self.planes(block))
        if self.nvme is not None:
            self.nvme.replace(fill, self.nvme.store.committed_step)
            self.nvme.prefetch()

    def prepare(self, updater: Updater, views: BlockViews, stop: Callable[[], bool]) -> None:
        """Update the blocks on disk beside their last version. On an error call `rollback`."""
        if self.nvme is not None:
            self.nvme.run(
                lambda block, planes: updater.update_staged(block, planes, views.pieces),
                None if self.layout.has_master else views.save,
                stop,
            )

    def commit(self, updater: Updater, views: BlockViews, step: int) -> None:
        """Make `prepare` count and update what is resident; then read ahead for the next step."""
        if self.nvme is not None:
            self.nvme.commit(step)
            self.nvme.prefetch()
        resident = ((block, self.planes(block)) for block in self.resident)
        updater.update_resident(resident, self.slabs, views.pieces)

    def rollback(self, views: BlockViews) -> None:
        """Put parameters and state back to the last committed step."""
        if self.nvme is not None:
            self.nvme.rollback(views.restore)

    def traffic(self) -> Traffic:
        """Bytes moved since this state was made."""
        if self.nvme is None:
            return Traffic()
        moved = self.nvme.store.traffic
        return Traffic(nvme_read=moved.read_bytes, nvme_write=moved.written_bytes)

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
