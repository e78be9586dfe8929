"""Stream of state: runs, block by block, and the way back; checkpoints are made from it.

A run is the part of one plane of one parameter that one block holds. Blocks come in storage order,
those on disk one staging buffer at a time, so neither way needs more memory than there was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from gemini.optim.rules.state_layout import Columns
from gemini.units import BlockId

from .pieces import Planes
from .space import Block, BlockSegment
from .tiered_state import TieredState

if TYPE_CHECKING:
    from .disk.state_version import StateVersion


@dataclass(frozen=True, slots=True)
class StateRun:
    """Elements [start, start + n) of one plane of one parameter, flat in the order of its storage.

    `values` [n] is a view that is good until the visitor returns: copy what is to be kept.
    """

    name: str  # of the parameter
    plane: str
    start: int
    values: Tensor

    @property
    def elements(self) -> slice:
        return slice(self.start, self.start + self.values.numel())


@dataclass(frozen=True, slots=True)
class RunSpec:
    """A run without its values."""

    name: str
    plane: str
    dtype: str
    start: int
    numel: int
    block: BlockId


StateVisitor = Callable[[StateRun], None]
# new values [n] for a run; None leaves it as it is, or as the source has filled it in place
StateSource = Callable[[StateRun], Tensor | None]


def list_runs(tiered_state: TieredState, names: Sequence[str]) -> list[RunSpec]:
    """Runs that `visit_runs` shows, in its order."""
    return [
        RunSpec(names[part.param], plane.name, plane.dtype, part.param_offset, part.numel, block.id)
        for block in tiered_state.visit_order
        for part in block.segments
        for plane in tiered_state.layout.planes
        if tiered_state.columns.has(part.param, plane.name)
    ]


def pinned_runs(
    tiered_state: TieredState, names: Sequence[str], version: StateVersion
) -> Iterator[tuple[RunSpec, int]]:
    """Runs that `visit_runs` shows of state that is all on disk, each with its first byte in the
    stream of the version."""
    assert tiered_state.nvme is not None
    for i, block in enumerate(tiered_state.nvme.blocks):
        for part in block.segments:
            for plane, at in version.places(i, part):
                if not tiered_state.columns.has(part.param, plane.name):
                    continue
                name = names[part.param]
                yield (
                    RunSpec(name, plane.name, plane.dtype, part.param_offset, part.numel, block.id),
                    at,
                )


def visit_runs(tiered_state: TieredState, names: Sequence[str], look: StateVisitor) -> None:
    """Show every run of this rank's state. `names[i]` is that of parameter i of the space."""
    columns = tiered_state.columns
    tiered_state.visit(lambda block, planes: _each(columns, block, planes, names, look))


class StateSnapshot:
    """Snapshot of this rank's state, to be shown while training goes on.

    Blocks in memory are shown by `visit_resident`, before the next step changes them. Blocks on
    disk keep the version they have until `visit_disk`, in any thread, has shown them. Close it.
    """

    def __init__(self, tiered_state: TieredState, names: Sequence[str]) -> None:
        self._tiered_state = tiered_state
        self._names = names
        self._pinned = tiered_state.pin()

    def visit_resident(self, look: StateVisitor) -> None:
        for block in (*self._tiered_state.resident, *self._tiered_state.host):
            shown = self._tiered_state.shown(block)
            _each(self._tiered_state.columns, block, shown, self._names, look)

    def visit_disk(self, look: StateVisitor) -> None:
        columns, names = self._tiered_state.columns, self._names
        if self._pinned is not None:
            self._pinned.visit(lambda block, planes: _each(columns, block, planes, names, look))

    def close(self) -> None:
        """Let go of what was not shown. Any number of times."""
        if self._pinned is not None:
            self._pinned.close()


def fill_runs(
    tiered_state: TieredState,
    names: Sequence[str],
    source: StateSource,
    filled: Callable[[Block, Planes], None] = lambda block, planes: None,
    *,
    whole: bool = False,
) -> None:
    """Ask `source` for new values of every run. What lies on disk is committed at once.

    filled: sees each block when its planes are as they will stay.
    whole: `source` has values for every run, so none is read from the disk before.
    """

    def put(run: StateRun) -> None:
        values = source(run)
        if values is not None:
            run.values.copy_(values)

    def fill(block: Block, planes: Planes) -> None:
        _each(tiered_state.columns, block, planes, names, put)
        filled(block, planes)

    tiered_state.overwrite(fill, whole=whole)


def _each(
    columns: Columns, block: Block, planes: Planes, names: Sequence[str], look: StateVisitor
) -> None:
    for part in block.segments:
        for plane, values in planes.items():
            if columns.has(part.param, plane):
                look(StateRun(names[part.param], plane, part.param_offset, values[inside(part)]))


def inside(part: BlockSegment) -> slice:
    """Slice of a part in its block."""
    return slice(part.offset, part.offset + part.numel)
