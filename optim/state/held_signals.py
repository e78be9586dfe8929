"""Signals that wait until a step has ended: what is changed must end whole, or be undone.

Python runs a signal's handler in the main thread between any two bytecodes. A step that was left
there could have a buffer taken and not given back, or half of the weights written. So Ctrl-C and
SIGTERM only set a flag during a step; the step looks at it between blocks, where it can stop and be
undone, and the signal is delivered when weights and state are whole again.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from types import FrameType, TracebackType
from typing import Any, TypeVar

T = TypeVar("T")
HELD = (signal.SIGINT, signal.SIGTERM)


class HeldSignals:
    """`with HeldSignals() as held:` holds Ctrl-C and SIGTERM back; `held.pending` says one came.

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

    def __enter__(self) -> HeldSignals:
        if threading.current_thread() is threading.main_thread():
            for number in HELD:
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
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        for number in self._came:
            if self._handlers[number] is signal.SIG_DFL:
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
                if not future.done():
                    continue
            break
    if first_error is not None:
        raise first_error
    return results
