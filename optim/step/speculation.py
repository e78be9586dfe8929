"""Speculation: a thread updates blocks on disk while a backward runs, before their step.

    add     the gradient of some blocks is final
    stop    no further read or update; each row knows whether it was updated, and with what inputs

A block is updated in a staging buffer and written as a new version. No weight changes, so nobody
sees the update, and to undo it is to drop that version (ADR 0002). The machine chooses what is done
next (`optim.state.machine`).
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from gemini.nvme import Buffer
from gemini.optim.rules.speculation import BlockInputs
from gemini.optim.state.deferred_signals import DeferredSignals
from gemini.optim.state.machine import Do, Event, Row, next_action, note
from gemini.optim.state.nvme_state import NvmeState
from gemini.optim.state.pieces import SteppedViews
from gemini.optim.state.space import Block
from gemini.optim.update.updaters import CpuUpdater

from .tail import Gate

Mark = tuple[int, int]  # of a gradient as it is: see `BlockInputs`


class EarlyViews(SteppedViews, Protocol):
    """Views of an early update: final gradients, and memory for new weights."""

    def lend(self, buffer: Buffer | None) -> None:
        """Lend the buffer for new weights of blocks without `writes_parameters`."""
        ...

    def writes_parameters(self, block: Block) -> bool:
        """Whether the block's update writes parameters to their file, as a step does."""
        ...

    def read_ahead(self, block: Block) -> None:
        """Begin to read the gradient of one of the next `READS_AHEAD + 1` blocks to be updated."""
        ...

    def abandon(self) -> None:
        """Return gradients that were read ahead and are not needed."""
        ...

    def inputs_of(self, block: Block) -> tuple[tuple[object, int] | None, ...]:
        """Inputs of a block's parameters; see `BlockInputs.params`."""
        ...


class Bound:
    """Bound of the norm: whether the final gradients so far are sure to be clipped or skipped.

    max_norm: of order 2, unscaled; 0: no bound, and nothing is computed.
    """

    def __init__(self, updater: CpuUpdater, scale: float, max_norm: float) -> None:
        self._updater = updater
        self._limit = max_norm * scale
        self._power_sum = 0.0

    def is_passed_by(self, grad: Tensor) -> bool:
        """Add a gradient; returns whether the sum passes the bound."""
        if not self._limit:
            return False
        self._power_sum += self._updater.grad_sum([grad]).power_sum
        return not math.sqrt(self._power_sum) <= self._limit


class Speculation:
    """Updates of one backward. One thread owns the rows from the first `add` to `stop`."""

    def __init__(
        self,
        nvme: NvmeState,
        updater: CpuUpdater,
        views: EarlyViews,
        is_hopeless: Callable[[Tensor], bool],
    ) -> None:
        """is_hopeless: called with each gradient before its blocks are updated; once it is true, no
        update begins any more."""
        self._nvme = nvme
        self._state = nvme.state
        self._rows = {row.id: row for row in nvme.state.rows}
        self._updater = updater
        self._views = views
        self._is_hopeless = is_hopeless
        self._lock = threading.Lock()
        # blocks, final gradient and mark of each `add` that the thread has not taken
        self._coming: deque[tuple[Sequence[Block], Tensor | None, Mark]] = deque()
        self._is_stopped = False
        self._last: tuple[threading.Thread, Gate] | None = None  # thread, and what it opens
        self._is_running = False

    def add(self, blocks: Sequence[Block], grad: Tensor | None, mark: Mark) -> None:
        """Update these blocks of a chunk, whose gradient is final.

        grad: None where it is not in memory. mark: of the gradient as it is now.
        """
        # The lock covers one decision, whether a running thread still looks at `_coming`, or a new
        # one must start. Nobody waits for a disk under it.
        with self._lock:
            if self._is_stopped or not blocks:
                return
            self._coming.append((blocks, grad, mark))
            if self._is_running:
                return
            self._is_running = True
        # Two threads at once would both own the rows.
        self.wait()  # the last thread puts its buffers away
        gate = Gate()
        thread = threading.Thread(target=self._run, args=(gate,), name="optim-early")
        self._last = thread, gate
        try:
            with DeferredSignals():  # a handler that raised in `start` would leave half a thread
                thread.start()
        except RuntimeError:  # the system has no room for a thread: the step does it all
            self._last = None
            self._goes_on(stop=True)

    def wait(self) -> None:
        """Wait for the thread, which ends when `_coming` is empty or after `stop`.

        A thread that an interrupt kept from starting is not waited for.
        """
        if self._last is not None and self._last[0].ident is not None:
            self._last[1].wait()

    @property
    def is_idle(self) -> bool:
        """Whether no thread runs and no added block is left to update."""
        return not self._is_running

    def stop(self) -> None:
        """Stop: begin no update any more, and wait for the thread. Any number of times."""
        with self._lock:
            self._is_stopped = True
            self._coming.clear()
        self.wait()

    @torch.no_grad()
    def _run(self, gate: Gate) -> None:
        try:
            if self._goes_on():
                self._update_all()
        # A thread has no caller: an error that is not noted would be lost.
        except BaseException as error:  # the step raises it
            note(self._state, Event.FAILED, None, error)
            self._goes_on(stop=True)
        finally:
            gate.open()

    def _goes_on(self, *, stop: bool = False) -> bool:
        """Whether more blocks came; else this thread ends.

        The next gradient starts another thread, which waits for the end of this one.
        """
        with self._lock:
            self._is_stopped |= stop
            self._is_running = bool(self._coming) and not self._is_stopped
            return self._is_running

    def _update_all(self) -> None:
        self._views.lend(self._nvme.spare)
        note(self._state, Event.BACKWARD)
        try:
            while self._act() or self._goes_on(stop=not self._state.speculates):
                pass
        finally:
            note(self._state, Event.STOPPED)
            while self._act():
                pass
            self._views.lend(None)
            self._views.abandon()

    def _act(self) -> bool:
        """Carry one action out; returns whether there was one."""
        state, nvme = self._state, self._nvme
        if self._is_stopped and state.speculates:
            note(state, Event.STOPPED)
        if state.speculates and not state.finals:
            self._come()
        action = next_action(state)
        if action is None:
            return False
        do, row, _ = action
        assert row is not None
        if do is Do.UPDATE:
            self._update(row)
            if not (state.free or state.cached):
                nvme.collect()
        else:
            if do is Do.WRITE and not row.is_complete:
                nvme.remember(row)
            nvme.carry_out(do, row)
            if do is Do.READ and row.is_early:
                self._views.read_ahead(row.block)
        return True

    def _come(self) -> None:
        """Take the next gradient: its blocks may be updated, if it is not hopeless."""
        with self._lock:
            if not self._coming or self._is_stopped:
                return
            blocks, grad, mark = self._coming.popleft()
        if grad is not None and self._is_hopeless(grad):
            self._goes_on(stop=True)
            return
        rows = [self._rows[block.id] for block in blocks if block.id in self._rows]
        for row in rows:
            row.assumed = BlockInputs(self._updater.inputs, self._views.inputs_of(row.block), mark)
        note(self._state, Event.FINAL, None, rows)

    def _update(self, row: Row) -> None:
        nvme, views = self._nvme, self._views
        try:
            if self._updater.update_staged(row.block, nvme.planes(row), views):
                row.is_complete = views.writes_parameters(row.block)
                event = Event.UPDATED
            else:
                event = Event.UNCHANGED
        except BaseException as error:
            note(self._state, Event.FAILED, row, error)
        else:
            note(self._state, event, row)
