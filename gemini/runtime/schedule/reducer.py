"""Reductions of gradients over ranks, chunk by chunk: in one order on all ranks.

[Note: canonical order] Two collectives of equal size that are swapped between ranks give wrong
data and no error, so nothing that differs between ranks may decide when one is issued. Where
chunks are gathered in backward too, a reduction has its place among the gathers, which ranks agree
on at the end of a backward, for all that follow the same calls: after the end of the last call that
needs the chunk, and its last gradient, on all ranks. In a backward whose places are not known, and
where calls are others than expected, ranks meet before each collective; a chunk whose calls have
ended is reduced when all ranks propose it. Other chunks are reduced at the end, in one order.

A gradient that has not arrived by its reduction (this rank did not use the parameter) counts as
zero; one that arrives later makes the ranks agree on a second reduction, before the step. Where
nothing is gathered, a chunk is reduced as soon as it and all chunks before it are complete. Experts
whose tokens come from other ranks are reduced last, when the backward has ended: until then a rank
without tokens for its own may wait for tokens of a rank that would wait for their reduction.

[Note: putting off] ZeRO-1 keeps gradients whole until they are asked for: by the step, a clip, or a
reader. So several backwards are one reduction, however many there are. Only a backward that follows
backwards under `no_sync` is known to be the last, and reduces as it runs. The decision is the same
on all ranks: it depends on which backwards ran, and not on the gradients that arrived in them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from torch import Tensor

from gemini.chunk.storage import Chunk
from gemini.placement.timetable.gathers import Call
from gemini.placement.timetable.steps import MAX_UNDER_WAY
from gemini.runtime.events import EngineEvent
from gemini.units import ChunkId, ParamId

MAX_ORDERS = 16  # kinds of backwards

# The calls of a cycle, and how many of them are before the backward
Backward = tuple[Sequence[Call], int]


class Reducer:
    """Reducer of the trainable chunks of one engine, for one backward after another."""

    def __init__(
        self,
        chunks: Sequence[Chunk],
        by_moment: bool,
        puts_off: bool = False,
        at_end: Container[ChunkId] = (),
        agree: Callable[[Sequence[ChunkId]], Sequence[ChunkId]] | None = None,
        arrived: EngineEvent[[Chunk]] | None = None,
        final: EngineEvent[[Chunk]] | None = None,
        whole: bool = False,
    ) -> None:
        """`puts_off`, and `at_end` where readiness decides: see the notes. agree: where there are
        other ranks: those of some chunks that all reduce now. arrived, final: for those who listen
        while a backward runs: a gradient of a chunk came, and that of a chunk is reduced. whole:
        each backward is reduced, and no part of it before the rest."""
        self._agree = agree
        self._arrives, self._final = arrived, final
        self.num_backwards = 0  # that reduce gradients as they run, so far
        # as backward runs through the layout
        self._order = [chunk for chunk in reversed(chunks) if chunk.spec.trainable]
        self._by_moment = by_moment
        self._at_end = at_end
        # by parameter: whether a gradient arrived on this rank since they were dropped
        self.present = [False] * sum(len(chunk.spec.slots) for chunk in chunks)
        if not by_moment:
            self._order.sort(key=lambda chunk: chunk.spec.id in at_end)
        self._puts_off, self._whole = puts_off and not whole, whole
        self.is_late = False  # with `whole`: a gradient came after its reduction
        self._has_usual = False  # a backward has ended
        self.has_put_off = False  # gradients of backwards that were to be reduced
        self._follows_no_sync = False  # there are gradients of backwards under `no_sync`
        self._reduces = True  # the backward that is under way
        self.active = False  # a backward has begun, and not come to its end
        self.synchronise = True  # False under `no_sync`: the next `finish` reduces nothing
        self.unsynchronised = False  # the last one did not
        self._announced: Counter[ChunkId] = Counter()  # calls whose backward is to come
        self._opened: Counter[ChunkId] = Counter()  # calls whose backward has begun
        self._open: Counter[ChunkId] = Counter()  # those that have not ended
        # number of the call after which a chunk is reduced, in order: the same on all ranks
        self._known: dict[Backward, tuple[tuple[int, ChunkId], ...]] = {}
        self._places: tuple[tuple[int, ChunkId], ...] | None = None  # of this backward
        self._num_placed = 0  # of those, that are behind us
        self.num_calls_before = 0  # of its cycle, before this backward
        self._moment = 0  # the number of the call that came last
        self._arrived_at: dict[ChunkId, int] = {}  # when its last gradient did
        self._closed_at: dict[ChunkId, int] = {}  # when its last call ended, as plans reckon
        self._arrivals: Counter[tuple[ChunkId, int]] = Counter()  # of this backward
        self._usual: Counter[tuple[ChunkId, int]] = Counter()  # of the last one, if more than one
        self._waiting: dict[ChunkId, Chunk] = {}
        self._begun: list[Chunk] = []  # not waited for, in the order of beginning
        self.reset()

    def add(self, chunks: Sequence[Chunk]) -> None:
        """Reduce these chunks, too, from now on; between backwards."""
        self._order += chunks
        self._known.clear()
        self.reset()

    def begin(self, calls: Sequence[Call] = (), num_calls: int = 0) -> None:
        """Begin a backward. calls: expected in its cycle; num_calls: how many came so far."""
        self.active = True
        self._reduces = self.synchronise and (not self._puts_off or self._follows_no_sync)
        self._reduces |= self._whole
        self.num_backwards += self._reduces
        self._places = self._known.get((calls, num_calls))
        self.num_calls_before = self._moment = num_calls

    @property
    def is_learning(self) -> bool:
        """Whether the places of reductions in the backward under way are not known."""
        return self.active and self._reduces and self._by_moment and self._places is None

    @property
    def reduces(self) -> bool:
        """Whether the backward under way reduces gradients."""
        return self._reduces

    @contextmanager
    def holding(self) -> Iterator[None]:
        """Keep gradients that arrive in the body unreduced, until `reduce_leftovers`."""
        before, self.synchronise = self.synchronise, False
        try:
            yield
        finally:
            self.synchronise = before

    # -- module calls --

    def announce(self, chunks: Iterable[ChunkId]) -> None:
        """Note that a module call of forward will have a backward."""
        self._announced.update(chunks)

    def opened(self, chunks: Iterable[ChunkId], whole: bool) -> None:
        """Note that the backward of a module call has begun.

        whole: ranks run different calls below this module, so it may end at different moments: no
        reduction waits for its end.
        """
        for chunk in chunks:
            self._opened[chunk] += 1
            self._open[chunk] += not whole

    def closed(self, chunks: Iterable[ChunkId], whole: bool) -> None:
        if not whole:
            self._open.subtract(chunks)
            for chunk in chunks:
                self._closed_at[chunk] = self._moment

    def reduce_due(self, num_calls: int, follows_steps: bool) -> None:
        """Before a backward gather: reduce the chunks whose turn it is.

        num_calls: calls of this cycle so far, with the one that gathers. follows_steps: all ranks
        follow steps.
        """
        self._moment = num_calls
        if not self._reduces or not self._by_moment:
            return
        # Without places readiness differs between ranks: only what all propose keeps one order.
        if self._places is None or not follows_steps:
            due = [chunk for chunk in self._waiting if self._is_due(chunk)]
            agreed = self._agree(due) if due and self._agree is not None else due
            for chunk in agreed:
                self._begin(self._waiting.pop(chunk))
            return
        while self._num_placed < len(self._places):
            behind, chunk = self._places[self._num_placed]
            if behind >= num_calls:
                break
            self._num_placed += 1
            self._begin(self._waiting.pop(chunk))

    def _is_due(self, chunk: ChunkId) -> bool:
        if self._open[chunk]:
            return False
        return 0 < self._announced[chunk] <= self._opened[chunk]

    def found(self, last_calls: Mapping[ChunkId, int]) -> dict[ChunkId, int]:
        """Number of the call after which each chunk may be reduced, on this rank.

        last_calls: by chunk the number of the last call that needs it.
        """
        found = {}
        for chunk in (chunk.spec.id for chunk in self._order):
            moments = (last_calls, self._arrived_at, self._closed_at)
            numbers = [at[chunk] for at in moments if chunk in at]
            if numbers:
                found[chunk] = max(numbers)
        return found

    def register_order(self, backward: Backward, found: Sequence[Mapping[ChunkId, int]]) -> None:
        """Register the order of reductions, from what every rank has `found` in such a backward.

        All ranks call it with the same values.
        """
        places: dict[ChunkId, int] = {}
        for one in found:
            for chunk, number in one.items():
                places[chunk] = max(number, places.get(chunk, 0))
        self._known.pop(backward, None)
        in_order = sorted(places.items(), key=lambda place: (place[1], -place[0]))
        self._known[backward] = tuple((number, chunk) for chunk, number in in_order)
        if len(self._known) > MAX_ORDERS:
            del self._known[next(iter(self._known))]

    # -- gradients --

    def arrived(self, chunk: Chunk, slot: int, grad: Tensor) -> None:
        """Pack a gradient; where readiness decides, reduce what is complete and has its turn."""
        chunk.gradient.add(slot, grad)
        self.present[chunk.spec.slots[slot].param] = True
        key = chunk.spec.id, slot
        self._arrivals[key] = self._arrivals.get(key, 0) + 1  # Counter's own way is in Python
        self._arrived_at[key[0]] = self._moment
        if self._arrives is not None and self._arrives.listeners:
            self._arrives(chunk)
        if self._by_moment or not self._reduces:
            return
        # before the last of its parameters has a gradient, no chunk has become complete
        if chunk.gradient.num_arrived < len(chunk.spec.slots):
            return
        for first in list(self._waiting.values()):
            if not self._is_complete(first):
                break
            self._begin(self._waiting.pop(first.spec.id))

    def set_present(self, param: ParamId, there: bool = True) -> None:
        """Note that a gradient was put into its chunk without an arrival, or dropped there."""
        self.present[param] = there

    def begin_anew(self) -> None:
        """The gradients that follow are new ones, of which none is late."""
        self.is_late = False

    def _begin(self, chunk: Chunk) -> None:
        """Begin to reduce a chunk, and end the oldest where too many are under way.

        A reduction under way keeps a whole payload.
        """
        chunk.gradient.begin_reduce()
        final = self._final if self._final and self._final.listeners and self.active else None
        if final and chunk.gradient.is_reduced:
            final(chunk)
        self._begun.append(chunk)
        if len(self._begun) > MAX_UNDER_WAY:
            first = self._begun.pop(0)
            is_news = final and not first.gradient.is_reduced
            self._end(first)
            if final and is_news:
                final(first)

    def _end(self, chunk: Chunk) -> None:
        chunk.gradient.end_reduce()

    def _is_complete(self, chunk: Chunk) -> bool:
        if chunk.spec.id in self._at_end or chunk.gradient.num_arrived < len(chunk.spec.slots):
            return False
        if self._whole and not self._has_usual:  # how often each of them comes is not known
            return False
        for slot in range(len(chunk.spec.slots)):
            key = chunk.spec.id, slot
            if self._arrivals.get(key, 0) < self._usual.get(key, 1):
                return False
        return True

    def finish(self) -> None:
        """Reduce the other chunks in order as the backward ends, and wait for all."""
        if self._reduces:
            late = [c for c in self._order if c.spec.id not in self._waiting]
            self.is_late |= self._whole and any(c.gradient.num_arrived for c in late)
            for chunk in self._waiting.values():
                self._begin(chunk) if self._whole else chunk.gradient.begin_reduce()
            for chunk in self._order:
                self._end(chunk)
            self._nothing_is_left()
        else:
            for chunk in self._order:
                chunk.gradient.end_backward_unreduced()
            self.has_put_off |= self.synchronise
            self._follows_no_sync |= not self.synchronise
        self.unsynchronised = not self.synchronise
        # the next backward is expected to be like this one
        self._has_usual = True
        self._usual = Counter({key: n for key, n in self._arrivals.items() if n > 1})
        self._announced.clear()
        self.reset()

    @property
    def leftover(self) -> bool:
        """Whether some gradients are unreduced: late, under `no_sync`, or put off."""
        return any(chunk.gradient.num_arrived for chunk in self._order)

    def forget_places(self) -> None:
        """Forget all places: gradients came after them. All ranks call it."""
        self._known.clear()

    def reduce_leftovers(self) -> None:
        """Reduce every chunk once more; all ranks call it when any has a leftover."""
        # All chunks, not the ones with a leftover here: these differ between ranks.
        for chunk in self._order:
            self._begin(chunk)
        for chunk in self._begun:
            chunk.gradient.end_reduce()
        self._begun.clear()
        self._nothing_is_left()

    def reduce_held(self, chunks: Sequence[Chunk], after: Sequence[Chunk] = ()) -> None:
        """Wait for the reductions of `after`, and begin those of what `holding` has left of
        `chunks`; all ranks call it with the same. With no chunks nothing is left."""
        for chunk in after:
            self._end(chunk)
        for chunk in chunks:
            chunk.gradient.begin_reduce()
        if not chunks:
            self._nothing_is_left()
            self.unsynchronised = False

    def reduce_deferred(self, factor: float) -> None:
        """Reduce once what `holding` has left, times `factor`; all ranks call it."""
        for chunk in self._order:
            if factor != 1:
                chunk.gradient.scale_local(factor)
        self.reduce_leftovers()
        self.unsynchronised = False

    def reduce_put_off(self) -> None:
        """Reduce gradients that were put off, as one is asked for; all ranks call it."""
        if self.has_put_off:
            self.reduce_leftovers()

    def _nothing_is_left(self) -> None:
        self.has_put_off = self._follows_no_sync = False

    def drop_gradients(self) -> None:
        """Drop the gradients of this backward and of all accumulated before it."""
        for chunk in self._order:
            chunk.gradient.drop()
        self.present = [False] * len(self.present)
        self._nothing_is_left()
        self.reset()

    def reset(self) -> None:
        self._waiting = {chunk.spec.id: chunk for chunk in self._order}
        for counter in (self._opened, self._open, self._arrivals):
            counter.clear()
        self._arrived_at.clear()
        self._closed_at.clear()
        self._places, self._num_placed = None, 0
        self._begun.clear()
        self.active = False
