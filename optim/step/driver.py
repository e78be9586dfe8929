"""Driver of a step of one target's state: the same for plain modules and for shards.

    submit     reads of blocks on disk begin, in their order
    prepare    each block is updated, and written next to its last version
    (vote)     all ranks and targets: the whole step counts, or nothing of it
    confirm    versions on disk are committed, and blocks in memory are updated; or `undo`

Up to `confirm` nothing that counts has changed (ADR 0002).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeAlias, cast

import torch

from gemini.optim.rules.report import StepReport, Traffic
from gemini.optim.state.deferred_signals import DeferredSignals
from gemini.optim.state.pieces import BlockViews, Updater
from gemini.optim.state.space import Block
from gemini.optim.state.tiered_state import TieredState

if TYPE_CHECKING:
    from gemini.nvme import BlockStore
    from gemini.optim.matrices.updater import MatrixUpdater
    from gemini.optim.state.nvme_state import NvmeState

    from .target import Target


class Step:
    """One step of one target's state. `number` counts from 1.

    files: with parameters that count together with the state, and the bytes that the step writes
        there. They are committed before the state: `nvme.recover` finds the step before in either.

    in_order: the next step begins with the first block; else with the last of this one, which is
    still in memory.

    target: of the state; it counts the step. taken: parameters that the step updates.
    """

    def __init__(
        self,
        tiered_state: TieredState,
        updater: Updater | MatrixUpdater,
        views: BlockViews,
        number: int,
        files: tuple[BlockStore, int] | None = None,
        *,
        in_order: bool = False,
        target: Target,
        taken: Sequence[int],
    ) -> None:
        self._tiered_state = tiered_state
        self._nvme = tiered_state.nvme
        self._updater = updater
        self._views = views
        self._number = number
        self._files: BlockStore | None
        self._files, self._file_bytes = files or (None, 0)
        # that keeps blocks until others of their matrices have come
        self._matrices = cast("MatrixUpdater", updater) if updater.keeps_blocks else None
        # Ranks exchange buckets of matrices in one order, so their blocks come in it, too.
        self._in_order = in_order or self._matrices is not None
        self.target, self.taken = target, taken

    @property
    def views(self) -> BlockViews:
        return self._views

    @property
    def updater(self) -> Updater | MatrixUpdater:
        return self._updater

    def submit(self) -> None:
        """Begin the step; call `undo` if this raises.

        Raises where the disk's budget has no room for the step.
        """
        nvme = self._nvme
        if self._files is not None:
            more = 0 if nvme is None else nvme.written_bytes_per_step
            self._files.check_step(self._file_bytes + more)
        # Asked before anything is begun, and before ranks vote: a budget that is passed is an error
        # on all ranks, with nothing to undo.
        if nvme is not None:
            nvme.check_step()
            nvme.begin(self._views)

    def prepare(self, signals: DeferredSignals | None = None) -> BaseException | None:
        """Update all blocks on disk as new versions. Returns the error, if there was one.

        signals: a deferred one ends the step.
        """
        # Returned and not raised: the caller must take part in the vote first, for which the other
        # ranks wait.
        nvme = self._nvme
        try:
            self._begin_matrices()
            if nvme is not None:
                self._update_on_disk(nvme, signals)
                nvme.drain()
            if self._files is not None:
                self._files.flush()
        except BaseException as error:
            return error
        return None

    def join(self) -> None:
        """Take part in exchanges of matrices that others wait for, in a step that failed here."""
        if self._matrices is not None:
            self._matrices.join()

    def _begin_matrices(self) -> None:
        """Begin all matrices, those without a block on this disk too."""
        if self._matrices is not None:
            nvme = self._nvme
            on_disk = [] if nvme is None else [span.record.block for span in nvme.flow.spans]
            self._matrices.begin(on_disk, self._tiered_state.blocks_in_memory(), self._views)
            for block, _ in self._matrices.ready(self._views):
                raise AssertionError(f"block {block.id} is updated before it was read")

    def _update_on_disk(self, nvme: NvmeState, signals: DeferredSignals | None) -> None:
        """Update every block on disk, in its buffer."""
        flow, views, matrices = nvme.flow, self._views, self._matrices
        spans = {} if matrices is None else {span.id: span for span in flow.spans}
        while True:
            if signals is not None and signals.pending and (flow.todo or flow.reads):
                raise InterruptedError("the step was interrupted and undone")
            span = nvme.next()
            if span is None:
                return
            block = span.record.block
            if not views.touches(block):  # it stays as it is
                flow.give(span)
                views.updated(block)
                continue
            nvme.save(span)
            copies = self._updater.update_block(block, span.record.planes(span.buffer), views)
            if matrices is None:
                flow.put(span, copies)
                continue
            if not matrices.is_waiting(block):
                flow.put(span, copies)
            for done, copies in matrices.ready(views):  # those that waited for others of the step
                flow.put(spans[done.id], copies)
                nvme.limit_leaving()

    def confirm(self, *, settles: bool = False) -> None:
        """Commit the versions on disk, and update the blocks in memory.

        settles: wait for copies to host memory; else the next reader waits.
        """
        if self._files is not None:
            self._files.commit(self._number)
        if self._nvme is not None:
            self._nvme.commit(self._number, in_order=self._in_order)
        self._views.end()  # of what is in files; its buffers are wanted elsewhere
        if self._nvme is not None:
            # before updates in memory: the disk would have nothing to do
            self._nvme.flow.read_ahead()
        for block in self._updates_in_memory():
            self._views.updated(block)
        if settles:
            self._tiered_state.settle()

    def _updates_in_memory(self) -> Iterator[Block]:
        state, views = self._tiered_state, self._views
        if self._matrices is not None:
            return state.torn_by(self._matrices_in_memory(self._matrices))
        return state.update_in_memory(cast("Updater", self._updater), views)

    def _matrices_in_memory(self, updater: MatrixUpdater) -> Iterator[Block]:
        state, views = self._tiered_state, self._views
        for block, copies in updater.update_in_memory(state.blocks_in_memory(), views):
            state.put(copies)
            yield block

    def undo(self) -> None:
        """Restore parameters and state of the last step, however far this one came."""
        # First return borrowed buffers, which no copy fills any more: restoring reads through them.
        if self._nvme is not None:
            self._nvme.flow.settle()
        self._views.end()
        if self._files is not None:
            self._files.rollback()
        if self._nvme is not None:
            self._nvme.undo(self._views.restore)

    def moved(self) -> tuple[Traffic, float]:
        """Bytes and seconds of waiting since the state was made."""
        return (
            self._tiered_state.traffic() + self._updater.traffic(),
            self._tiered_state.stalled_seconds,
        )

    @property
    def written_total(self) -> int:
        """Bytes to disk since the state was made."""
        return self._tiered_state.nvme_written_total


# Called with this rank's error or None; raises where any rank has an error.
Agree: TypeAlias = Callable[[BaseException | None], None]


def alone(error: BaseException | None) -> None:
    """Vote of a single rank: raises its own error."""
    if error is not None:
        raise error


@torch.no_grad()
def take_step(steps: Sequence[Step], agree: Agree = alone) -> StepReport:
    """Take one step of all targets: it counts on all of them, or on none."""
    before = [step.moved() for step in steps]
    try:
        # Weights, copies and counts change together: a signal between them would tear the step.
        with DeferredSignals() as signals:
            try:
                for step in steps:
                    step.target.before_step()
                _carry_out(steps, signals, agree)
            except BaseException:
                for step in steps:
                    step.target.undo()
                raise
            for step in steps:
                step.target.count(step)
    finally:
        for step in steps:
            step.target.after_step()
    moved = [
        (now - then + step.target.gathered_since(), waited - waited_then)
        for step, (then, waited_then) in zip(steps, before, strict=True)
        for now, waited in [step.moved()]
    ]
    return StepReport(
        steps[0].target.outcome(),
        sum((traffic for traffic, _ in moved), Traffic()),
        sum(seconds for _, seconds in moved),
        sum(step.written_total for step in steps),
        steps[0].updater.name,
    )


def _carry_out(steps: Sequence[Step], signals: DeferredSignals, agree: Agree) -> None:
    error: BaseException | None = None
    # One after the other: targets on one disk share its speed, and the second need not begin where
    # the first has failed.
    for step in steps:
        try:
            step.submit()
            error = step.prepare(signals)
        except BaseException as raised:
            error = raised
        if error is not None:
            break
    # The others wait in exchanges of matrices, and would not come to the vote.
    for step in steps if error is not None else ():
        step.join()
    try:
        agree(error)
    except BaseException:
        for step in steps:
            step.undo()
        raise
    for step in steps:
        step.confirm()
