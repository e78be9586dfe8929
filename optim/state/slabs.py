"""State blocks in memory: one tensor a plane, the blocks one after the other."""

from __future__ import annotations

from collections import defaultdict
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
    room: as many blocks, the largest first, may have a second version at once: see `begin`.
    """

    def __init__(
        self,
        blocks: Sequence[Block],
        layout: StateLayout,
        memory: Memory,
        *,
        on_host: bool = False,
        room: int = 0,
    ) -> None:
        self._memory = memory
        self.is_on_host = on_host
        self._room = room
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
        self._numel_at: dict[int, int] = {}  # elements that there is place for, by where it starts
        self._begun: dict[BlockId, int] = {}  # where second versions start
        self._free: dict[int, list[int]] = defaultdict(list)  # the other places, by their elements
        self._numel = 0
        for block in blocks:
            self._start[block.id] = self._new_place(block.numel)
        for numel in sorted([block.numel for block in blocks], reverse=True)[: self._room]:
            self._free[numel].append(self._new_place(numel))

    def _new_place(self, numel: int) -> int:
        start, self._numel = self._numel, self._numel + numel
        self._numel_at[start] = numel
        return start

    def _allocate(self, plane: Plane) -> Tensor:
        numel = plane.numel(self._numel)
        return self._memory.zeros(numel, DTYPES[plane.dtype], on_host=self.is_on_host)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def planes(self, block: Block) -> Planes:
        """Views of a block's state."""
        return self._planes_at(self._start[block.id], block)

    def begin(self, block: Block) -> Planes | None:
        """Views of memory for a second version of a block, uninitialised; None: there is no room.

        It counts from `take_over`. Until then `planes` are the version that counts, and `drop` ends
        the second one; whoever has begun copies to it orders these first.
        """
        self.drop(block)
        fits = [numel for numel, places in self._free.items() if numel >= block.numel and places]
        if not fits:
            return None
        start = self._begun[block.id] = self._free[min(fits)].pop()
        return self._planes_at(start, block)

    def has_begun(self, block: Block) -> bool:
        """Whether a block has a second version, which nothing has dropped."""
        return block.id in self._begun

    def drop(self, block: Block) -> None:
        """Drop the second version of a block, if it has one: the first has changed, or is used."""
        if block.id in self._begun:
            self._give(self._begun.pop(block.id))

    def take_over(self, block: Block) -> None:
        """Let the second version of a block be the one that counts."""
        self._give(self._start[block.id])
        self._start[block.id] = self._begun.pop(block.id)

    def _give(self, start: int) -> None:
        self._free[self._numel_at[start]].append(start)

    def _planes_at(self, start: int, block: Block) -> Planes:
        # no call of ours for a plane: it is asked for every block
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
        """Give the memory of all other blocks back, and the room of second versions, which are
        dropped. At most one plane has two copies at a time."""
        self._room = 0
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
