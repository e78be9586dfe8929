"""The tail of a step: it goes on in a thread of its own when `step()` has returned (ADR 0002).

    prepare    block by block, each beside its last version
    agree      with who else has a say: all of it counts, or nothing
    confirm    what is on disk counts, and what is in memory is updated

Where a disk fails nothing counts anywhere; `undo` is for the thread that trains. What is in memory
cannot be undone: an error there is told to all ranks by a vote of its own, and the step is `torn`.
"""

from __future__ import annotations

import concurrent.futures.thread  # noqa: F401 - registers the end of its pools, before ours
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from time import perf_counter as clock
from typing import Protocol

import torch

from gemini.optim.rules.report import TailResult
from gemini.optim.state.deferred_signals import TailSignals
from gemini.optim.state.space import Block
from gemini.units import BlockId

from .driver import TargetStep, alone


class Gate:
    """A ticket that ends when another thread opens it.

    waited_seconds: of the thread that has made it, if it asked before it was open. Another one's
    keep nobody from going on.

    A signal's handler may run while it is waited for, and nothing that it does keeps it shut.
    """

    def __init__(self) -> None:
        self.waited_seconds = 0.0
        self._is_open = False
        self._made_by = threading.get_ident()
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._lock.acquire()

    def open(self) -> None:
        """Once."""
        self._is_open = True
        self._lock.release()

    def ready(self) -> bool:
        return self._is_open

    def wait(self) -> None:
        """Raises RuntimeError in a forked child, which has not the thread that opens it."""
        # Without the lock: an open gate is asked by every module of every forward.
        if self._is_open:
            return
        if os.getpid() != self._pid:
            raise RuntimeError(
                f"process {os.getpid()} was forked while process {self._pid} was updating weights "
                "behind a step, and has only some of them; read a parameter before you fork, which "
                "waits for all"
            )
        started = clock()
        # The lock is let go at once, so that all who wait pass. A lock and not a condition: a
        # handler that runs in this wait can wait too.
        with self._lock:
            pass
        if threading.get_ident() == self._made_by:
            self.waited_seconds += clock() - started


class Ended:
    """A ticket for what a tail did. It keeps nothing of it but the gates of its watcher.

    failure: what has ended the tail before it was done, in words; empty where nothing has.
    """

    def __init__(self, gates: Sequence[Gate]) -> None:
        self.gate = Gate()
        self.failure = ""
        self.value = TailResult()
        self._gates = (*gates, self.gate)

    def ready(self) -> bool:
        return self.gate.ready()

    def wait(self) -> TailResult:
        self.gate.wait()
        return replace(self.value, waited_seconds=sum(gate.waited_seconds for gate in self._gates))


class Watcher(Protocol):
    """Who waits for blocks. Called in the tail's thread."""

    @property
    def gates(self) -> Sequence[Gate]:
        """That it opens."""
        ...

    def updated(self, block: BlockId) -> None:
        """One block: its parameters are those of this step."""
        ...

    def ended(self) -> None:
        """All are, or will never be."""
        ...


class Tail:
    """One step, submitted, from its first block to its end.

    agree: as for `optim.step.driver.take`; in the tail's thread. agree_in_memory: the same of what
        is there, where a step has much to do there; None: nobody is asked.
    behind: when it is done, the tail has ended. error: then, what has ended it before it was done;
        all ranks have one. is_torn: memory has blocks of two steps.
    """

    def __init__(
        self,
        step: TargetStep,
        agree: Callable[[BaseException | None], None],
        watcher: Watcher,
        signals: TailSignals,
        agree_in_memory: Callable[[BaseException | None], None] | None = None,
    ) -> None:
        self.error: BaseException | None = None
        self.is_torn = False
        self.seconds = 0.0  # until every block on disk was prepared
        self._step = step
        self._agree = agree
        self._agree_in_memory = agree_in_memory or alone
        self._watcher = watcher
        self._signals = signals
        self._before = step.moved()
        self._began = clock()
        self.behind = Ended(watcher.gates)

    def start(self) -> None:
        # Known before it runs: the interpreter may end while it does.
        _under_way.add(self)
        try:
            threading.Thread(target=self._run, name="optim-tail").start()
        except RuntimeError:  # the system has no room for a thread
            self._run()

    def undo(self) -> None:
        """It has failed: put parameters and state back."""
        self._step.undo()

    @torch.no_grad()
    def _run(self) -> None:
        try:
            self._carry_out()
        except BaseException as error:  # who settles the tail raises it
            self.error, self.behind.failure = error, str(error)
        traffic, stalled = self._step.moved()
        self.behind.value = TailResult(
            self.error is None,
            traffic - self._before[0],
            stalled - self._before[1],
            clock() - self._began,
        )
        # In this order: whoever waits for a module goes on, then a signal that came is delivered,
        # and only then does the step count as ended, which lets the next one hold signals again.
        self._watcher.ended()
        self._signals.release()
        self.behind.gate.open()
        _under_way.discard(self)

    def _carry_out(self) -> None:
        started = clock()
        error = self._step.prepare(watch=self._watcher.updated)
        self.seconds = clock() - started
        if error is not None:
            self._watcher.ended()  # the vote may take a while, and nobody leaves a pass for it
        self._agree(error)
        error = None
        try:
            self._step.confirm(self._watch)
        except BaseException as raised:
            error = raised
            self._watcher.ended()
        # Until all ranks have said that theirs is whole, nobody knows whether memory has two steps.
        self.is_torn = True
        self._agree_in_memory(error)
        self.is_torn = False

    def _watch(self, blocks: Iterator[Block]) -> None:
        for block in blocks:
            self._watcher.updated(block.id)


def _end_all() -> None:
    """At the interpreter's exit, before pools end, which a tail needs."""
    for tail in list(_under_way):
        tail.behind.wait()


_under_way: set[Tail] = set()
os.register_at_fork(after_in_child=_under_way.clear)
# what is registered last comes first
threading._register_atexit(_end_all)  # type: ignore[attr-defined]
