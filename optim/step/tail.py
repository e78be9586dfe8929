"""Tail of a step: a thread goes on with it when `step()` has returned (ADR 0002).

    prepare    write the new version of each block on disk next to its last one
    agree      with all ranks: the step counts everywhere, or nowhere
    confirm    commit what is on disk, and update what is in memory

Where a disk fails nothing counts anywhere; the thread that trains calls `undo`. Memory cannot be
undone: an error there is told to all ranks by a second vote, and the step is `torn`.
"""

from __future__ import annotations

import concurrent.futures.thread  # noqa: F401 - registers the end of its pools, before ours
import os
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from time import perf_counter as clock

import torch

from gemini.optim.rules.report import TailResult
from gemini.optim.state.deferred_signals import TailSignals
from gemini.optim.state.space import Block
from gemini.units import BlockId

from .driver import Agree, Step, alone


class Gate:
    """Ticket that ends when another thread opens it.

    waited_seconds: seconds that the training thread, which made it, spent waiting on this gate.

    A signal's handler may run during `wait`, and may itself wait: the gate opens all the same.
    """

    def __init__(self) -> None:
        self.waited_seconds = 0.0
        self._is_open = False
        self._made_by = threading.get_ident()
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._lock.acquire()

    def open(self) -> None:
        """Open the gate for all waiters. Called once."""
        self._is_open = True
        self._lock.release()

    def ready(self) -> bool:
        return self._is_open

    def wait(self) -> None:
        """Wait until the gate is open.

        Raises RuntimeError in a forked child, which does not have the thread that opens it.
        """
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
        # Released at once, so that all who wait pass. A lock and no condition: a signal's handler
        # that runs in this wait can wait too.
        with self._lock:
            pass
        if threading.get_ident() == self._made_by:
            self.waited_seconds += clock() - started


class Ended:
    """Ticket of a tail. It keeps nothing of the tail alive but its gates.

    failure: the text of the error that ended the tail; empty where there was none.
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


class Gates:
    """Gates of a tail by shard of its space; one opens when the shard's last block is updated."""

    def __init__(
        self, blocks: Sequence[Block], num_shards: int, let_go: Callable[[int], object]
    ) -> None:
        """let_go: called with each shard, before its gate opens: its gradient is read no more, by
        what is launched from then on."""
        self.gates = [Gate() for _ in range(num_shards)]
        self._shard_of = {block.id: block.shard for block in blocks}
        self._left = Counter(self._shard_of.values())
        self._closed = set(range(num_shards))
        self._let_go = let_go

    def updated(self, block: BlockId) -> None:
        """Note that the parameters of this block are those of this step."""
        shard = self._shard_of[block]
        self._left[shard] -= 1
        if not self._left[shard]:
            self._open(shard)

    def ended(self) -> None:
        """Note the end of updates: all blocks are updated, or the step failed."""
        for shard in sorted(self._closed):
            self._open(shard)
        self._let_go = int  # the views of the step keep this, to tell it of blocks

    def _open(self, shard: int) -> None:
        self._closed.remove(shard)
        self._let_go(shard)
        self.gates[shard].open()


class Tail:
    """Tail of a submitted step, from its first block to its end.

    agree: the vote of `optim.step.driver.take_step`, in the tail's thread. agree_in_memory: the
        vote on updates in memory. where: context in which that thread works.
    behind: the ticket of the tail's end. error: set at the end if the tail failed; all ranks have
        one or none has. is_torn: memory has blocks of two steps.
    """

    def __init__(
        self,
        step: Step,
        agree: Agree,
        gates: Gates,
        signals: TailSignals,
        agree_in_memory: Agree = alone,
        where: AbstractContextManager[None] | None = None,
    ) -> None:
        self.error: BaseException | None = None
        self.is_torn = False
        self.step = step
        self._agree = agree
        self._agree_in_memory = agree_in_memory
        self._where = where or nullcontext()
        self._gates = gates
        self._signals = signals
        self._before = step.moved()
        self._began = clock()
        self.behind = Ended(gates.gates)

    def start(self) -> None:
        # Registered before it runs: the interpreter may exit meanwhile.
        _under_way[self] = None
        try:
            threading.Thread(target=self._run, name="optim-tail").start()
        except RuntimeError:  # the system has no room for a thread
            self._run()

    @torch.no_grad()
    def _run(self) -> None:
        try:
            with self._where:
                self._carry_out()
        except BaseException as error:  # raised by whoever settles the tail
            self.error, self.behind.failure = error, str(error)
        traffic, stalled = self.step.moved()
        self.behind.value = TailResult(
            self.error is None,
            traffic - self._before[0],
            stalled - self._before[1],
            clock() - self._began,
        )
        # In this order: modules that wait go on, then a deferred signal is delivered, and only then
        # has the step ended, after which the next step may defer signals again.
        self._gates.ended()
        self._signals.release()
        self.behind.gate.open()
        _under_way.pop(self, None)

    def _carry_out(self) -> None:
        error = self.step.prepare()
        if error is not None:
            self._gates.ended()  # before the vote, which may take long: no module waits for that
        self._agree(error)
        error = None
        try:
            self.step.confirm(settles=True)
        except BaseException as raised:
            error = raised
            self._gates.ended()
        # Torn until all ranks have said that their memory is whole.
        self.is_torn = True
        self._agree_in_memory(error)
        self.is_torn = False


def _end_all() -> None:
    """End all tails at the interpreter's exit, before the pools that they need."""
    for tail in list(_under_way):
        tail.behind.wait()


_under_way: dict[Tail, None] = {}
os.register_at_fork(after_in_child=_under_way.clear)
# Exit calls come in reverse order of registration: this one comes before the pools' own.
threading._register_atexit(_end_all)  # type: ignore[attr-defined]
