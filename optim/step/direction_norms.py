"""Norms that a `NormRule` asks for, by kernels of a device: a launch for each shard's blocks.

Measures get the same sums as by torch's operators (`measuring.run`), up to the last bits of fp64.
What kernels cannot reach, blocks on disk and weights in host memory, is measured by operators.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from gemini.kernels_triton import ops
from gemini.kernels_triton.launch import choose_launch, is_interpreted
from gemini.kernels_triton.update.frame import NUM_COEFFICIENTS
from gemini.optim.rules.rule import values_of
from gemini.optim.rules.state_layout import MASTER, WEIGHT
from gemini.optim.state.memory import Memory
from gemini.optim.state.pieces import Piece, Planes
from gemini.optim.state.space import Block
from gemini.optim.state.tiered_state import TieredState
from gemini.optim.update.cpu_update import StepInputs
from gemini.optim.update.launch_tables import LaunchTables, segments_of
from gemini.optim.update.staging import DeviceStaging
from gemini.optim.update.triton_update import UPDATE_BYTES, kernel_of

from .measuring import ParamAndGrad, run, to_host

if TYPE_CHECKING:
    from gemini.optim.rules.measures import Measure, NormRule


class NormLaunch(NamedTuple):
    """Tables of a launch, and 1 + the last tile of each of its segments: int64 [n]."""

    tables: LaunchTables
    ends: Tensor


class DirectionNorms:
    """Norms of one rule's weights and directions on one device.

    kernel: key in `KERNELS` of the rule with its direction as the formula.
    """

    def __init__(
        self, rule: NormRule, memory: Memory, staging: Callable[[], DeviceStaging]
    ) -> None:
        """staging: of blocks whose state is in host memory; it may be made anew between steps."""
        self._memory = memory
        self._staging = staging
        directions: Any = copy.copy(rule)
        directions.name, directions.formula = f"{rule.name}-direction", rule.direction
        self.kernel = kernel_of(directions)
        self._launches: dict[object, NormLaunch] = {}

    def run(
        self,
        state: TieredState,
        param_and_grad: ParamAndGrad,
        measures: Mapping[int, Measure],
        inputs: StepInputs,
    ) -> None:
        """Add the squares of all parts to their measures. Waits for the device once."""
        coefficients = self._coefficients(measures)
        found: list[Tensor] = []
        params: list[int] = []
        left = [] if state.nvme is None else list(state.nvme.blocks)
        for blocks, planes, slab in _shards(state, self._staging()):
            pieces, others = self._pieces(blocks, planes, param_and_grad, measures)
            left += others
            if pieces:
                launch = self.launch_of(blocks[0].id, pieces, slab)
                tables = launch.tables
                found.append(
                    ops.direction_squares(
                        self.kernel, tables.tiles, tables.segments, launch.ends, tables.ranges,
                        coefficients, list(slab.values()), inputs.factor, inputs.limit,
                        tables.launch.block, tables.launch.num_warps,
                    )
                )  # fmt: skip
                params += [segment.counter for _, segment in tables.keyed]
        for param, squares in zip(
            params, (row for one in to_host(found) for row in one), strict=True
        ):
            measures[param].sums.append(squares)
        if left:
            run(True, state, param_and_grad, measures, inputs, left)

    def _coefficients(self, measures: Mapping[int, Measure]) -> Tensor:
        """Coefficients fp32 [counters, 12] on the device, of measured parameters."""
        rows = torch.zeros(max(measures, default=-1) + 1, NUM_COEFFICIENTS)
        for param, measure in measures.items():
            asked = measure.asked
            values = values_of(asked.rule, asked.hyper, asked.step, torch.float32)
            rows[param, : len(values)] = values
        device = self._memory.device
        if device.type != "cuda":
            return rows
        return rows.pin_memory().to(device, non_blocking=True)

    def _pieces(
        self,
        blocks: Sequence[Block],
        planes: Sequence[Planes],
        param_and_grad: ParamAndGrad,
        measures: Mapping[int, Measure],
    ) -> tuple[list[Piece], list[Block]]:
        """Measured pieces of blocks, and the blocks that have one whose weights are elsewhere."""
        found: list[Piece] = []
        left: list[Block] = []
        for block, of_block in zip(blocks, planes, strict=True):
            pieces = [
                self._piece(param_and_grad, block, part, grad, of_block)
                for part in block.segments
                if part.param in measures and (grad := param_and_grad.grad(block, part)) is not None
            ]
            whole = [piece for piece in pieces if piece is not None]
            found += whole if len(whole) == len(pieces) else []
            left += [block] if len(whole) < len(pieces) else []
        return found, left

    def _piece(
        self, param_and_grad: ParamAndGrad, block: Block, part: Any, grad: Tensor, planes: Planes
    ) -> Piece | None:
        here = slice(part.offset, part.offset + part.numel)
        master = planes[MASTER][here] if MASTER in planes else None
        # of a parameter with a whole master the kernel reads nothing else
        reads = master is None or master.dtype == torch.int16
        param = param_and_grad.param(block, part) if reads else grad
        if reads and not self._reaches(param):
            return None
        own = tuple(plane[here] for name, plane in planes.items() if name not in (MASTER, WEIGHT))
        return Piece(param, grad, master, own, None, 0, part.param, part.param_offset)

    def _reaches(self, tensor: Tensor) -> bool:
        try:
            self._memory.address(tensor)
        except AssertionError:
            return False
        return True

    def launch_of(self, name: object, pieces: Sequence[Piece], slab: Planes) -> NormLaunch:
        """Tables of a launch for pieces; made again only where addresses or lengths changed."""
        keyed = segments_of(pieces, next(iter(slab.values())), self._memory)
        old = self._launches.get(name)
        if old is not None and old.tables.keyed == keyed:
            return old
        largest = max(segment.numel for _, segment in keyed)
        launch = choose_launch(UPDATE_BYTES, is_interpreted(), largest)
        device = self._memory.device
        before = None if old is None else old.tables
        tables = LaunchTables(keyed, launch, device, before=before)
        counts = torch.tensor([-(-numel // launch.block) for numel in tables.numels])
        ends = counts.cumsum(0)
        if device.type == "cuda":
            ends = ends.pin_memory().to(device, non_blocking=True)
        self._launches[name] = NormLaunch(tables, ends)
        return self._launches[name]


def _shards(
    state: TieredState, staging: DeviceStaging
) -> Iterator[tuple[Sequence[Block], Sequence[Planes], Planes]]:
    """Blocks in memory that one launch measures, their planes on the device, and the slabs of
    these: the blocks of a shard, as its gradient may be there for it alone; of state in host memory
    one block, in staging."""
    for slab in state.device_slabs:
        for _, of_shard in groupby(slab.blocks, key=lambda block: block.shard):
            blocks = list(of_shard)
            yield blocks, [slab.planes(block) for block in blocks], slab.tensors
    for slab in state.host_slabs:
        for block in slab.blocks:
            planes = {name: p for name, p in slab.planes(block).items() if name != WEIGHT}
            staging.use(block.id)
            staged = staging.planes(planes)
            staging.bring([(staged[name], planes[name]) for name in planes])
            yield [block], [staged], staged
