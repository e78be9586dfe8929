"""Tail of an engine's step: blocks are updated during the next forward (ADR 0002).

    begin     step() has agreed; from now on whoever reads a chunk (a gather, a module, an operator)
              waits until it is updated (`gemini.runtime.schedule.updating`)
    settle    wait for the end; where a disk failed, undo the step and raise the error

A thread updates everything (`optim.step.tail`). What it launches on a device runs beside what the
thread that trains launches; before a gate opens, the latter comes behind it (`Memory.join`).

In the tail all ranks vote, in a process group of its own, on whether every disk did its part. Until
then nothing counts on any rank. A rank whose disk failed goes on to the vote, so that none hangs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, cast

from gemini.chunk.storage import Chunk
from gemini.comm.communicator import Communicator
from gemini.optim.rules.report import TailResult
from gemini.optim.state.deferred_signals import DeferredSignals, TailSignals
from gemini.optim.state.tiered_state import TieredState
from gemini.optim.step.driver import Step, alone
from gemini.placement.tiers import Tier
from gemini.placement.timetable.updates import goes_on
from gemini.ranges import named
from gemini.runtime.overlap import UpdateOverlap
from gemini.runtime.passes import Passes
from gemini.runtime.schedule.planning import PlanInUse
from gemini.runtime.weights import Weights
from gemini.tickets import Ticket

from .agreement import raise_failures, raise_what_tore
from .views import ShardViews

if TYPE_CHECKING:
    from gemini.optim.step.tail import Ended, Tail


class StepTail:
    """Tails of one engine's steps, of which at most one is under way."""

    def __init__(
        self, weights: Weights, passes: Passes, overlap: UpdateOverlap, in_use: PlanInUse
    ) -> None:
        self._sharding, self._weights, self._passes = weights.sharding, weights, passes
        self._overlap, self._storage = overlap, in_use.storage
        self._manager, self._ledger = in_use.manager, in_use.ledger
        self._tail: Tail | None = None
        self._signals: TailSignals | None = (
            None  # deferred, or whose handlers the main thread is to put back
        )

    @property
    def applies(self) -> bool:
        """Whether steps of this plan have a tail."""
        return goes_on(self._overlap.in_use())

    def begin(
        self,
        step: Step,
        tiered_state: TieredState,
        chunks: Sequence[Chunk],
        signals: TailSignals,
        forget: Callable[[], None],
    ) -> Ticket[TailResult]:
        """Go on in a thread with a step that was submitted.

        The views of the step keep the gradients that it reads. chunks: by shard of the state space.
        forget: takes counts of the step back.
        """
        from gemini.comm.leaving import ask_at_the_end
        from gemini.optim.step.tail import Gates, Tail

        views = cast("ShardViews", step.views)
        gates = Gates(tiered_state.space.blocks, len(chunks), views.let_go)
        views.watch = gates.updated
        self._storage.step_goes_on()
        assert self._overlap.communicator is not None
        agree, in_memory = partial(vote, self._overlap.communicator, raise_failures), alone
        if self._overlap.plan.blocks_on(Tier.HOST):
            in_memory = partial(vote, self._overlap.communicator, raise_what_tore)
        tail = Tail(step, agree, gates, signals, in_memory, self._sharding.backend.beside())

        self._tail, self._state, self._forget = tail, tiered_state, forget
        self._signals = signals
        # A program may end with this step; then its exit asks whether the step failed.
        ask_at_the_end(id(self), partial(_failure_of, tail.behind))
        self._ledger.hold(lambda: views.kept_bytes)
        of_chunk = {c.spec.id: gate for c, gate in zip(chunks, gates.gates, strict=True)}
        self._weights.updating.begin(of_chunk, tail.behind)
        tail.start()
        return tail.behind

    def settle(self) -> None:
        """Wait until the last step counts. Raises the error of a step that failed, once undone.

        Any thread may call it; of several that wait, one ends the step and raises. While another
        thread runs a pass, that one undoes the step, whose weights it uses, and raises too.
        """
        with self._passes.lock:
            self._settle_held()

    def _settle_held(self) -> None:
        tail = self._tail
        if tail is None:
            self._put_signals_back()
            return
        with named("wait for", "tail"):
            tail.behind.wait()
        if tail.error is not None and self._passes.has_pass_elsewhere():
            raise RuntimeError(
                "the last step failed, and is undone where another thread trains: read again "
                f"then. It ended with {type(tail.error).__name__}: {tail.error}"
            ) from tail.error
        self._put_signals_back()
        # An undo that a signal cuts off would leave weights of two steps.
        with DeferredSignals():
            self._ended()
            error = tail.error
            if error is not None and tail.is_torn:
                self._state.torn = error
            elif error is not None:
                self._undo(tail)
        if error is not None:
            raise error

    def end(self) -> None:
        """Wait for the tail and ignore its error: the state that it works on is about to go."""
        with self._passes.lock:
            if self._tail is not None:
                self._tail.behind.wait()
                self._ended()
            self._put_signals_back()

    def _put_signals_back(self) -> None:
        """Handlers as before the last tail; only the main thread may set them."""
        if self._signals is not None and self._signals.put_back():
            self._signals = None

    def _ended(self) -> None:
        from gemini.comm.leaving import was_asked

        self._tail = None
        was_asked(id(self))
        self._weights.updating.end()
        self._storage.step_has_ended()
        self._ledger.hold(int)

    def _undo(self, tail: Tail) -> None:
        """Undo the step, and drop what was computed from its weights: gathered payloads."""
        self._forget()
        # User writes since then were to weights of the step that is undone.
        for chunk in self._sharding.chunks:
            self._weights.user_writes.forget(chunk)
        self._manager.release_all()
        try:
            tail.step.undo()
        finally:
            self._weights.user_writes.stepped(tail.step.taken, self._storage.changed)
            self._weights.after_step()


def _failure_of(behind: Ended) -> str:
    """Error of the last step, for the exit of a program. It keeps no engine alive."""
    behind.wait()
    failure = behind.failure
    return f"the last step failed, and does not count: {failure}" if failure else ""


def vote(
    ranks: Communicator,
    judge: Callable[[Sequence[str | None], BaseException | None], None],
    error: BaseException | None,
) -> None:
    """Vote of all ranks on whether each did its part. Raises on every rank where one did not.

    judge: given the errors of all ranks as texts and this rank's own, raises or returns.
    """
    try:
        said = ranks.gather_objects(None if error is None else str(error))
    except Exception as gone:  # another rank has died
        if error is None:
            raise
        raise error from gone
    judge(said, error)
