"""Norm and overflow of gradients, tile by tile, on their device: each run when it is final.

Tiles have one order, whichever runs there are and whenever they are measured, so the total has the
same bits wherever gradients wait for the step.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gemini.kernels_triton import ops
from gemini.kernels_triton.tiles import GRAD, SegmentRow, segment_table, tile_table
from gemini.optim.state.memory import Memory
from gemini.optim.state.pieces import GradSegment

from .launch_tables import VARIANTS


class _RunTiles(NamedTuple):
    """Tiles of a run, and its rows in the table of segments."""

    rows: slice
    tiles: slice
    offsets: Tensor  # int64, on the host: of its parts, in elements


class GradTiles:
    """Tiles of all runs that may be measured. runs: the parts of each [n], by its number."""

    def __init__(self, runs: Mapping[int, Sequence[GradSegment]], memory: Memory) -> None:
        self._memory = memory
        device = memory.device
        self.runs = dict(runs)
        self._places: dict[int, _RunTiles] = {}
        rows: list[SegmentRow] = []
        num_tiles = 0
        for run, parts in runs.items():
            tiles = sum(-(-part.numel // ops.NORM_TILE) for part in parts)
            self._places[run] = _RunTiles(
                slice(len(rows), len(rows) + len(parts)),
                slice(num_tiles, num_tiles + tiles),
                torch.tensor([part.offset for part in parts], dtype=torch.int64),
            )
            rows += [SegmentRow(0, 0, 0, part.numel, part.counter) for part in parts]
            num_tiles += tiles
        self._rows = segment_table(rows, torch.device("cpu"))
        self._segments = segment_table(rows, device)
        self._tiles = tile_table([row.numel for row in rows], ops.NORM_TILE, device)
        self._sums = torch.zeros(num_tiles, device=device)
        self._bad = torch.zeros(num_tiles, dtype=torch.int32, device=device)
        self._known: dict[int, tuple[int, int]] = {}  # address and bytes an element, in the rows
        # of segments, by what was known; runs that are measured one by one have one each
        self._kept: dict[object, Tensor] = {}
        shape = VARIANTS * (len(runs) + 1), *self._rows.shape
        self._free = list(torch.empty(shape, dtype=torch.int64, device=device).unbind())
        self._filled: set[int] = set()

    @property
    def tables(self) -> list[Tensor]:
        """Tables [tiles, segments, sums, bad], as `ops.finish_norm` takes them."""
        return [self._tiles, self._segments, self._sums, self._bad]

    def measure(self, grads: Mapping[int, Tensor], norm_type: float, control: Tensor) -> None:
        """Launch the sums of these runs [n], by a kernel for each dtype."""
        self.point_at(grads)
        ranges: list[tuple[torch.dtype, int, int]] = []
        for run in sorted(grads, key=lambda run: self._places[run].tiles.start):
            dtype, tiles = grads[run].dtype, self._places[run].tiles
            start = tiles.start
            if ranges and ranges[-1][0] == dtype and ranges[-1][2] == start:
                start = ranges.pop()[1]
            ranges.append((dtype, start, tiles.stop))
        for dtype, lo, hi in ranges:
            ops.grad_norm(
                self._tiles[lo:hi], self._segments, self._sums[lo:hi], self._bad[lo:hi],
                control, [], dtype, norm_type,
            )  # fmt: skip
        self._filled.update(grads)

    def keep(self, runs: Collection[int]) -> None:
        """Keep the sums of these runs; all other runs count as zero."""
        for run in sorted(self._filled.difference(runs)):
            tiles = self._places[run].tiles
            self._sums[tiles].zero_()
            self._bad[tiles].zero_()
        self._filled.intersection_update(runs)

    def point_at(self, grads: Mapping[int, Tensor]) -> None:
        """Point the table at these gradients; it is uploaded if they have addresses that no table
        of the last steps has."""
        moved = False
        for run, grad in grads.items():
            known = self._memory.address(grad), grad.element_size()
            if self._known.get(run) != known:
                place = self._places[run]
                self._rows[place.rows, GRAD] = known[0] + place.offsets * known[1]
                self._known[run] = known
                moved = True
        if not moved:
            return
        key = tuple(sorted(self._known.items()))
        kept = self._kept.pop(key, None)
        if kept is None:
            if not self._free:  # launches come in order: none reads it when it is written
                self._free.append(self._kept.pop(next(iter(self._kept))))
            kept = self._free.pop()
            # the allocator keeps a pinned copy until it was read
            rows = self._rows.pin_memory() if kept.is_cuda else self._rows.clone()
            kept.copy_(rows, non_blocking=True)
        self._kept[key] = self._segments = kept
