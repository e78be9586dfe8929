"""Records of blocks of state in a store: their parts, in the file and in a staging buffer.

Its planes are one block of the file. Another may be written with it, seldom read, and with a
checksum of its own:

    weight   of a block whose masters are split (`optim.rules.split_master`): bf16 parameters of
             that version, with which all but updates join its masters, and which undo a step
    undo     where there is no master: parameters that a step updates in place, as they were before
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence, Set
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

from gemini.dtypes import DTYPES
from gemini.nvme import (
    BlockStore,
    Buffer,
    Index,
    StoreLayout,
    WriteMeter,
    check_folder,
    default_folder,
    measure_disks,
)
from gemini.optim.rules.config import NvmeConfig
from gemini.optim.rules.state_layout import (
    ALL_COLUMNS,
    WEIGHT,
    WEIGHT_DTYPE,
    Columns,
    StateLayout,
)
from gemini.optim.rules.stored import logical_planes, store_planes, unset
from gemini.optim.state.pieces import Planes
from gemini.optim.state.space import Block
from gemini.ranges import named
from gemini.tickets import Ticket, TicketGroup
from gemini.units import PAGE_BYTES, BlockId, align_up


def open_store(
    digest: str,
    nbytes: Sequence[int],
    config: NvmeConfig,
    label: str,
    blocks: Collection[BlockId] | None = None,
) -> BlockStore:
    """Open a new store with places for blocks of these bytes, where and as `config` says.

    blocks: those that are there. None: all.
    """
    folders = [check_folder(f, allow_ram=config.allow_ram) for f in config.folders]
    folders = folders or [default_folder()]
    disks = measure_disks(folders, config.engine, allow_ram=config.allow_ram)
    return BlockStore(
        disks.folders,
        StoreLayout.plan(digest, nbytes, disks.weights, config.num_versions),
        blocks=blocks,
        engine=disks.engine,
        checksums=config.checksums,
        allow_ram=config.allow_ram,
        label=label,
        meter=config.meter or WriteMeter(config.write_budget),
    )


# planes of a block before they are changed: as committed, zero, or anything, as all are set
Before = Literal["read", "zero", "unset"]


@dataclass(frozen=True, slots=True)
class FilePart:
    """Part of a record: a block of its file, and whole pages [start, stop) of its buffer."""

    block: BlockId
    start: int
    stop: int


@dataclass(slots=True, eq=False)
class Filed:
    """Record of one block.

    A step reads its planes, and writes all parts.
    """

    block: Block
    layout: StateLayout  # of the planes in the file
    logical_layout: StateLayout  # with whole masters
    state: FilePart
    undo: FilePart | None  # the weight of split masters, or the undo plane
    undo_dtype: torch.dtype
    is_split: bool  # its masters are joined with its parameters
    views: dict[tuple[int, int, StateLayout], Planes]  # of buffers, shared with blocks of this size
    store: BlockStore | None = None  # None: another reads its parts
    parts: tuple[FilePart, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.parts = (self.state,) if self.undo is None else (self.state, self.undo)

    @property
    def id(self) -> BlockId:
        return self.block.id

    @property
    def has_master(self) -> bool:
        """Whether it has whole masters, so that a step does not read its parameters."""
        return self.layout.has_master and not self.is_split

    @property
    def nbytes(self) -> int:
        """Bytes in a buffer."""
        return self.state.stop if self.undo is None else self.undo.stop

    @property
    def committed(self) -> tuple[FilePart, ...]:
        """Parts that make up one version of the block."""
        return self.parts if self.is_split else (self.state,)

    # -- transfers --

    def begin(self, buffer: Buffer) -> Ticket[object]:
        """Begin to read the planes of the last commit."""
        assert self.store is not None
        with named("read", "block", self.block.id):
            return self.store.read(self.state.block, buffer.view[: self.state.stop])

    def put(self, buffer: Buffer, parts: Sequence[FilePart] | None = None) -> Ticket[object]:
        """Begin to write the next version, and with it what undoes the step; or these parts."""
        store, view, begun = self.store, buffer.view, list[Ticket[int]]()
        assert store is not None
        with named("write", "block", self.block.id):
            for part in self.parts if parts is None else parts:
                begun.append(store.write(part.block, view[part.start : part.stop]))
        return begun[0] if len(begun) == 1 else TicketGroup(begun)

    def read_all(self, buffer: Buffer, at: Index | None = None) -> Ticket[object]:
        """Begin to read all parts of a committed version: of the last commit, or of one that is
        kept."""
        return TicketGroup([self._read(part, buffer, at) for part in self.committed])

    def read_weights(self, buffer: Buffer, commits: Sequence[Index]) -> bool:
        """Read parameters without masters as they were at the first of these commits, which follow
        each other to the last. Returns False where they have not changed since. Waits for it.
        """
        # The undo plane that a step wrote has the weights of before it: so those of a commit are in
        # the first later commit that has another version of that plane.
        assert self.undo is not None
        for before, index in pairwise(commits):
            if index.entries[self.undo.block].version != before.entries[self.undo.block].version:
                self._read(self.undo, buffer, index).wait()
                return True
        return False

    def read_undo(self, buffer: Buffer) -> Planes:
        """Read what restores parameters that a step has changed. Waits for it."""
        assert self.store is not None
        if self.undo is None:
            self.begin(buffer).wait()
            return self.planes(buffer)
        if self.is_split:
            self._read(self.undo, buffer).wait()
        else:
            view = buffer.view[self.undo.start : self.undo.stop]
            self.store.read_uncommitted(self.undo.block, view).wait()
        return {"param_undo": self.undo_plane(buffer)}

    def _read(self, part: FilePart, buffer: Buffer, at: Index | None = None) -> Ticket[None]:
        assert self.store is not None
        return self.store.read(part.block, buffer.view[part.start : part.stop], at)

    # -- what a buffer holds --

    def planes(self, buffer: Buffer) -> Planes:
        """Planes as an update takes them; where masters are split, with room for the new
        `WEIGHT`. The buffer is one of the store's steps."""
        # views are made once for each buffer and form; callers get a dict of their own
        key = buffer.index, self.block.numel, self.layout
        found = self.views.get(key)
        if found is None:
            found = self.views[key] = self._planes(buffer)
        return dict(found)

    def _planes(self, buffer: Buffer) -> Planes:
        numel = self.block.numel
        planes = {
            plane.name: torch.frombuffer(
                buffer.view, dtype=DTYPES[plane.dtype], count=plane.numel(numel), offset=offset
            )
            for plane, offset in zip(self.layout.planes, self.layout.offsets(numel), strict=True)
        }
        return {**planes, WEIGHT: self.undo_plane(buffer)} if self.is_split else planes

    def undo_plane(self, buffer: Buffer) -> Tensor:
        """[n], a view: its weight, or fp32 or float64 parameters before a step."""
        assert self.undo is not None
        view = buffer.view[self.undo.start : self.undo.stop]
        return torch.frombuffer(view, dtype=self.undo_dtype, count=self.block.numel)

    def logical_planes(self, buffer: Buffer) -> Planes:
        """Logical planes, with whole masters. To be read, as long as the buffer is: it does not
        hold the block any more."""
        planes = self._planes(buffer)
        return logical_planes(planes, self.logical_layout, planes.pop(WEIGHT, None), in_place=True)

    def change(self, buffer: Buffer, fill: Callable[[Block, Planes], None], before: Before) -> None:
        """Let `fill` write to the logical planes, which are before that as `before` says."""
        planes = self._planes(buffer)
        if before == "read":
            values = self.logical_planes(buffer)
        else:
            stored = {name: plane for name, plane in planes.items() if name != WEIGHT}
            values = unset(stored, self.logical_layout, self.block.numel)
            for plane in values.values() if before == "zero" else ():
                plane.zero_()
        fill(self.block, values)
        store_planes(planes, values, self.logical_layout, is_split=self.is_split)


