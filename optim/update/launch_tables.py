"""Tables of one launch: the memory that its tiles update, grouped by dtypes.

They are made once, and again only where addresses or lengths changed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gemini.kernels_triton.launch import Launch
from gemini.kernels_triton.tiles import (
    NUM_COLUMNS,
    SegmentRow,
    marks_table,
    segment_table,
    tile_table,
)
from gemini.optim.state.memory import Memory
from gemini.optim.state.pieces import Piece

VARIANTS = 4  # of addresses of gradients that are remembered
Dtypes = tuple[torch.dtype, torch.dtype]  # of parameter and gradient


class LaunchTables:
    """Tables of segments in order of their dtypes, with a range of tiles for each pair of dtypes.

    keys: identities of the memory that they are of, as far as known, the last one last.
    """

    def __init__(
        self,
        keyed: Sequence[tuple[Dtypes, SegmentRow]],
        launch: Launch,
        device: torch.device,
        *,
        before: LaunchTables | None = None,
        memory: Tensor | None = None,
    ) -> None:
        """before: tables whose tiles are reused where lengths are the same. memory: int64 [n, 6],
        for the segments; None: their own."""
        # Dtypes are part of the key, as another gradient at the same address may be wider.
        self.keyed = list(keyed)
        rows = [segment for _, segment in keyed]
        self.launch = launch
        self.keys: list[object] = []
        self.numels: list[int] = [segment.numel for segment in rows]
        if before is not None and (before.numels, before.launch) == (self.numels, launch):
            self.tiles: Tensor = before.tiles
        else:
            self.tiles = tile_table(self.numels, launch.block, device)
        self.segments = segment_table(rows, device, memory)
        marked = bool(rows) and rows[0].marks != 0
        self.marks = marks_table(rows, device) if marked else None
        self.ranges: list[tuple[Dtypes, int, int]] = []  # of tiles
        end = 0
        for dtypes, segment in keyed:
            start, end = end, end + -(-segment.numel // launch.block)
            if self.ranges and self.ranges[-1][0] == dtypes:
                start = self.ranges.pop()[1]
            self.ranges.append((dtypes, start, end))


class TableVariants:
    """Tables of one launch, the last used first: one for each memory that gradients take turns in.

    An allocator gives a gradient one of a few addresses, so a table that is kept is not uploaded
    again. They share one storage: small ones that come and go would move the gradients of small
    models.
    """

    def __init__(self) -> None:
        self._tables: list[LaunchTables] = []
        self._memory: list[Tensor] = []  # of segments, int64 [n, 6] each, that no table has

    def known(self, key: object | None) -> LaunchTables | None:
        """Tables of the memory with this identity, None for an unknown one."""
        for tables in self._tables if key is not None else ():
            for other in tables.keys:
                if other is key:
                    return tables
        return None

    def of(
        self,
        keyed: Sequence[tuple[Dtypes, SegmentRow]],
        launch: Launch,
        device: torch.device,
        key: object | None,
    ) -> LaunchTables:
        """Tables of these segments: kept ones, or new ones in place of those used least lately."""
        found = None
        for i, tables in enumerate(self._tables):
            if tables.keyed == keyed:
                found = self._tables.pop(i)
                break
        if found is None:
            before = self._tables[0] if self._tables else None
            if before is None or before.segments.shape[0] != len(keyed):
                shape = VARIANTS, len(keyed), NUM_COLUMNS
                self._tables = []
                self._memory = list(torch.empty(shape, dtype=torch.int64, device=device).unbind())
            elif not self._memory:
                # launches come in order, so none reads it any more when it is written
                self._memory.append(self._tables.pop().segments)
            memory = self._memory.pop()
            found = LaunchTables(keyed, launch, device, before=before, memory=memory)
        self._tables.insert(0, found)
        if key is not None:
            found.keys = [*found.keys[1 - VARIANTS :], key]
        return found


def segments_of(
    pieces: Sequence[Piece], slab: Tensor | None, memory: Memory, of_code: int = 1
) -> list[tuple[Dtypes, SegmentRow]]:
    """Segments of pieces for kernels, grouped by dtypes; neighbours in all memories become one.

    slab: tensor that the first state plane is a view of; None where kernels do not touch state.
    of_code: elements that one value of a plane has, where it is no master.
    """
    found: list[tuple[Dtypes, SegmentRow]] = []
    for piece in sorted(pieces, key=lambda p: (str(p.param.dtype), str(p.grad.dtype))):
        dtypes = (piece.param.dtype, piece.grad.dtype)
        state = 0
        if slab is not None:
            first, of_value = piece.master, 1
            if first is None:
                first, of_value = piece.planes[0], of_code
            state = of_value * ((memory.address(first) - slab.data_ptr()) // slab.element_size())
        segment = SegmentRow(
            memory.address(piece.param), memory.address(piece.grad), state, piece.param.numel(),
            piece.counter, piece.first,
            0 if piece.changed is None else memory.address(piece.changed),
        )  # fmt: skip
        if found and found[-1][0] == dtypes and _follows(found[-1][1], segment, dtypes, slab):
            last = found.pop()[1]
            segment = SegmentRow(
                last.param, last.grad, last.state, last.numel + segment.numel, last.counter,
                last.first, last.marks,
            )  # fmt: skip
        found.append((dtypes, segment))
    return found


def _follows(last: SegmentRow, segment: SegmentRow, dtypes: Dtypes, slab: Tensor | None) -> bool:
    return (
        last.counter == segment.counter
        and last.first + last.numel == segment.first
        and last.param + last.numel * dtypes[0].itemsize == segment.param
        and last.grad + last.numel * dtypes[1].itemsize == segment.grad
        and (slab is None or last.state + last.numel == segment.state)
        and segment.marks == (last.marks and last.marks + last.numel // 8)
    )
