"""Stream of state: runs, block by block, and the way back; all that reads or replaces whole state
is made from it.

A run is the part of one plane of one parameter that one block holds. Blocks come in storage order,
those on disk one staging buffer at a time, so neither way needs more memory than there was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gemini.dtypes import DTYPES
from gemini.optim.rules.state_layout import Plane

from .memory import copy_alone
from .pieces import Planes
from .space import Block, BlockSegment
from .tiered_state import TieredState

if TYPE_CHECKING:
    from .disk.pinned_state import PinnedState
    from .disk.state_version import StateVersion


@dataclass(frozen=True, slots=True)
class StateRun:
    """Elements [start, start + n) of one plane of one parameter, flat in the order of its storage.

    `values` [n] is a view that is good until the visitor returns: copy what is to be kept. Of a run
    that is listed, and not read, it is on the meta device.
    """

    name: str  # of the parameter
    plane: str
    start: int
    values: Tensor

    @property
    def elements(self) -> slice:
        return slice(self.start, self.start + self.values.numel())


StateVisitor = Callable[[StateRun], None]
# new values [n] for a run; None leaves it as it is, or as the source has filled it in place
StateSource = Callable[[StateRun], Tensor | None]
BlockFiller = Callable[[Block, Planes], None]


class StateStream:
    """Runs of one state space, out and in.

    names[i]: of parameter i of the space. params: those that have state on some rank; None: all.
    overwrite: `TieredState.overwrite` of all blocks, with what follows it.
    """

    def __init__(
        self,
        state: TieredState,
        names: Sequence[str],
        params: Sequence[int] | None = None,
        overwrite: Callable[[BlockFiller, bool], None] | None = None,
    ) -> None:
        self._state, self._names = state, names
        self._params = range(len(names)) if params is None else params
        self._overwrite = overwrite

    def columns(self) -> list[tuple[str, Plane]]:
        """(parameter, plane) of all that have runs on some rank."""
        planes, has = self._state.layout.planes, self._state.columns.has
        return [(self._names[i], p) for i in self._params for p in planes if has(i, p.name)]

    def runs(self) -> list[StateRun]:
        """Runs as `visit` shows them, without values."""
        blocks = self._state.visit_order
        return [run for block in blocks for run in self._runs_of(block, self._unread(block))]

    def visit(self, look: StateVisitor, at: PinnedState | None = None) -> None:
        """Show every run; `at`: those on disk, as they were when they were pinned."""
        (self._state if at is None else at).visit(self._shows(look))

    def visit_memory(self, look: StateVisitor) -> None:
        """Show the runs that are not on disk."""
        self._state.visit(self._shows(look), self._state.in_memory)

    def pin(self) -> PinnedState | None:
        """Pin the runs on disk for `visit`, in any thread, while steps go on; None: there are
        none."""
        return self._state.pin()

    def places(self, version: StateVersion) -> Iterator[tuple[StateRun, int]]:
        """Runs, without values, of state that is all on disk, each with its first byte in the
        stream of a version."""
        assert self._state.nvme is not None
        for i, block in enumerate(self._state.nvme.blocks):
            for run in self._runs_of(block, self._unread(block)):
                yield run, version.place(i, run.plane, int(run.values.storage_offset()))

    @torch.no_grad()
    def fill(self, source: StateSource, *, whole: bool = False) -> None:
        """Ask `source` for new values of every run. What lies on disk is committed at once.

        whole: `source` has values for every run, so none is read from the disk before.
        """

        def fill(block: Block, planes: Planes) -> None:
            runs = self._runs_of(block, planes)
            if whole and sum([run.values.numel() for run in runs]) < block.numel * len(planes):
                for plane in planes.values():  # on disk, what no parameter has is zero
                    plane.zero_()
            for run in runs:
                values = source(run)
                if values is not None:
                    copy_alone(run.values, values)

        if self._overwrite is None:
            self._state.overwrite(fill, whole=whole)
        else:
            self._overwrite(fill, whole)

    def _shows(self, look: StateVisitor) -> BlockFiller:
        def show(block: Block, planes: Planes) -> None:
            for run in self._runs_of(block, planes):
                look(run)

        return show

    def _unread(self, block: Block) -> Planes:
        return {
            plane.name: torch.empty(block.numel, dtype=DTYPES[plane.dtype], device="meta")
            for plane in self._state.layout_of(block).planes
        }

    def _runs_of(self, block: Block, planes: Planes) -> list[StateRun]:
        names, has = self._names, self._state.columns.has
        return [
            StateRun(names[part.param], plane, part.param_offset, values[inside(part)])
            for part in block.segments
            for plane, values in planes.items()
            if has(part.param, plane)
        ]


def inside(part: BlockSegment) -> slice:
    """Slice of a part in its block."""
    return slice(part.offset, part.offset + part.numel)
