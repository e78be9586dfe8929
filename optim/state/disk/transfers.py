"""Stores of blocks of state, and transfers of a block between its file and a staging buffer, whole
or in part.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import pairwise

from torch import Tensor

from gemini.nvme import (
    BlockStore,
    Buffer,
    Index,
    StoreLayout,
    WriteMeter,
    check_folder,
    checksum_of,
    default_folder,
    measure_disks,
)
from gemini.optim.rules.config import NvmeConfig
from gemini.optim.rules.state_layout import WEIGHT, StateLayout
from gemini.optim.state.pieces import Planes
from gemini.optim.state.space import Block
from gemini.tickets import Ticket, TicketGroup
from gemini.units import PAGE_BYTES, BlockId, align_up

from .forms import BlockForms


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


class BlockTransfers:
    """Reads and writes of the blocks of one store, and views of what they fill."""

    def __init__(self, store: BlockStore, forms: BlockForms) -> None:
        self._store = store
        self._forms = forms
        # of a buffer, by its index, elements and planes
        self._views: dict[tuple[int, int, StateLayout], Planes] = {}

    # -- what a buffer holds --

    def forget_views(self) -> None:
        """Forget views of buffers: there will be others."""
        self._views.clear()

    def planes(self, block: Block, buffer: Buffer) -> Planes:
        """Planes as an update takes them: where masters are split, with room for the new
        `WEIGHT`."""
        is_split = self._forms.is_split(block)
        # views are made once for each buffer and form; callers get a dict of their own
        key = buffer.index, block.numel, self._forms.layout_of(block)
        if key not in self._views:
            planes = self._forms.planes(buffer, block)
            if is_split:
                planes[WEIGHT] = self.undo_plane(block, buffer)
            self._views[key] = planes
        return dict(self._views[key])

    def undo_plane(self, block: Block, buffer: Buffer) -> Tensor:
        """[n]: its undo plane."""
        return self._forms.undo_plane(buffer, block)

    # -- what was committed --

    def read(self, block: Block, buffer: Buffer) -> Ticket[None]:
        """Begin to read its planes."""
        parts = self._forms.parts[block.id]
        return self._store.read(parts.state, buffer.view[: parts.state_nbytes])

    def read_all(self, block: Block, buffer: Buffer, at: Index | None = None) -> Ticket[object]:
        """Begin to read all parts of a committed version: of the last commit, or of one that is
        kept."""
        forms = self._forms
        state = buffer.view[: forms.parts[block.id].state_nbytes]
        parts = [self._store.read(forms.state_id(block), state, at)]
        if forms.is_split(block):
            view = forms.undo_view(buffer, block)
            parts.append(self._store.read(forms.undo_id(block), view, at))
        return TicketGroup(parts)

    def read_weights(self, block: Block, buffer: Buffer, commits: Sequence[Index]) -> bool:
        """Read parameters without masters as they were at the first of these commits, which follow
        each other to the last. Returns False where they have not changed since. Waits for it.

        The undo plane has the weights of before the step.
        """
        # The undo plane that a step wrote has the weights of before it: so those of a commit are in
        # the first later commit that has another version of that plane.
        undo_part = self._forms.undo_id(block)
        for before, index in pairwise(commits):
            if index.entries[undo_part].version != before.entries[undo_part].version:
                view = self._forms.undo_view(buffer, block)
                self._store.read(undo_part, view, index).wait()
                return True
        return False

    def read_undo(self, block: Block, buffer: Buffer) -> Planes:
        """Read what restores parameters that a step has changed. Waits for it."""
        forms = self._forms
        if not (forms.has_undo or forms.is_split(block)):
            self.read(block, buffer).wait()
            return self.planes(block, buffer)
        undo_part, view = forms.undo_id(block), forms.undo_view(buffer, block)
        read = self._store.read_uncommitted if forms.has_undo else self._store.read
        read(undo_part, view).wait()
        return {"param_undo": self.undo_plane(block, buffer)}

    # -- what does not count yet --

    def write(self, block: Block, buffer: Buffer, *, with_undo: bool) -> Ticket[object]:
        """Begin to write its next version.

        with_undo: with the undo plane, also where that only undoes this step.
        """
        parts, view = self._forms.parts[block.id], buffer.view
        state = self._store.write(parts.state, view[: parts.state_nbytes])
        if parts.undo_part is None or not (parts.is_split or with_undo):
            return state
        undo_part = self._store.write(parts.undo_part, view[parts.state_nbytes : parts.nbytes])
        return TicketGroup((state, undo_part))

    def checksum(self, block: Block, buffer: Buffer) -> int:
        """Checksum of the part that `read_written` will read; 0 where it need not be known."""
        if not self._store.checksums or self._forms.is_split(block):
            return 0
        return checksum_of(buffer.view[: self._master_nbytes(block)])

    def read_written(self, block: Block, buffer: Buffer, checksum: int) -> Ticket[None]:
        """Begin to read its new weight, or its new master, when it is written."""
        forms = self._forms
        if forms.is_split(block):
            view = forms.undo_view(buffer, block)
            return self._store.read_uncommitted(forms.undo_id(block), view)
        pages = buffer.view[: self._master_nbytes(block)]
        return self._store.read_written(forms.state_id(block), pages, checksum)

    def take_back(self, block: Block) -> None:
        """Forget what was written of it. Waits until that has ended."""
        for part in self._forms.ids(block):
            self._store.take_back(part)

    # -- sizes --

    def bytes_of(self, blocks: Sequence[Block]) -> int:
        """Bytes that a step writes of these blocks."""
        return sum(map(self._store.buffer_nbytes, self._forms.in_file(blocks)))

    def held_share(self, blocks: Sequence[Block]) -> float:
        """Share of a step's traffic that is left where all blocks were written before it."""
        states = [self._forms.state_id(block) for block in blocks]
        moved = self.bytes_of(blocks) + sum(map(self._store.buffer_nbytes, states))
        return sum(map(self._again_nbytes, blocks)) / moved if moved else 0.0

    def _again_nbytes(self, block: Block) -> int:
        """Bytes that `read_written` reads."""
        if self._forms.is_split(block):
            return self._store.buffer_nbytes(self._forms.undo_id(block))
        return self._master_nbytes(block)

    def _master_nbytes(self, block: Block) -> int:
        """Whole pages that hold a master that is not split: it comes first."""
        first = self._forms.layout_of(block).planes[0]
        return align_up(block.numel * first.itemsize, PAGE_BYTES)
