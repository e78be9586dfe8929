"""Forms of a block of state on disk: its parts, in its file and in a staging buffer.

Its planes are one block of the file. Another may be written with it, seldom read, and with a
checksum of its own:

    weight   of a block whose masters are split (`optim.rules.split_master`): bf16 parameters of
             that version, with which all but updates join its masters, and which undo a step
    undo     where there is no master: parameters that a step updates in place, as they were before
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass

import torch
from torch import Tensor

from gemini.dtypes import DTYPES
from gemini.nvme import Buffer
from gemini.optim.rules.state_layout import (
    ALL_COLUMNS,
    WEIGHT,
    WEIGHT_DTYPE,
    Columns,
    StateLayout,
)
from gemini.optim.rules.stored import shown, take, zeros
from gemini.optim.state.pieces import Planes
from gemini.optim.state.space import Block
from gemini.units import PAGE_BYTES, BlockId, align_up


@dataclass(frozen=True, slots=True)
class BlockParts:
    """Parts of one block: blocks of the file, and whole pages of a buffer, one part after the
    other."""

    state: BlockId  # its planes
    state_nbytes: int
    undo_part: BlockId | None  # its undo plane, or the weights of split masters
    nbytes: int  # of both
    is_split: bool  # its masters are joined with its parameters


class BlockForms:
    """Forms of the blocks of one file: states first, then undo planes.

    layout: with whole masters. split: blocks whose masters are not. undo: there are no masters.
    columns: which planes a block has.
    nbytes: of every block of the file. In a buffer, the undo plane begins at the next whole page.
    """

    def __init__(
        self,
        blocks: Sequence[Block],
        layout: StateLayout,
        split: Set[BlockId],
        *,
        undo: bool,
        columns: Columns = ALL_COLUMNS,
    ) -> None:
        assert not (split and undo)
        self.has_undo = undo
        self._layout = layout
        self._shown = {
            b.id: columns.of({part.param for part in b.segments}, layout) for b in blocks
        }
        kept = dict.fromkeys(self._shown.values())
        self._stored = {
            (shown, is_split): (shown.with_remainder() if is_split else shown).stored()
            for shown in kept
            for is_split in (False, True)
        }
        self.nbytes: list[int] = []
        self._undo_dtype = DTYPES[layout.dtype if undo else WEIGHT_DTYPE]
        undo_nbytes: list[int] = []
        self.parts: dict[BlockId, BlockParts] = {}
        for i, block in enumerate(blocks):
            is_split = block.id in split
            planes = self._stored[self._shown[block.id], is_split]
            self.nbytes.append(planes.block_nbytes(block.numel))
            state_nbytes = nbytes = align_up(self.nbytes[i], PAGE_BYTES)
            undo_part = None
            if undo or is_split:
                undo_part = BlockId(len(blocks) + len(undo_nbytes))
                undo_nbytes.append(block.numel * self._undo_dtype.itemsize)
                nbytes += align_up(undo_nbytes[-1], PAGE_BYTES)
            self.parts[block.id] = BlockParts(BlockId(i), state_nbytes, undo_part, nbytes, is_split)
        self.nbytes += undo_nbytes

    @property
    def name(self) -> str:
        """Name of these forms, where they are not whole fp32 planes; for digests."""
        split = "-split" if any(parts.is_split for parts in self.parts.values()) else ""
        return split + f"-{self._layout.kind}" * self._layout.is_quantised

    def __contains__(self, block: Block) -> bool:
        return block.id in self.parts

    def is_split(self, block: Block) -> bool:
        """Whether its masters are joined with its parameters."""
        return self.parts[block.id].is_split

    def layout_of(self, block: Block) -> StateLayout:
        """Layout of the planes in its file."""
        return self._stored[self._shown[block.id], self.is_split(block)]

    def columns_of(self, blocks: Sequence[Block]) -> Columns:
        """Columns of these blocks, by position."""
        shown = [self._shown[block.id] for block in blocks]
        if all(layout is self._layout for layout in shown):
            return ALL_COLUMNS
        return Columns(tuple(frozenset(layout.names) for layout in shown))

    def state_id(self, block: Block) -> BlockId:
        """Block of the file with its planes."""
        return self.parts[block.id].state

    def undo_id(self, block: Block) -> BlockId:
        """Block of the file with its undo plane."""
        undo_part = self.parts[block.id].undo_part
        assert undo_part is not None
        return undo_part

    def ids(self, block: Block) -> list[BlockId]:
        """All blocks that the file has of it."""
        parts = self.parts[block.id]
        return [parts.state] if parts.undo_part is None else [parts.state, parts.undo_part]

    def in_file(self, blocks: Sequence[Block]) -> list[BlockId]:
        """All blocks that the file has of these."""
        return [part for block in blocks for part in self.ids(block)]

    def buffer_nbytes(self, blocks: Sequence[Block]) -> int:
        """Bytes of a buffer that any of these fits in."""
        return max((self.parts[block.id].nbytes for block in blocks), default=0)

    def committed_ids(self, block: Block) -> list[BlockId]:
        """Blocks of the file that make up one version of it."""
        return self.ids(block)[: 1 + self.is_split(block)]

    def state_view(self, buffer: Buffer, block: Block) -> memoryview:
        """Whole pages for its planes."""
        return buffer.view[: self.parts[block.id].state_nbytes]

    def undo_view(self, buffer: Buffer, block: Block) -> memoryview:
        """Whole pages for its undo plane."""
        parts = self.parts[block.id]
        return buffer.view[parts.state_nbytes : parts.nbytes]

    def undo_plane(self, buffer: Buffer, block: Block) -> Tensor:
        """[n], a view: its weight, or fp32 or float64 parameters before a step."""
        return torch.frombuffer(
            self.undo_view(buffer, block), dtype=self._undo_dtype, count=block.numel
        )

    def planes(self, buffer: Buffer, block: Block) -> Planes:
        """Planes of the block in a buffer, as views that an update takes."""
        layout = self.layout_of(block)
        return {
            plane.name: torch.frombuffer(
                buffer.view,
                dtype=DTYPES[plane.dtype],
                count=plane.numel(block.numel),
                offset=offset,
            )
            for plane, offset in zip(layout.planes, layout.offsets(block.numel), strict=True)
        }

    def shown(self, buffer: Buffer, block: Block) -> Planes:
        """Shown planes, with whole masters. To be read, as long as the buffer is: it does not hold
        the block any more."""
        weight = self.undo_plane(buffer, block) if self.is_split(block) else None
        return shown(self.planes(buffer, block), self._shown[block.id], weight, in_place=True)

    def change(
        self, buffer: Buffer, block: Block, fill: Callable[[Block, Planes], None], *, is_new: bool
    ) -> None:
        """Let `fill` write to the shown planes. is_new: the buffer holds nothing; they are zero."""
        planes = self.planes(buffer, block)
        if is_new:
            for plane in planes.values():
                plane.zero_()
            values = zeros(planes, self._shown[block.id], block.numel)
        else:
            values = self.shown(buffer, block)
        fill(block, values)
        if self.is_split(block):
            planes[WEIGHT] = self.undo_plane(buffer, block)
        take(planes, values, self._shown[block.id], is_split=self.is_split(block))
