"""Events of an engine: who wants to know listens (ADR 0013)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, ParamSpec

from gemini.chunk.storage import Chunk

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


@dataclass(frozen=True, slots=True)
class EngineEvents:
    """All kinds of events of one engine."""

    forward: EngineEvent[[]] = field(default_factory=EngineEvent)  # of the whole module, begins
    # a gradient of a chunk, in a backward
    arrived: EngineEvent[[Chunk]] = field(default_factory=EngineEvent)
    # the gradient of a chunk is reduced while its backward runs
    final: EngineEvent[[Chunk]] = field(default_factory=EngineEvent)
    dropped: EngineEvent[[]] = field(default_factory=EngineEvent)  # all gradients were
    # before a shard gets what the user wrote to its payload
    keeping: EngineEvent[[Chunk]] = field(default_factory=EngineEvent)
