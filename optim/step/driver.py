"""Driver of a step of one target's state: the same for plain modules and for shards.

    submit     reads of blocks on disk begin, in their order
    prepare    each block is updated, and written next to its last version
    (vote)     all ranks and targets: the whole step counts, or nothing of it
    confirm    versions on disk are committed, and blocks in memory are updated; or `undo`

The machine chooses the next action (`optim.state.machine`). Up to `confirm` nothing that counts has
changed (ADR 0002).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from gemini.optim.matrices.updater import MatrixUpdater
from gemini.optim.rules.report import StepReport, Traffic
from gemini.optim.state.deferred_signals import DeferredSignals
from gemini.optim.state.machine import (
    Do,
    Event,
    Phase,
    Row,
    State,
    next_action,
    note,
)
from gemini.optim.state.nvme_state import NvmeState
from gemini.optim.state.pieces import Updater
from gemini.optim.state.space import Block
from gemini.optim.state.tiered_state import BlockViews, TieredState
from gemini.units import BlockId


class Versions(Protocol):
    """Other files than the state's that a step writes, and that count together with it."""

    def check_step(self, also_bytes: int) -> None:
        """Raise if a step must not begin that writes these files, and `also_bytes` more."""
        ...

    def flush(self) -> None:
        """Wait for all writes. Raises their error."""
        ...

    def commit(self, step: int) -> None:
        """Make the written versions count. Does not raise after a `flush`."""
        ...

    def rollback(self) -> None:
        """Forget the written versions."""
        ...


# Updates blocks in memory, by taking all of them from the iterator: each is updated when taken.
InMemory = Callable[[Iterator[Block]], None]


def at_once(blocks: Iterator[Block]) -> None:
    """Update blocks in memory before the step returns."""
    deque(blocks, maxlen=0)


