"""State blocks in memory: one tensor a plane, the blocks one after the other."""

from __future__ import annotations

from collections.abc import Sequence, Set

from torch import Tensor

from gemini.dtypes import DTYPES
from gemini.optim.rules.state_layout import Plane, StateLayout
from gemini.units import BlockId

from .memory import Memory
from .pieces import Planes, plane_part
from .space import Block


class Slab:
    """Slab of `blocks` in memory of the device, or of the host; zeros at first.

    layout: as it is kept. Planes but the first take no memory before `complete`.
    """

    def __init__(
        self,
        blocks: Sequence[Block],
        layout: StateLayout,
        memory: Memory,
        *,
        on_host: bool = False,
    ) -> None:
        self._memory = memory
        self._on_host = on_host
        self._place(blocks)
        first, *self._missing = layout.planes
        self._planes = {plane.name: plane for plane in layout.planes}
        self._groups = [plane.group for plane in layout.planes]
        # [sum of the blocks' numels]; one that groups share has one for a group
        self.tensors: Planes = {first.name: self._allocate(first)}

    def complete(self) -> Slab:
        """Make all planes. Returns the slab."""
        for plane in self._missing:
            self.tensors[plane.name] = self._allocate(plane)
        self._missing.clear()
        return self

    def _place(self, blocks: Sequence[Block]) -> None:
        self.blocks: Sequence[Block] = tuple(blocks)
        self._start: dict[BlockId, int] = {}
        self._numel = 0
        for block in blocks:
            self._start[block.id] = self._numel
            self._numel += block.numel

    def _allocate(self, plane: Plane) -> Tensor:
        numel = plane.numel(self._numel)
        return self._memory.zeros(numel, DTYPES[plane.dtype], on_host=self._on_host)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def planes(self, block: Block) -> Planes:
        """Views of a block's state."""
        start = self._start[block.id]  # no call of ours for a plane: it is asked for every block
        return {
            name: tensor[start // group : (start + block.numel) // group]
            for (name, tensor), group in zip(self.tensors.items(), self._groups, strict=False)
        }

    def run(self, blocks: Sequence[Block], offset: int, numel: int) -> Planes | None:
        """Views of elements [offset, offset + numel) of the space, which `blocks` hold; None where
        they are not all in this slab, one after the other."""
        for block in blocks:
            distance = block.offset - blocks[0].offset
            if self._start.get(block.id) != self._start.get(blocks[0].id, -1) + distance:
                return None
        start = self._start[blocks[0].id] + offset - blocks[0].offset
        return {name: t[start : start + numel] for name, t in self.tensors.items()}

    def keep(self, blocks: Set[BlockId]) -> None:
        """Give the memory of all other blocks back. At most one plane has two copies at a time."""
        before, numel_before = self._start, self._numel
        self._place([block for block in self.blocks if block.id in blocks])
        # plane by plane, so that both copies of all planes never live at once
        for name, old in self.tensors.items():
            new = self._allocate(self._planes[name])
            for block in self.blocks:
                start, then, numel = self._start[block.id], before[block.id], block.numel
                plane_part(new, start, start + numel, self._numel).copy_(
                    plane_part(old, then, then + numel, numel_before)
                )
            self.tensors[name] = new
