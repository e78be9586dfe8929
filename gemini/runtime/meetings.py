"""Meetings of ranks before collectives that nothing else puts in order; see `meeting`.

[Note: no step without agreement] Steps are the same on all ranks, so a collective is issued either
along steps that all ranks follow, or when they have met for it. A rank that leaves its steps waits
for the others, so two different collectives are never matched.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from itertools import groupby

from gemini.chunk.layout import ChunkLayout
from gemini.units import ChunkId

from .schedule.reducer import Reducer
from .schedule.tensor_mgr import StatefulTensorMgr
from .sharding import Sharding
from .weights import Weights

# Brings all names of one kind that any rank reads; it is given the names that this rank wants, too.
Reader = Callable[[Sequence[str], Container[str]], None]


class Meetings:
    """Meetings of one engine with those of other ranks.

    reads_outside: chunks were gathered outside a pass since the last one.
    """

    def __init__(
        self, sharding: Sharding, manager: StatefulTensorMgr, reducer: Reducer, weights: Weights
    ) -> None:
        self._sharding, self._weights = sharding, weights
        self._manager, self._reducer = manager, reducer
        self._readers: dict[str, Reader] = {}
        self._num_agreed = 0  # calls of this cycle when ranks met last
        self.reads_outside = False

    def reduce_now(self, chunks: Sequence[ChunkId]) -> list[ChunkId]:
        """Chunks of these that all ranks reduce now."""
        words = self.in_words(chunks)
        agreed = self._sharding.comm.propose(words)
        self._has_met()
        return [chunk for chunk, name in zip(chunks, words, strict=True) if name in agreed]

    def agree(self, does: str, chunks: Sequence[ChunkId]) -> None:
        """Meet before collectives of a pass that no steps name: all ranks must do the same."""
        manager = self._manager
        words = self.in_words(chunks)
        if manager.deviated:
            was_next, came = (self.in_words(call).values() for call in manager.left_steps)
            expected = "; ".join(was_next) or "no other chunk"
            where = f", having come to {'; '.join(came)} where {expected} was next"
            words = {chunk: said + where for chunk, said in words.items()}
        self._sharding.comm.agree(does, words)
        self._has_met()

    def begin_backward(self) -> None:
        """Meet before its gathers, if it learns when gradients are reduced."""
        if self._reducer.is_learning:
            self._manager.ask_first(True)

    def barrier(self) -> None:
        """Meet before collectives that follow a pass: every rank has come to its end.

        Ranks that followed their steps to the end need not meet. In a meeting ranks compare their
        calls, and agree on places of reductions for later passes with the same calls.
        """
        self.end_reading()
        manager, reducer = self._manager, self._reducer
        if self._sharding.all_gathered:
            return
        followed = manager.follow_to_end()
        if followed and not manager.asks_first and not reducer.is_learning:
            return
        backward = manager.calls, reducer.num_calls_before
        kind = [zlib.crc32(repr(backward).encode())]
        found = sorted(reducer.found(manager.last_calls()).items())
        said = [
            json.loads(text) for text in self._sharding.comm.end_pass(json.dumps([kind, found]))
        ]
        self._has_met()
        manager.ask_first(False)
        if all(other == kind for other, _ in said):
            reducer.register_order(backward, [dict(found) for _, found in said])
        else:
            manager.ranks_differ()

    def begin_cycle(self) -> None:
        """Begin a cycle, with a forward that is not part of the one before."""
        self.end_reading()
        self._manager.ask_first(self._is_ahead())
        self._num_agreed = 0

    def call(self, name: str) -> None:
        """Begin a method that all ranks must call; see `Communicator.call`."""
        self._weights.refuse_parked()
        self.end_reading()
        self._sharding.comm.call(name)
        self._has_met()

    def answer(self, kind: str, how: Reader) -> None:
        """Set the reader of a kind, "chunk", "gradient" or "norm": it brings what ranks read."""
        self._readers[kind] = how

    def read(self, wanted: Mapping[str, str]) -> bool:
        """Bring what any rank reads; returns whether one reads. wanted: names, with their words.

        Outside a pass ranks read in orders of their own: they agree on what any of them reads, and
        all bring that in one order.
        """
        comm = self._sharding.comm
        self.reads_outside = comm.world_size > 1
        united = [name.split() for name in comm.unite(wanted)]
        for kind, names in groupby(united, key=lambda name: name[0]):
            self._readers[kind]([what for _, what in names], wanted)
        self._has_met()
        return bool(united)

    def end_reading(self) -> None:
        """Help ranks that still read, before collectives whose order all ranks know."""
        while self.reads_outside:
            self.reads_outside = self.read({})
            if not self.reads_outside:
                self._manager.release_all()  # what is gathered may differ

    def in_words(self, chunks: Iterable[ChunkId]) -> dict[str, str]:
        """Words for chunks in a meeting, by name."""
        return {f"chunk {chunk}": describe(self._sharding.layout, chunk) for chunk in chunks}

    def _is_ahead(self) -> bool:
        """Whether this rank made calls that the others may not have made."""
        manager = self._manager
        if self._sharding.comm.world_size == 1 or self._sharding.all_gathered:
            return False
        followed = manager.follow_to_end() or self._num_agreed == manager.num_calls
        return manager.asks_first or not followed

    def _has_met(self) -> None:
        self._manager.ask_first(self._reducer.is_learning)
        self._num_agreed = self._manager.num_calls


def describe(layout: ChunkLayout, chunk: int) -> str:
    """Describe a chunk in words, for errors."""
    slots = layout.chunks[chunk].slots
    first, last = (layout.params[slot.param].name for slot in (slots[0], slots[-1]))
    return f"chunk {chunk} ({first if first == last else f'{first} ... {last}'})"