class Records:
    """Records of the blocks of one file: states first, then weights and undo planes.

    layout: with whole masters. split: blocks whose masters are not. undo: there are no masters.
    columns: which planes a block has.
    nbytes: of every block of the file. In a buffer, each part begins at a whole page.
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
        self._views: dict[tuple[int, int, StateLayout], Planes] = {}
        self.nbytes: list[int] = []
        self._of: dict[BlockId, Filed] = {}
        dtype = DTYPES[layout.dtype if undo else WEIGHT_DTYPE]
        stored: dict[tuple[StateLayout, bool], StateLayout] = {}
        kept_nbytes: list[int] = []
        for i, block in enumerate(blocks):
            is_split = block.id in split
            form = columns.of({part.param for part in block.segments}, layout), is_split
            if form not in stored:
                stored[form] = (form[0].with_remainder() if is_split else form[0]).stored()
            self.nbytes.append(stored[form].block_nbytes(block.numel))
            state, kept = FilePart(BlockId(i), 0, align_up(self.nbytes[i], PAGE_BYTES)), None
            if undo or is_split:
                number = BlockId(len(blocks) + len(kept_nbytes))
                kept_nbytes.append(block.numel * dtype.itemsize)
                kept = FilePart(
                    number, state.stop, state.stop + align_up(kept_nbytes[-1], PAGE_BYTES)
                )
            self._of[block.id] = Filed(
                block, stored[form], form[0], state, kept, dtype, is_split, self._views
            )
        self.nbytes += kept_nbytes

    def attach_store(self, store: BlockStore) -> None:
        """Attach the store whose files have the parts."""
        for record in self._of.values():
            record.store = store

    @property
    def name(self) -> str:
        """Name of these records, where they are not whole fp32 planes; for digests."""
        split = "-split" if any(record.is_split for record in self._of.values()) else ""
        return split + f"-{self._layout.kind}" * self._layout.is_quantised

    def __contains__(self, block: Block) -> bool:
        return block.id in self._of

    def __getitem__(self, block: Block) -> Filed:
        return self._of[block.id]

    def of(self, blocks: Sequence[Block]) -> list[Filed]:
        """Records of these blocks."""
        return [self._of[block.id] for block in blocks]

    def columns_of(self, blocks: Sequence[Block]) -> Columns:
        """Columns of these blocks, by position."""
        layouts = [record.logical_layout for record in self.of(blocks)]
        if all(layout is self._layout for layout in layouts):
            return ALL_COLUMNS
        return Columns(tuple(frozenset(layout.names) for layout in layouts))

    def in_file(self, blocks: Sequence[Block]) -> list[BlockId]:
        """All blocks that the file has of these."""
        return [part.block for record in self.of(blocks) for part in record.parts]

    def buffer_nbytes(self, blocks: Sequence[Block]) -> int:
        """Bytes of a buffer that any of these fits in."""
        return max((record.nbytes for record in self.of(blocks)), default=0)

    def forget_views(self) -> None:
        """Forget views of buffers: there will be others."""
        self._views.clear()
