"""Tables of one launch: the memory that its tiles update, grouped by dtypes.

They are made once, and again only where addresses or lengths changed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gemini.kernels_triton.launch import Launch
from gemini.kernels_triton.tiles import SegmentRow, segment_table, tile_table
from gemini.optim.state.memory import Memory
from gemini.optim.state.pieces import Piece

Dtypes = tuple[torch.dtype, torch.dtype]  # of parameter and gradient


class LaunchTables:
    """Tables of segments in order of their dtypes, with a range of tiles for each pair of dtypes.

    key: identity of the memory that they were made for; None: not known.
    """

    def __init__(
        self,
        keyed: Sequence[tuple[Dtypes, SegmentRow]],
        launch: Launch,
        device: torch.device,
        *,
        before: LaunchTables | None = None,
        key: object | None = None,
    ) -> None:
        """before: tables whose tiles are reused where lengths are the same."""
        # Dtypes are part of the key, as another gradient at the same address may be wider.
        self.keyed = list(keyed)
        rows = [segment for _, segment in keyed]
        self.launch, self.key = launch, key
        self.numels: list[int] = [segment.numel for segment in rows]
        if before is not None and (before.numels, before.launch) == (self.numels, launch):
            self.tiles: Tensor = before.tiles
        else:
            self.tiles = tile_table(self.numels, launch.block, device)
        self.segments = segment_table(rows, device)
        self.ranges: list[tuple[Dtypes, int, int]] = []  # of tiles
        end = 0
        for dtypes, segment in keyed:
            start, end = end, end + -(-segment.numel // launch.block)
            if self.ranges and self.ranges[-1][0] == dtypes:
                start = self.ranges.pop()[1]
            self.ranges.append((dtypes, start, end))


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
        )  # fmt: skip
        if found and found[-1][0] == dtypes and _follows(found[-1][1], segment, dtypes, slab):
            last = found.pop()[1]
            segment = SegmentRow(
                last.param, last.grad, last.state, last.numel + segment.numel, last.counter,
                last.first,
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
    )
