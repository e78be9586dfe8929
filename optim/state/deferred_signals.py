"""Signals that wait until a step has ended: what is changed must end whole, or be undone.

Python runs a signal's handler in the main thread between any two bytecodes. A step that was left
there could have a buffer taken and not given back, or half of the weights written. So Ctrl-C and
SIGTERM only set a flag during a step; the step looks at it between blocks, where it can stop and be
undone, and the signal is delivered when weights and state are whole again.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from types import FrameType, TracebackType
from typing import Any, TypeVar

T = TypeVar("T")
DEFERRED = (signal.SIGINT, signal.SIGTERM)


class DeferredSignals:
    """`with DeferredSignals() as signals:` defers Ctrl-C and SIGTERM; `signals.pending`: one came.

    Delivered on leaving: the handler that was there runs. Where SIGTERM has none, SystemExit(143)
    is raised, so that files are removed on the way out. Does nothing outside the main thread,
    which no handler interrupts.
    """

    def __init__(self) -> None:
        self._handlers: dict[int, Any] = {}
        self._came: list[int] = []

    @property
    def pending(self) -> bool:
        return bool(self._came)

    def __enter__(self) -> DeferredSignals:
        if threading.current_thread() is threading.main_thread():
            for number in DEFERRED:
                handler = signal.getsignal(number)
                if handler not in (None, signal.SIG_IGN):  # None: not Python's, cannot be put back
                    self._handlers[number] = handler
                    signal.signal(number, self._note)
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number not in self._came:
            self._came.append(number)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        handlers = {number: _own(handler, number) for number, handler in self._handlers.items()}
        for number, handler in reversed(handlers.items()):  # Ctrl-C last: it may come then
            signal.signal(number, handler)
        _deliver(self._came, handlers)


class TailSignals:
    """Deferral of Ctrl-C and SIGTERM from `hold`, in the main thread, to `release`, in any thread.

    They are delivered to the main thread, whatever it does then, as `DeferredSignals` does.
    `put_back`: the handlers are those of before, after `release`. Only the main thread may set
    handlers; False in another, where the next signal still reaches its handler.
    """

    def __init__(self) -> None:
        self._handlers: dict[int, Any] = {}
        self._came: list[int] = []
        self._is_over = False
        self._pid = os.getpid()

    def hold(self) -> None:
        if threading.current_thread() is threading.main_thread():
            for number in DEFERRED:
                handler = _own(signal.getsignal(number), number)
                if handler not in (None, signal.SIG_IGN):
                    self._handlers[number] = handler
                    signal.signal(number, self._note)

    def release(self) -> None:
        self._is_over = True
        for number in self._take():
            os.kill(os.getpid(), number)

    def put_back(self) -> bool:
        if threading.current_thread() is not threading.main_thread():
            return False
        for number, handler in reversed(self._handlers.items()):
            if signal.getsignal(number) == self._note:  # else the user has set another since
                signal.signal(number, _own(handler, number))
        return True

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number not in self._came:
            self._came.append(number)
        # Asked after the signal was noted: a `release` in another thread that looked before the
        # note has not delivered it, and no other comes. None comes in a forked child.
        if self._is_over or os.getpid() != self._pid:
            came = self._take()
            self.put_back()
            _deliver(came, self._handlers)

    def _take(self) -> list[int]:
        """Take the signals that came. Each goes to one of the threads that ask."""
        taken: list[int] = []
        while self._came:
            try:
                taken.append(self._came.pop())
            except IndexError:  # another thread was first
                break
        return taken


def _own(handler: Any, number: int) -> Any:
    """The user's handler, looked up through `TailSignals` that are over: two may overlap."""
    holder = getattr(handler, "__self__", None)
    while isinstance(holder, TailSignals) and holder._is_over:
        handler = holder._handlers[number]
        holder = getattr(handler, "__self__", None)
    return handler


def _deliver(came: Sequence[int], handlers: dict[int, Any]) -> None:
    for number in came:
        if handlers[number] is signal.SIG_DFL:
            raise SystemExit(128 + number)
        signal.raise_signal(number)


def wait_all(futures: Sequence[Future[T]]) -> list[T]:
    """Results in order. Waits for all of them before it raises, an interrupt included."""
    first_error: BaseException | None = None
    results: list[T] = []
    for future in futures:
        while True:
            try:
                results.append(future.result())
            except Exception as error:
                first_error = first_error or error
            except BaseException as interrupt:
                first_error = interrupt
                # it came while waiting: the worker still writes what the caller would undo
                if not future.done():
                    continue
            break
    if first_error is not None:
        raise first_error
    return results
