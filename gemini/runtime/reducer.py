"""Reduces chunks of gradients over ranks, in one order on all ranks.

[Note: canonical order] Chunks may become ready in another order on another rank. Two reductions of
equal size that are swapped between ranks give wrong data and no error, so a chunk that is ready
early waits for its turn.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from gemini.chunk.storage import Chunk
from gemini.units import ChunkId


class Reducer:
    """Gradients of the trainable chunks of one engine, over one backward after another."""

    def __init__(self, chunks: Sequence[Chunk]) -> None:
        # backward runs through the layout from its end
        self._order = [chunk for chunk in reversed(chunks) if chunk.spec.trainable]
        self._waiting = list(self._order)  # of this backward, not yet reduced
        self._ready: set[ChunkId] = set()
        self.active = False  # a gradient arrived since the last `finish`

    def arrived(self, chunk: Chunk, slot: int, grad: Tensor) -> None:
        """Pack a gradient; reduce what is complete and has its turn."""
        self.active = True
        chunk.add_gradient(slot, grad)
        if chunk.num_arrived == len(chunk.spec.slots):
            self._ready.add(chunk.spec.id)
            while self._waiting and self._waiting[0].spec.id in self._ready:
                self._waiting.pop(0).begin_reduce()

    def finish(self) -> None:
        """The backward has ended: reduce the rest in order, and wait for all."""
        for chunk in self._waiting:
            chunk.begin_reduce()
        for chunk in self._order:
            chunk.end_reduce()
        self.reset()

    @property
    def leftover(self) -> bool:
        """A gradient came after its chunk had been reduced in the same backward."""
        return any(chunk.num_arrived for chunk in self._order)

    def reduce_leftovers(self) -> None:
        """One more reduction of every chunk; all ranks call it when any has a leftover."""
        for chunk in self._order:
            chunk.begin_reduce()
            chunk.end_reduce()

    def drop_gradients(self) -> None:
        """Of this backward and of those accumulated before it."""
        for chunk in self._order:
            chunk.drop_gradients()
        self.reset()

    def reset(self) -> None:
        self._waiting = list(self._order)
        self._ready.clear()
        self.active = False
