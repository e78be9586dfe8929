"""Payloads that are never released: gathered again when their shards have changed."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from torch import nn

from gemini.chunk.parameter import unwatch, watch
from gemini.chunk.storage import Chunk
from gemini.units import ChunkId


class Regather:
    """Gathers, after a step, of the chunks of one engine that are never released.

    overlaps: the gathers are only begun, and each chunk's first reader waits for it: a module's
        call, an operator on a parameter, the next step.
    watches: parameters are watched meanwhile, as operators on them are not seen otherwise.
    """

    def __init__(
        self,
        chunks: Sequence[Chunk],
        never_released: Collection[ChunkId],
        params: Sequence[nn.Parameter],
        *,
        overlaps: bool,
        watches: bool,
    ) -> None:
        self._chunks = [c for c in chunks if c.spec.id in never_released and not c.is_unsharded]
        self._params = params
        self.overlaps = overlaps and bool(self._chunks)
        self._watches = watches
        self.arriving: dict[ChunkId, Chunk] = {}  # their gathers are under way

    @property
    def is_needed(self) -> bool:
        """Whether a step changes payloads that are kept gathered over ranks."""
        return bool(self._chunks)

    def begin(self, *, trained: bool) -> None:
        """Begin to gather changed shards: all, or only `trained` ones. Collective."""
        for chunk in self._chunks:
            if chunk.spec.trainable or not trained:
                chunk.gather_again()
                self.arriving[chunk.spec.id] = chunk
        if not self.overlaps:
            self.end()
        elif self._watches:
            for chunk in self.arriving.values():
                for slot in chunk.spec.slots:
                    watch(self._params[slot.param])

    def arrive(self, chunks: Iterable[ChunkId]) -> None:
        """Wait for the gathers of these chunks, which are about to be read."""
        if not self.arriving:
            return
        for chunk_id in chunks:
            chunk = self.arriving.pop(chunk_id, None)
            if chunk is None:
                continue
            chunk.wait_gathered()
            if self.overlaps and self._watches:
                for slot in chunk.spec.slots:
                    unwatch(self._params[slot.param])

    def end(self) -> None:
        """Wait for all gathers."""
        self.arrive(list(self.arriving))
