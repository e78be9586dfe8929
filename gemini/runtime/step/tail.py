"""Tail of an engine's step: blocks are updated during the next forward (ADR 0002).

    begin     step() has agreed; from now on whoever reads a chunk (a gather, a module, an operator)
              waits until it is updated (`gemini.runtime.schedule.updating`)
    settle    wait for the end; where a disk failed, undo the step and raise the error

A thread updates everything (`optim.step.tail`). What it launches on a device comes in the order of
what the thread that trains launches: a chunk whose update is launched may be read.

In the tail all ranks vote, in a process group of its own, on whether every disk did its part. Until
then nothing counts on any rank. A rank whose disk failed goes on to the vote, so that none hangs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, cast

from gemini.chunk.storage import Chunk
from gemini.optim.rules.report import TailResult
from gemini.optim.state.deferred_signals import DeferredSignals, TailSignals
from gemini.optim.state.tiered_state import TieredState
from gemini.optim.step.driver import Step
from gemini.placement.tiers import Tier
from gemini.placement.timetable.updates import TAIL
from gemini.ranges import named
from gemini.runtime.comm.communicator import Communicator
from gemini.runtime.parts import Parts, has_pass_elsewhere, update_of
from gemini.tickets import Ticket
from gemini.units import BlockId, ChunkId

from .agreement import raise_failures, raise_what_tore
from .views import ShardViews
from .weights import after_step

if TYPE_CHECKING:
    from gemini.optim.step.tail import Ended, Gate, Tail


@dataclass(frozen=True, slots=True)
class _UnderWay:
    tail: Tail
    step: Step
    state: TieredState
    forget: Callable[[], None]  # what was counted when `step()` returned


class StepTail:
    """Tails of one engine's steps, of which at most one is under way."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._under_way: _UnderWay | None = None
        self._signals: TailSignals | None = (
            None  # deferred, or whose handlers the main thread is to put back
        )

    @property
    def applies(self) -> bool:
        """Whether steps of this plan have a tail."""
        return update_of(self._parts) == TAIL

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
        from gemini.optim.step.tail import Tail
        from gemini.runtime.comm.leaving import ask_at_the_end

        parts, views = self._parts, cast("ShardViews", step.views)
        gates = _Gates(tiered_state, chunks, views)
        views.watch = gates.updated
        parts.storage.step_goes_on()
        assert parts.tail_communicator is not None
        vote, in_memory = Vote(parts.tail_communicator, raise_failures), None
        if parts.plan.blocks_on(Tier.HOST):
            in_memory = Vote(parts.tail_communicator, raise_what_tore)
        tail = Tail(step, vote, gates, signals, in_memory, parts.backend.here())

        self._under_way = _UnderWay(tail, step, tiered_state, forget)
        self._signals = signals
        # A program may end with this step; then its exit asks whether the step failed.
        ask_at_the_end(id(self), partial(_failure_of, tail.behind))
        parts.ledger.hold(lambda: views.kept_bytes)
        parts.updating.begin(gates.of_chunk, tail.behind)
        tail.start()
        return tail.behind

    @property
    def goes_on(self) -> bool:
        """Whether a tail was begun that nobody has settled."""
        return self._under_way is not None

    def settle(self) -> None:
        """Wait until the last step counts. Raises the error of a step that failed, once undone.

        Any thread may call it; of several that wait, one ends the step and raises. While another
        thread runs a pass, that one undoes the step, whose weights it uses, and raises too.
        """
        with self._parts.lock:
            self._settle_held()

    def _settle_held(self) -> None:
        under_way = self._under_way
        if under_way is None:
            self._put_signals_back()
            return
        tail = under_way.tail
        with named("wait for", "tail"):
            tail.behind.wait()
        if tail.error is not None and has_pass_elsewhere(self._parts):
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
                under_way.state.torn = error
            elif error is not None:
                self._undo(under_way)
        if error is not None:
            raise error

    def end(self) -> None:
        """Wait for the tail and ignore its error: the state that it works on is about to go."""
        with self._parts.lock:
            under_way = self._under_way
            if under_way is not None:
                under_way.tail.behind.wait()
                self._ended()
            self._put_signals_back()

    def _put_signals_back(self) -> None:
        """Handlers as before the last tail; only the main thread may set them."""
        if self._signals is not None and self._signals.put_back():
            self._signals = None

    def _ended(self) -> None:
        from gemini.runtime.comm.leaving import was_asked

        self._under_way = None
        was_asked(id(self))
        self._parts.updating.end()
        self._parts.storage.step_has_ended()
        self._parts.ledger.hold(int)

    def _undo(self, under_way: _UnderWay) -> None:
        """Undo the step, and drop what was computed from its weights: gathered payloads."""
        parts = self._parts
        under_way.forget()
        # User writes since then were to weights of the step that is undone.
        for chunk in parts.chunks:
            parts.user_writes.forget(chunk)
        parts.manager.release_all()
        try:
            under_way.tail.undo()
        finally:
            parts.user_writes.stepped(under_way.step.taken)
            after_step(parts)


def _failure_of(behind: Ended) -> str:
    """Error of the last step, for the exit of a program. It keeps no engine alive."""
    behind.wait()
    failure = behind.failure
    return f"the last step failed, and does not count: {failure}" if failure else ""


class _Gates:
    """Gates of a tail, one for each chunk; it opens when the chunk's last block was updated."""

    def __init__(
        self, tiered_state: TieredState, chunks: Sequence[Chunk], views: ShardViews
    ) -> None:
        from gemini.optim.step.tail import Gate

        self._views = views
        self._shard_of = {block.id: block.shard for block in tiered_state.space.blocks}
        self._left = Counter(self._shard_of.values())
        self._gates = [Gate() for _ in chunks]
        self._is_open = [False] * len(chunks)
        self.of_chunk: Mapping[ChunkId, Ticket[None]] = {
            chunk.spec.id: gate for chunk, gate in zip(chunks, self._gates, strict=True)
        }

    @property
    def gates(self) -> Sequence[Gate]:
        """Gates by shard."""
        return self._gates

    def updated(self, block: BlockId) -> None:
        shard = self._shard_of[block]
        self._left[shard] -= 1
        if not self._left[shard]:
            self._open(shard)

    def ended(self) -> None:
        self._views.watch = None  # which keeps this, and this the views
        for shard in range(len(self._gates)):
            self._open(shard)

    def _open(self, shard: int) -> None:
        if not self._is_open[shard]:
            self._is_open[shard] = True
            self._views.let_go(shard)
            self._gates[shard].open()


class Vote:
    """Vote of all ranks on whether each did its part. Raises on every rank where one did not."""

    def __init__(
        self,
        ranks: Communicator,
        judge: Callable[[Sequence[str | None], BaseException | None], None],
    ) -> None:
        """judge: given the errors of all ranks as texts and this rank's own, raises or returns."""
        self._ranks = ranks
        self._judge = judge

    def __call__(self, error: BaseException | None) -> None:
        try:
            said = self._ranks.gather_objects(None if error is None else str(error))
        except Exception as gone:  # another rank has died
            if error is None:
                raise
            raise error from gone
        self._judge(said, error)
