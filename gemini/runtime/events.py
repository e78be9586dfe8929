"""What happens to an engine. Who wants to know listens; all are told, in order of listening, in the
thread that trains."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, ParamSpec

from gemini.chunk.storage import Chunk

P = ParamSpec("P")


class EngineEvent(Generic[P]):
    """One kind of event. Called, it tells its listeners; its length is their number."""

    def __init__(self) -> None:
        self._listeners: list[Callable[P, object]] = []

    def listen(self, listener: Callable[P, object]) -> None:
        self._listeners.append(listener)

    def leave(self, listener: Callable[P, object]) -> None:
        """Once for every `listen`."""
        self._listeners.remove(listener)

    def __len__(self) -> int:
        return len(self._listeners)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> None:
        for listener in self._listeners:
            listener(*args, **kwargs)


@dataclass(frozen=True, slots=True)
class EngineEvents:
    """All kinds of events of one engine."""

    backward: EngineEvent[[]] = field(default_factory=EngineEvent)  # begins
    # the reduction of a chunk's gradient has begun in a backward, and again when it has ended
    final: EngineEvent[[Chunk]] = field(default_factory=EngineEvent)
    dropped: EngineEvent[[]] = field(default_factory=EngineEvent)  # all gradients were
    # files of parameters or gradients are about to change outside a step: what was written for a
    # step to come does not count
    changing: EngineEvent[[]] = field(default_factory=EngineEvent)
    # a shard is about to get what the user wrote to its payload
    keeping: EngineEvent[[Chunk]] = field(default_factory=EngineEvent)