class TargetStep:
    """One step of one target's state. `number` counts from 1.

    `files` are committed before the state: `nvme.recover` finds the step before in either file.

    in_order: the next step begins with the first block; else with the last of this one, which is
    still in memory. held: blocks whose early update stands. follow: sets the parameters of a held
    block to its new weights or masters [n].
    """

    def __init__(
        self,
        tiered_state: TieredState,
        updater: Updater | MatrixUpdater,
        views: BlockViews,
        number: int,
        files: Versions | None = None,
        *,
        in_order: bool = False,
        held: frozenset[BlockId] = frozenset(),
        follow: Callable[[Block, Tensor], None] | None = None,
    ) -> None:
        self._tiered_state = tiered_state
        self._nvme = tiered_state.nvme
        self._updater = updater
        self._views = views
        self._number = number
        self._files = files
        # Ranks exchange buckets of matrices in one order, so their blocks come in it, too.
        self._in_order = in_order or isinstance(updater, MatrixUpdater)
        self._held = held
        self._follow = follow
        self._state = State([]) if self._nvme is None else self._nvme.state
        self._matrices = updater if isinstance(updater, MatrixUpdater) else None
        self._rows = {} if self._matrices is None else {row.id: row for row in self._state.rows}
        self.num_done = 0  # of the blocks that are held, such as nothing is left to do for

    @property
    def updater(self) -> Updater | MatrixUpdater:
        return self._updater

    @property
    def phase(self) -> Phase:
        return self._state.phase

    @property
    def num_blocks(self) -> int:
        """Number of blocks on disk."""
        return len(self._state.rows)

    @property
    def num_held(self) -> int:
        """Number of blocks on disk that were updated before the step."""
        return len(self._held)

    def submit(self) -> None:
        """Begin the step; call `undo` if this raises.

        Raises where the disk's budget has no room for the step, and an error from before it.
        """
        state, nvme = self._state, self._nvme
        if state.error is not None:
            raise state.error
        if self._files is not None:
            self._files.check_step(0 if nvme is None else nvme.written_bytes_per_step)
        # Asked before anything is begun, and before ranks vote: a budget that is passed is an error
        # on all ranks, with nothing to undo.
        if nvme is not None:
            nvme.check_step()
            expected = [row.block for row in state.order if row.id not in self._held]
            self._views.expect(expected)
            self.num_done = sum(row.is_complete for row in state.rows if row.id in self._held)
        note(state, Event.ASKED, None, self._held)

    def prepare(
        self,
        signals: DeferredSignals | None = None,
        watch: Callable[[BlockId], None] | None = None,
    ) -> BaseException | None:
        """Update all blocks on disk as new versions. Returns the error, if there was one.

        signals: a deferred one ends the step. watch: told of every block whose parameters are now
        those of this step.
        """
        state, nvme = self._state, self._nvme
        if watch is not None:
            for complete in state.rows:
                if complete.is_complete:
                    watch(complete.id)
        error = self._begin_matrices()
        if error is not None:
            note(state, Event.FAILED, None, error)
        self._look_for(signals)
        while (action := next_action(state)) is not None:
            do, row, said = action
            if do is Do.VOTE:
                error = said
                break
            assert nvme is not None and row is not None
            # Updates run here and not in the executor: their errors are those of this step, whose
            # views and updater they use.
            if do is Do.UPDATE or do is Do.PLACE:
                if self._update(nvme, row, do) and watch is not None:
                    watch(row.id)
                self._look_for(signals)
                # Writes that have ended have buffers that the next read can take without waiting.
                if not (state.free or state.cached):
                    nvme.collect()
            else:
                nvme.carry_out(do, row)
        assert error is not None or state.phase is Phase.VOTING or nvme is None
        return error or self._settled()

    def join(self) -> None:
        """Take part in exchanges of matrices that others wait for, in a step that failed here."""
        if self._matrices is not None:
            self._matrices.join()

    def _begin_matrices(self) -> BaseException | None:
        """Begin all matrices, those without a block on this disk too. Returns the error."""
        matrices, state = self._matrices, self._tiered_state
        if matrices is None:
            return None
        try:
            on_disk = [row.block for row in self._state.rows]
            matrices.begin(on_disk, state.resting(), self._views)
            matrices.ready(self._views)
        except BaseException as error:
            return error
        return None

    def _look_for(self, signals: DeferredSignals | None) -> None:
        """Fail the step if a signal was deferred and blocks are left."""
        state = self._state
        if signals is not None and signals.pending and (state.todo or state.reads):
            error = InterruptedError("the step was interrupted and undone")
            note(state, Event.FAILED, None, error)

    def _update(self, nvme: NvmeState, row: Row, do: Do) -> bool:
        """Update one block, or place its weight. Returns whether it worked."""
        block, views = row.block, self._views
        try:
            if do is Do.PLACE:
                assert self._follow is not None
                row.is_touched = True
                self._follow(block, nvme.fetched(row))
                event = Event.PLACED
            else:
                nvme.save(row, views.save)
                if not self._updater.update_staged(block, nvme.planes(row), views):
                    event = Event.UNCHANGED
                elif self._matrices is not None and self._matrices.is_waiting(block):
                    event = Event.WAITING
                else:
                    nvme.save_weight(row, views.save)
                    event = Event.UPDATED
            note(self._state, event, row)
            if self._matrices is not None:
                for done in self._matrices.ready(views):
                    note(self._state, Event.UPDATED, self._rows[done.id])
        except BaseException as error:
            note(self._state, Event.FAILED, row, error)
            return False
        return True

    def _settled(self) -> BaseException | None:
        """Wait until all prepared versions are on disk. Returns the error.

        Copies of parameters are ordered before later work of the device, as blocks in memory may be
        updated much later.
        """
        # Returned and not raised: the caller must take part in the vote first, for which the other
        # ranks wait.
        try:
            self._views.end()
            if self._nvme is not None:
                self._nvme.flush()
            if self._files is not None:
                self._files.flush()
        except BaseException as error:
            return error
        return None

    def confirm(self, in_memory: InMemory = at_once) -> None:
        """Commit the versions on disk, and let `in_memory` update the blocks in memory."""
        state, nvme = self._state, self._nvme
        note(state, Event.VOTED)
        while (action := next_action(state)) is not None:
            do, row, _ = action
            if do is Do.COMMIT:
                self._commit()
            elif do is Do.RESIDENT:
                # Torn or whole, the pass is over: a phase that stayed RESIDENT would refuse to load
                # the checkpoint that mends it.
                try:
                    in_memory(self._updates_in_memory())
                finally:
                    note(state, Event.RESIDENT)
            else:
                assert nvme is not None and row is not None
                nvme.carry_out(do, row)

    def _updates_in_memory(self) -> Iterator[Block]:
        state, views = self._tiered_state, self._views
        if isinstance(self._updater, MatrixUpdater):
            return state.torn_by(self._matrices_in_memory(self._updater))
        return state.update_in_memory(self._updater, views)

    def _matrices_in_memory(self, updater: MatrixUpdater) -> Iterator[Block]:
        state, views = self._tiered_state, self._views
        yield from updater.update_in_memory(state.resting(), views)
        views.end()

    def _commit(self) -> None:
        if self._files is not None:
            self._files.commit(self._number)
        if self._nvme is not None:
            self._nvme.commit(self._number, in_order=self._in_order)
        else:
            note(self._state, Event.COMMITTED, None, self._in_order)

    def undo(self) -> None:
        """Restore parameters and state of the last step, however far this one came."""
        state, nvme = self._state, self._nvme
        # First return borrowed buffers: restoring reads through them.
        self._views.abandon()
        if self._files is not None:
            self._files.rollback()
        if nvme is None:
            return
        nvme.store.check_process()
        note(state, Event.UNDO)
        while (action := next_action(state)) is not None:
            do, row, _ = action
            if do is Do.ROLLBACK:
                nvme.rollback()
            elif do is Do.RESTORE:
                assert row is not None
                nvme.restore(row, self._views.restore)
                note(state, Event.RESTORED, row)
            else:
                assert row is not None
                nvme.carry_out(do, row)

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


def alone(error: BaseException | None) -> None:
    """Vote of a single rank: raises its own error."""
    if error is not None:
        raise error


@torch.no_grad()
def take(
    steps: Sequence[TargetStep],
    signals: DeferredSignals,
    agree: Callable[[BaseException | None], None] = alone,
    in_memory: InMemory = at_once,
) -> StepReport:
    """Take the step of all targets: it counts on all of them, or on none.

    agree: called with this rank's error or None; raises where any rank has an error.
    """
    before = [step.moved() for step in steps]
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
        step.confirm(in_memory)
    after = [step.moved() for step in steps]
    return StepReport(
        traffic=sum((b[0] - a[0] for a, b in zip(before, after, strict=True)), Traffic()),
        stalled_seconds=sum(b[1] - a[1] for a, b in zip(before, after, strict=True)),
        nvme_written_total=sum(step.written_total for step in steps),
        update_path=steps[0].updater.name,
    )
