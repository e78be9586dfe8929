"""Updaters, one interface of all update paths: the CPU's; `triton_update.py` has the device's."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor

from gemini.optim.rules.config import UpdateFacts, wants_compiled
from gemini.optim.rules.report import Traffic
from gemini.optim.rules.rule import UpdateRule
from gemini.optim.state.pieces import BlockViews, Piece, Planes, Resident
from gemini.optim.state.space import Block
from gemini.ranges import named

from . import cpu_update
from .cpu_update import NOTHING_CHANGED, CpuWorkers, GradSum, StepInputs, TileSums, summed

if TYPE_CHECKING:
    from .compiled_update import CompiledUpdate, Mix

log = logging.getLogger("gemini")


@dataclass(frozen=True, slots=True)
class CpuUpdater:
    """Updater of state in host memory, by the host."""

    workers: CpuWorkers
    rule: UpdateRule
    inputs: StepInputs = NOTHING_CHANGED
    compiled: CompiledUpdate | None = None
    keeps_blocks: ClassVar = False

    @property
    def name(self) -> str:
        return "cpu" if self.compiled is None else "cpu-compiled"

    def update_block(self, block: Block, planes: Planes, views: BlockViews) -> None:
        with named("update", "block", block.id):
            self.update(views.pieces(block, planes))

    def update_resident(self, slab: Resident, views: BlockViews) -> None:
        self.update(
            [piece for block in slab.blocks for piece in views.pieces(block, slab.planes(block))]
        )

    def update(self, pieces: Sequence[Piece]) -> None:
        """Update all pieces by one step."""
        if self.compiled is not None:
            self.compiled.update(self.workers, pieces, self.inputs)
        else:
            cpu_update.update(self.workers, self.rule, pieces, self.inputs)

    def tile_sums(self, grads: Sequence[Tensor], norm_type: float) -> TileSums:
        """Sums of tiles; see `cpu_update.tile_sums`."""
        if self.compiled is not None:
            return self.compiled.tile_sums(self.workers, grads, norm_type)
        return cpu_update.tile_sums(self.workers, grads, norm_type)

    def grad_sum(self, grads: Sequence[Tensor], norm_type: float = 2.0) -> GradSum:
        """Sum up `tile_sums`."""
        return summed(self.tile_sums(grads, norm_type), norm_type)

    def traffic(self) -> Traffic:
        return Traffic()


def alone(failure: str | None) -> str | None:
    """Agreement of a process without others: its own failure."""
    return failure


def cpu_updater(
    rule: UpdateRule,
    cpu_path: str,
    facts: UpdateFacts,
    mixes: Callable[[], Iterable[Mix]],
    agree: Callable[[str | None], str | None] = alone,
) -> CpuUpdater:
    """Make the updater that a CPU path means for these facts. Collective.

    mixes: dtypes that will be updated. agree: from this rank's failure or None to that of any rank.
    Raises ValueError and KernelBuildError where `"compile"` is asked for and is not possible.
    """
    if not wants_compiled(cpu_path, facts):
        return CpuUpdater(CpuWorkers(), rule)
    from .compiled_update import CompiledUpdate
    from .kernel_cache import KernelBuildError

    compiled, failure = None, None
    try:
        compiled = CompiledUpdate(rule, mixes())
    except KernelBuildError as error:
        failure = str(error)
    failure = agree(failure)
    if failure is None:
        return CpuUpdater(CpuWorkers(), rule, compiled=compiled)
    if cpu_path == "compile":
        raise KernelBuildError(f'cpu_path="compile" is not possible here: {failure}')
    log.warning(
        "the CPU update is not compiled: it takes up to 2 times as long, and its bits are those of "
        'cpu_path="eager", which does without this message: %s',
        failure,
    )
    return CpuUpdater(CpuWorkers(), rule)
