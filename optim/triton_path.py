"""The update on the compute device: three launches, and nothing is waited for.

    measure    norm and overflow of all gradients, into the control vector
               [several ranks: one all-reduce of the ballot, its result into the control vector]
    begin      clip factor, skip flag, step counts, coefficients (the prologue)
    update     every segment of every shard

Step counts and the skip flag live on the device: the host neither reads nor needs them. State in
host memory is streamed: it travels to the device, is updated by the same kernel and travels back.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from gemini.units import ParamId
from kernels_triton import ops
from kernels_triton.fields import (
    BAD,
    MAX_NORM,
    MAX_VALUE,
    NORM,
    SUM,
    USED_SCALE,
)
from kernels_triton.frame import NUM_COEFFICIENTS, NUM_HYPER, is_interpreted
from kernels_triton.tiles import Segment, choose_launch, segment_table, tile_table

from .clipping import Clip
from .cpu_path import Piece
from .nvme_state import DTYPES
from .report import Outcome, Traffic
from .rules import UpdateRule
from .scaler import Scaler
from .space import Block
from .state_layout import StateLayout
from .updaters import PiecesOf, Planes

Dtypes = tuple[torch.dtype, torch.dtype]  # of parameter and gradient
RING = 4  # hyperparameter uploads that may be in flight


class TritonUpdater:
    """One rule on one device. `group_of[i]` is the param group of parameter, or counter, i.

    scaler: whose control vector the kernels use; one without a loss scale where None.
    stochastic: bf16 parameters without a master are rounded at random.
    """

    name = "triton"

    def __init__(
        self,
        rule: UpdateRule,
        layout: StateLayout,
        group_of: Sequence[int],
        device: torch.device,
        scaler: Scaler | None = None,
        *,
        stochastic: bool = False,
    ) -> None:
        n = len(group_of)
        self._rule = rule
        self._layout = layout
        self._device = device
        self._stochastic = stochastic
        self.set_groups(group_of)
        self._hyper = torch.zeros(1, NUM_HYPER, dtype=torch.float64, device=device)
        self._hyper_rows: list[tuple[float, ...]] = []
        self._uploads: list[Tensor] = []
        self._coefficients = torch.zeros(n, NUM_COEFFICIENTS, device=device)
        self._tables: dict[str, _Tables] = {}
        self._sums = torch.empty(0, dtype=torch.float32, device=device)
        self._bad = torch.empty(0, dtype=torch.int32, device=device)
        self._norm_tiles: list[Tensor] = []  # [tiles, sums, bad] that `begin` is to finish
        self._staging: Planes | None = None
        self._moved = Traffic()
        self.steps = torch.zeros(n, dtype=torch.int64, device=device)
        self.present = torch.ones(n, dtype=torch.float64, device=device)
        self._active = list(range(n))
        self.scaler = scaler or Scaler(None, device)
        self.control = self.scaler.control
        self.set_limits(Clip())

    def set_groups(self, group_of: Sequence[int]) -> None:
        """The param group of every counter."""
        self._groups = torch.tensor(group_of, dtype=torch.int64).to(self._device)

    def set_limits(self, clip: Clip) -> None:
        """What the next steps clip to."""
        self._norm_type = clip.norm_type
        self.control[MAX_NORM] = clip.max_norm
        self.control[MAX_VALUE] = 0.0 if math.isinf(clip.max_value) else clip.max_value

    def set_present(self, counters: Sequence[int]) -> None:
        """Which parameters have a gradient; the others keep their state and their count."""
        if list(counters) != self._active:
            self._active = list(counters)
            present = torch.zeros(self.present.numel(), dtype=torch.float64)
            present[self._active] = 1
            self.present.copy_(present, non_blocking=True)

    def measure(self, pieces: Sequence[Piece]) -> None:
        """Norm and overflow of the pieces' gradients, tile by tile; `begin` finishes it."""
        tables = self._table("norm", pieces, None, ops.NORM_TILE)
        num_tiles = tables.tiles.shape[0]
        if self._sums.numel() < num_tiles:
            self._sums = torch.empty(num_tiles, dtype=torch.float32, device=self._device)
            self._bad = torch.empty(num_tiles, dtype=torch.int32, device=self._device)
        for (_, grad_dtype), lo, hi in tables.ranges:
            ops.grad_norm(
                tables.tiles[lo:hi], tables.segments, self._sums[lo:hi], self._bad[lo:hi],
                self.control, [], grad_dtype, self._norm_type,
            )  # fmt: skip
        self._norm_tiles = [tables.tiles, self._sums[:num_tiles], self._bad[:num_tiles]]

    def finish_measure(self) -> None:
        """What `measure` found to SUM and BAD, for `begin` to take it from there."""
        ops.finish_norm(*self._norm_tiles, self.control, self._norm_type)
        self._norm_tiles = []

    def read_measure(self) -> tuple[float, ParamId | None]:
        """What `measure` found, read by the host: sum of |g|^p, first bad counter. Waits."""
        self.finish_measure()
        control = self.control.tolist()
        bad = int(control[BAD])
        return control[SUM], ParamId(self.measured_rows[bad - 1].counter) if bad else None

    def set_measure(self, power_sum: float) -> None:
        """What all ranks agreed on, in place of what this rank measured."""
        self._norm_tiles = []
        self.control[SUM] = power_sum
        self.control[BAD] = 0.0

    def set_amp(self, grad_scale: Tensor | None, found_inf: Tensor | None) -> None:
        """What torch.amp.GradScaler found, in place of a measure; nothing is waited for."""
        self.set_measure(0.0)
        if grad_scale is None:
            self.scaler.scale.fill_(1.0)
        else:
            self.scaler.scale.copy_(grad_scale)
        if found_inf is not None:
            self.control[BAD] = found_inf.to(self.control) > 0

    @property
    def measured_rows(self) -> tuple[Segment, ...]:
        """What BAD of the last `measure` counts, from 1."""
        return self._tables["norm"].rows

    def begin(self, hypers: Sequence[object], *, with_norm: bool) -> None:
        """Make this step's coefficients. `with_norm`: clip and skip by what `measure` found."""
        self._upload([self._rule.hyper_row(hyper) for hyper in hypers])
        norm_type = self._norm_type
        if with_norm and norm_type not in (1.0, 2.0, math.inf):
            # a power of fp64 is contracted inside kernels, so torch takes the root of other orders
            if self._norm_tiles:
                self.finish_measure()
            self.control[SUM].pow_(1 / norm_type)
            norm_type = 1.0
        ops.prologue(
            self._rule.name, self._groups, self._hyper, self.steps, self.present,
            self._coefficients, self.control, self._norm_tiles, with_norm, norm_type,
        )  # fmt: skip

    def update_staged(self, block: Block, planes: Planes, pieces_of: PiecesOf) -> bool:
        if self._staging is None or next(iter(self._staging.values())).numel() < block.numel:
            self._staging = {
                plane.name: torch.empty(block.numel, dtype=DTYPES[plane.dtype], device=self._device)
                for plane in self._layout.planes
            }
        staged = {name: self._staging[name][: plane.numel()] for name, plane in planes.items()}
        pieces = pieces_of(block, staged)
        if not pieces:
            return False
        for name, plane in planes.items():
            staged[name].copy_(plane, non_blocking=True)
        self._launch("staged", pieces, self._staging)
        for name, plane in planes.items():
            plane.copy_(staged[name])  # waits for the device
        nbytes = self._layout.block_nbytes(block.numel)
        self._moved += Traffic(host_to_device=nbytes, device_to_host=nbytes)
        return True

    def update_resident(
        self, blocks: Iterable[tuple[Block, Planes]], slabs: Planes, pieces_of: PiecesOf
    ) -> None:
        pieces = [piece for block, planes in blocks for piece in pieces_of(block, planes)]
        self._launch(f"resident {id(slabs)}", pieces, slabs)  # each slab has tables of its own

    def traffic(self) -> Traffic:
        return self._moved

    def _launch(self, name: str, pieces: Sequence[Piece], slabs: Planes) -> None:
        planes = list(slabs.values())
        largest = max((piece.param.numel() for piece in pieces), default=0)
        launch = choose_launch(28, is_interpreted(), largest)
        tables = self._table(name, pieces, planes[0], launch.block)
        for (param_dtype, grad_dtype), lo, hi in tables.ranges:
            ops.update(
                self._rule.name, tables.tiles[lo:hi], tables.segments, self._coefficients,
                self.control, planes, [], [], param_dtype, grad_dtype, launch.block,
                launch.num_warps, self._stochastic,
            )  # fmt: skip

    def _upload(self, rows: list[tuple[float, ...]]) -> None:
        """Hyperparameters to the device, from a ring so that none in flight is overwritten."""
        if rows == self._hyper_rows:
            return
        host = torch.zeros(len(rows), NUM_HYPER, dtype=torch.float64)
        for i, row in enumerate(rows):
            host[i, : len(row)] = torch.tensor(row, dtype=torch.float64)
        if self._device.type == "cuda":
            host = host.pin_memory()
        self._uploads = [*self._uploads[-(RING - 1) :], host]
        self._hyper = host.to(self._device, non_blocking=True)
        self._hyper_rows = rows

    def _table(
        self, name: str, pieces: Sequence[Piece], slab: Tensor | None, block: int
    ) -> _Tables:
        """Device tables of a launch; made again only where addresses or lengths changed."""
        keyed = segments_of(pieces, slab)
        rows = tuple(segment for _, segment in keyed)
        old = self._tables.get(name)
        if old is not None and old.rows == rows:
            return old
        numels = [segment.numel for segment in rows]
        if old is not None and [segment.numel for segment in old.rows] == numels:
            tiles = old.tiles
        else:
            tiles = tile_table(numels, block, self._device)
        ranges: list[tuple[Dtypes, int, int]] = []
        end = 0
        for dtypes, segment in keyed:
            start, end = end, end + -(-segment.numel // block)
            if ranges and ranges[-1][0] == dtypes:
                start = ranges.pop()[1]
            ranges.append((dtypes, start, end))
        self._tables[name] = _Tables(rows, segment_table(rows, self._device), tiles, ranges)
        return self._tables[name]


class _Tables:
    """Tables of one launch: segments in order of their dtypes, a range of tiles for each pair."""

    def __init__(
        self,
        rows: tuple[Segment, ...],
        segments: Tensor,
        tiles: Tensor,
        ranges: Sequence[tuple[Dtypes, int, int]],
    ) -> None:
        self.rows, self.segments, self.tiles, self.ranges = rows, segments, tiles, ranges


def segments_of(pieces: Sequence[Piece], slab: Tensor | None) -> list[tuple[Dtypes, Segment]]:
    """Pieces as kernel segments, grouped by dtypes; neighbours in all memories become one.

    `slab` is what the first state plane is a view of; None where state is not looked at.
    """
    found: list[tuple[Dtypes, Segment]] = []
    for piece in sorted(pieces, key=lambda p: (str(p.param.dtype), str(p.grad.dtype))):
        dtypes = (piece.param.dtype, piece.grad.dtype)
        state = 0
        if slab is not None:
            first = piece.master if piece.master is not None else piece.planes[0]
            state = (first.data_ptr() - slab.data_ptr()) // slab.element_size()
        segment = Segment(
            piece.param.data_ptr(), piece.grad.data_ptr(), state, piece.param.numel(),
            piece.counter, piece.first,
        )  # fmt: skip
        if found:
            last_dtypes, last = found[-1]
            if (
                last_dtypes == dtypes
                and last.counter == segment.counter
                and last.first + last.numel == segment.first
                and last.param + last.numel * dtypes[0].itemsize == segment.param
                and last.grad + last.numel * dtypes[1].itemsize == segment.grad
                and (slab is None or last.state + last.numel == segment.state)
            ):
                segment = Segment(
                    last.param, last.grad, last.state, last.numel + segment.numel, last.counter,
                    last.first,
                )  # fmt: skip
                found.pop()
        found.append((dtypes, segment))
    return found


class DeviceOutcome:
    """A step's outcome that is still on the device; reading it waits for the device once."""

    def __init__(self, updater: TritonUpdater, names: Sequence[str] | None) -> None:
        control = updater.control
        self._event: torch.cuda.Event | None = None
        self._control = torch.empty_like(control, device="cpu", pin_memory=control.is_cuda)
        self._control.copy_(control, non_blocking=True)
        if control.is_cuda:
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(control.device))
        self._names = names  # of the counters; None where nothing was measured here
        self._rows = updater.measured_rows if names is not None else ()

    def ready(self) -> bool:
        return self._event is None or bool(self._event.query())

    def wait(self) -> Outcome:
        if self._event is not None:
            self._event.synchronize()
        bad = int(self._control[BAD])
        where = None
        if bad and self._names is not None:
            where = f"{self._names[self._rows[bad - 1].counter]} on rank 0"
        scale = float(self._control[USED_SCALE])
        return Outcome(bad > 0, float(self._control[NORM]), where, scale)
