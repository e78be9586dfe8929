"""Chunks whose update goes on behind the step that began it: who reads one waits for it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import nn

from gemini.chunk.parameter import unwatch, watch
from gemini.chunk.storage import Chunk
from gemini.optim.rules.report import TailResult
from gemini.tickets import Done, Ticket
from gemini.units import ChunkId


class Updating:
    """Chunks of one engine whose update goes on behind its step.

    A gather waits by `Chunk.wait_updated`, and a call for its chunks: a payload that is a shard is
    there already.

    coming: those that nobody has waited for.
    watches: nothing is gathered, as payloads are there for good: modules and operators wait
        instead, so parameters are watched meanwhile.
    """

    def __init__(
        self, chunks: Sequence[Chunk], params: Sequence[nn.Parameter], *, watches: bool
    ) -> None:
        self._chunks = chunks
        self._params = params
        self._watches = watches
        self.coming: dict[ChunkId, Chunk] = {}
        self.behind: Ticket[TailResult] = Done(TailResult())  # of the last step that had a tail

    def begin(self, tickets: Mapping[ChunkId, Ticket[None]], behind: Ticket[TailResult]) -> None:
        """These chunks are updated when their tickets are done. behind: of the whole tail."""
        self.behind = behind
        for chunk_id, ticket in tickets.items():
            chunk = self.coming[chunk_id] = self._chunks[chunk_id]
            chunk.begin_update(ticket)
            if self._watches:
                for slot in chunk.spec.slots:
                    watch(self._params[slot.param])

    def arrive(self, chunks: Iterable[ChunkId]) -> None:
        """A call is about to read these."""
        if not self.coming:
            return
        for chunk_id in chunks:
            chunk = self.coming.get(chunk_id)
            if chunk is None:
                continue
            chunk.wait_updated()
            del self.coming[chunk_id]
            if self._watches:
                for slot in chunk.spec.slots:
                    unwatch(self._params[slot.param])

    def end(self) -> None:
        """All of them are."""
        self.arrive(list(self.coming))
