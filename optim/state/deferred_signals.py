"""Signals that wait until a step has ended: what is changed must end whole, or be undone.

Python runs a signal's handler in the main thread between any two bytecodes, and a handler may
raise: Ctrl-C, a time-out by SIGALRM, a DataLoader that has lost a worker. A step that was left
there could have a buffer taken and not given back, or half of the weights written. So during a step
signals are only noted, and each is delivered when weights and state are whole again. Ctrl-C and
SIGTERM also end the step: it looks for them between blocks, where it can stop and be undone.
"""

from __future__ import annotations

import os
import signal
import threading

# A deferral asks for 60 handlers: `signal` itself wraps these two, and looks for enums' members.
from _signal import getsignal  # type: ignore[import-not-found]
from _signal import signal as setsignal
from collections.abc import Sequence
from concurrent.futures import Future
from types import FrameType, TracebackType
from typing import Any, TypeVar

T = TypeVar("T")
END_A_STEP = (signal.SIGINT, signal.SIGTERM)
END_A_STEP_SET = frozenset(END_A_STEP)
# Signals of a fault of the thread itself: it would come to the same fault again.
FAULTS = {"SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL", "SIGABRT", "SIGTRAP", "SIGSYS"}
OTHERS = sorted(
    int(number)
    for number in signal.valid_signals()
    if number not in END_A_STEP and getattr(number, "name", "") not in FAULTS
)


class Deferral:
    """Signals that are noted, from `_hold` in the main thread until it is over.

    Held are all that have a handler in Python, and SIGTERM without one, of which SystemExit(143) is
    made, so that files are removed on the way out. Outside the main thread, which no handler
    interrupts, none is held.
    """

    def __init__(self) -> None:
        self._handlers: dict[int, Any] = {}
        self._came: list[int] = []
        self._is_over = False
        self._pid = os.getpid()

    def _hold(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        try:
            for number in END_A_STEP:
                handler = getsignal(number)
                if handler not in (None, signal.SIG_IGN):  # None: not Python's, cannot be put back
                    self._replace(number, handler)
            for other in OTHERS:
                handler = getsignal(other)
                if callable(handler):
                    self._replace(other, handler)
        except BaseException:  # one that is not held yet came, and its handler has raised
            self._is_over = True
            raise

    def _replace(self, number: int, handler: Any) -> None:
        self._handlers[number] = _own(handler, number)
        setsignal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number not in self._came:
            self._came.append(number)
        # Asked after the signal was noted: a `release` in another thread that looked before the
        # note has not delivered it, and no other comes. None comes in a forked child.
        if self._is_over or os.getpid() != self._pid:
            came = self._take()
            self._put_back()
            _deliver(came, self._handlers)

    def _take(self) -> list[int]:
        """Take the signals that came. Each goes to one of the threads that ask."""
        taken: list[int] = []
        while self._came:
            try:
                taken.append(self._came.pop())
            except IndexError:  # another thread was first
                break
        return taken[::-1]

    def _put_back(self) -> None:
        """Handlers as before. One that is not put back, as another has raised meanwhile, is called
        by `_note` all the same."""
        for number, handler in reversed(self._handlers.items()):  # Ctrl-C last: it may come then
            if getsignal(number) == self._note:  # else the user has set another since
                setsignal(number, _own(handler, number))


_outermost: list[DeferredSignals] = []  # that the main thread is inside of: one or none
os.register_at_fork(after_in_child=_outermost.clear)


class DeferredSignals(Deferral):
    """`with DeferredSignals() as signals:` defers signals; `signals.pending`: one came that ends a
    step.

    Delivered on leaving: the handler that was there runs. Inside of another, which notes them
    already, it does nothing.
    """

    _is_inside = False

    @property
    def pending(self) -> bool:
        return not END_A_STEP_SET.isdisjoint(self._came)

    def __enter__(self) -> DeferredSignals:
        if threading.current_thread() is not threading.main_thread() or _outermost:
            self._is_inside = True
        else:
            self._hold()
            _outermost.append(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._is_inside:
            return
        self._is_over = True  # `_note` delivers what comes from here on
        _outermost.clear()
        try:
            self._put_back()
        finally:
            if self._came:
                _deliver(self._take(), self._handlers)


class TailSignals(Deferral):
    """Deferral from `hold`, in the main thread, to `release`, in any thread.

    Signals are delivered to the main thread, whatever it does then. `put_back`: the handlers are
    those of before, after `release`. Only the main thread may set handlers; False in another, where
    the next signal still reaches its handler.
    """

    def hold(self) -> None:
        self._hold()

    def release(self) -> None:
        self._is_over = True
        for number in self._take():
            # A time-out whose handler was taken off meanwhile has nobody to tell: without a handler
            # it would end the process.
            if number in END_A_STEP or getsignal(number) != signal.SIG_DFL:
                os.kill(os.getpid(), number)

    def put_back(self) -> bool:
        if threading.current_thread() is not threading.main_thread():
            return False
        self._put_back()
        return True


def _own(handler: Any, number: int) -> Any:
    """The user's handler, looked up through deferrals that are over: two may overlap."""
    holder = getattr(handler, "__self__", None)
    while isinstance(holder, Deferral) and holder._is_over:
        handler = holder._handlers[number]
        holder = getattr(handler, "__self__", None)
    return handler


def _deliver(came: Sequence[int], handlers: dict[int, Any]) -> None:
    """Deliver each, also where the handler of another raises; those that end a program last."""
    if not came:
        return
    number, *others = sorted(came, key=END_A_STEP.__contains__)
    try:
        if _own(handlers[number], number) == signal.SIG_DFL:
            raise SystemExit(128 + number)
        signal.raise_signal(number)
    finally:
        _deliver(others, handlers)


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
