"""Chunks whose update goes on after their step returned: a reader waits for its chunk."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import nn

from gemini.chunk.parameter import unwatch, watch
from gemini.chunk.storage import Chunk
from gemini.optim.rules.report import TailResult
from gemini.tickets import Done, Ticket
from gemini.units import ChunkId


class Updating:
    """Chunks of one engine whose update goes on after `step()` returned.

    A gather waits by `Chunk.wait_updated`. A call waits for its chunks itself: a payload that is
    its shard is not gathered.

    coming: chunks that nobody has waited for yet.
    watches: no payload is ever released, so none is gathered: modules and operators wait instead,
        and parameters are watched meanwhile.
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
        """Note the tickets of updates, by chunk. behind: the ticket of the whole tail."""
        self.behind = behind
        for chunk_id, ticket in tickets.items():
            chunk = self.coming[chunk_id] = self._chunks[chunk_id]
            chunk.begin_update(ticket)
            if self._watches:
                for slot in chunk.spec.slots:
                    watch(self._params[slot.param])

    def arrive(self, chunks: Iterable[ChunkId]) -> None:
        """Wait for the updates of these chunks, which a call is about to read."""
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
        """Wait for all updates."""
        self.arrive(list(self.coming))
