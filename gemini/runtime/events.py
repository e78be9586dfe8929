"""Event of an engine: who wants to know listens (ADR 0013)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, ParamSpec

P = ParamSpec("P")


class EngineEvent(Generic[P]):
    """Event of an engine. A call tells all listeners, in their order, in the thread that trains."""

    def __init__(self) -> None:
        self.listeners: list[Callable[P, object]] = []  # to be asked where a call is too much

    def listen(self, listener: Callable[P, object]) -> None:
        self.listeners.append(listener)

    def leave(self, listener: Callable[P, object]) -> None:
        """Remove a listener, once for every `listen`."""
        self.listeners.remove(listener)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> None:
        for listener in self.listeners:
            listener(*args, **kwargs)
