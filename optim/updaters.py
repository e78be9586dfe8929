"""The update path as one interface; here the CPU's, in `triton_path.py` the device's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from . import cpu_path
from .compiled_path import CompiledUpdate
from .cpu_path import NOTHING_CHANGED, CpuWorkers, Piece, StepInputs
from .report import Traffic
from .rules import UpdateRule
from .space import Block

Planes = dict[str, Tensor]  # plane name -> [n]
PiecesOf = Callable[[Block, Planes], Sequence[Piece]]


class Updater(Protocol):
    """Updates blocks whose state lies in a staging buffer, and blocks whose state is resident."""

    @property
    def name(self) -> str: ...

    def update_staged(self, block: Block, planes: Planes, pieces_of: PiecesOf) -> bool:
        """Update one block in host memory; done on return. False where it has no gradient."""
        ...

    def update_resident(
        self, blocks: Iterable[tuple[Block, Planes]], slabs: Planes, pieces_of: PiecesOf
    ) -> None:
        """Update blocks that lie on the compute device, as views into `slabs`."""
        ...

    def traffic(self) -> Traffic:
        """Bytes moved between host and device so far."""
        ...


@dataclass(frozen=True, slots=True)
class CpuUpdater:
    """State in host memory, updated there."""

    workers: CpuWorkers
    rule: UpdateRule
    inputs: StepInputs = NOTHING_CHANGED
    compiled: CompiledUpdate | None = None

    @property
    def name(self) -> str:
        return "cpu" if self.compiled is None else "cpu-compiled"

    def update_staged(self, block: Block, planes: Planes, pieces_of: PiecesOf) -> bool:
        pieces = pieces_of(block, planes)
        self._update(pieces)
        return bool(pieces)

    def update_resident(
        self, blocks: Iterable[tuple[Block, Planes]], slabs: Planes, pieces_of: PiecesOf
    ) -> None:
        self._update([piece for block, planes in blocks for piece in pieces_of(block, planes)])

    def _update(self, pieces: Sequence[Piece]) -> None:
        if self.compiled is not None:
            self.compiled.update(pieces, self.inputs)
        else:
            cpu_path.update(self.workers, self.rule, pieces, self.inputs)

    def traffic(self) -> Traffic:
        return Traffic()


def cpu_updater(rule: UpdateRule, cpu_path: str) -> CpuUpdater:
    """The updater of a CPU path by its name. Raises ValueError where it cannot work here."""
    compiled = CompiledUpdate(rule) if cpu_path == "compile" else None
    return CpuUpdater(CpuWorkers(), rule, compiled=compiled)
