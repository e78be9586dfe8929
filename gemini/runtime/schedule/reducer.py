"""When the gradients of chunks are reduced over ranks: in one order on all ranks.

[Note: canonical order] Two collectives of equal size that are swapped between ranks give wrong
data and no error, so nothing that differs between ranks may decide when one is issued. Where
chunks are gathered in backward too, a reduction has its place among the gathers: at the first
moment by which every call of the chunk's modules that the traced backward had has begun and
ended. What has not arrived by then (a parameter that this rank did not use) counts as zero; what
arrives later makes the ranks agree on a second reduction, before the step. Where nothing is
gathered, a chunk is reduced as soon as it and those before it are complete. Experts whose tokens
come from other ranks are reduced behind the others, when the backward has ended: until then a rank
without tokens for its own may wait for tokens of a rank that would wait for their reduction.

[Note: putting off] ZeRO-1 keeps gradients whole until they are asked for: by the step, a clip, or
who reads them. So several backwards are one reduction, however many there are. Only a backward
behind those of `no_sync` is known to be the last, and reduces as it runs. What decides is the same
on all ranks: which backwards there were, and not what arrived in them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from gemini.chunk.storage import Chunk
from gemini.placement.timetable.steps import MAX_UNDER_WAY
from gemini.units import ChunkId


class Reducer:
    """Gradients of the trainable chunks of one engine, over one backward after another."""

    def __init__(
        self,
        chunks: Sequence[Chunk],
        by_moment: bool,
        puts_off: bool = False,
        at_end: Container[ChunkId] = (),
    ) -> None:
        """`puts_off`, and `at_end` where readiness decides: see the notes."""
        # with the other ranks, to reduce chunks now; raises where they do not
        self.agree: Callable[[Sequence[ChunkId]], None] = lambda chunks: None
        # told of every chunk whose reduction has begun in a backward, and again when it has ended
        self.is_final: Callable[[Chunk], None] | None = None
        # backward runs through the layout from its end, until a trace says otherwise
        self._order = [chunk for chunk in reversed(chunks) if chunk.spec.trainable]
        self._by_moment = by_moment
        self._at_end = at_end
        if not by_moment:
            self._order.sort(key=lambda chunk: chunk.spec.id in at_end)
        self._puts_off = puts_off
        self.has_put_off = False  # gradients of backwards that were to be reduced
        self._follows_no_sync = False  # there are gradients of backwards under `no_sync`
        self._reduces = True  # the backward that is under way
        self.active = False  # a backward has begun, and not come to its end
        self.synchronise = True  # False under `no_sync`: the next `finish` reduces nothing
        self.unsynchronised = False  # the last one did not
        self._announced: Counter[ChunkId] = Counter()  # calls whose backward is to come
        self._opened: Counter[ChunkId] = Counter()  # calls whose backward has begun
        self._open: Counter[ChunkId] = Counter()  # those that have not ended
        self._last_opened: dict[ChunkId, None] = {}  # in the order of their last begin
        self._traced: Counter[ChunkId] | None = None  # `_opened` of the last whole backward
        self._arrivals: Counter[tuple[ChunkId, int]] = Counter()  # of this backward
        self._usual: Counter[tuple[ChunkId, int]] = Counter()  # of the last one, if more than one
        self._waiting: list[Chunk] = []
        self._begun: list[Chunk] = []  # not waited for, in the order of beginning
        self.reset()

    def add(self, chunks: Sequence[Chunk]) -> None:
        """These have gradients from now on; between backwards."""
        self._order += chunks
        self._traced = None
        self.reset()

    def begin(self) -> None:
        """A backward begins."""
        self.active = True
        self._reduces = self.synchronise and (not self._puts_off or self._follows_no_sync)

    @property
    def reduces(self) -> bool:
        """Whether the backward that is under way does."""
        return self._reduces

    @property
    def follows_no_sync(self) -> bool:
        """Whether there are gradients of backwards under `no_sync`."""
        return self._follows_no_sync

    @contextmanager
    def holding(self) -> Iterator[None]:
        """What arrives in the body waits for `reduce_leftovers`."""
        before, self.synchronise = self.synchronise, False
        try:
            yield
        finally:
            self.synchronise = before

    # -- module calls --

    def announce(self, chunks: Iterable[ChunkId]) -> None:
        """A module call of forward will have a backward."""
        self._announced.update(chunks)

    def opened(self, chunks: Iterable[ChunkId], whole: bool) -> None:
        """The backward of a module call has begun.

        whole: what runs below the module differs between ranks, and so may when it ends: nothing
        waits for that.
        """
        for chunk in chunks:
            self._opened[chunk] += 1
            self._open[chunk] += not whole
            self._last_opened.pop(chunk, None)
            self._last_opened[chunk] = None

    def closed(self, chunks: Iterable[ChunkId], whole: bool) -> None:
        if not whole:
            self._open.subtract(chunks)

    def reduce_due(self, follows_steps: bool) -> None:
        """Before a backward gather: reduce the chunks whose turn it is.

        follows_steps: so do all ranks; else they agree first.
        """
        if not self._reduces or not self._by_moment:
            return
        while self._waiting and self._is_due(self._waiting[0].spec.id):
            if not follows_steps:
                self.agree([self._waiting[0].spec.id])
            self._begin(self._waiting.pop(0))

    def _is_due(self, chunk: ChunkId) -> bool:
        if self._open[chunk]:
            return False
        if self._traced is not None:
            return self._opened[chunk] >= self._traced[chunk]
        announced = self._announced[chunk]
        return 0 < announced <= self._opened[chunk]

    # -- gradients --

    def arrived(self, chunk: Chunk, slot: int, grad: Tensor) -> None:
        """Pack a gradient; where readiness decides, reduce what is complete and has its turn."""
        chunk.gradient.add(slot, grad)
        key = chunk.spec.id, slot
        self._arrivals[key] = self._arrivals.get(key, 0) + 1  # Counter's own way is in Python
        if self._by_moment or not self._reduces:
            return
        # before the last of its parameters has a gradient, no chunk has become complete
        if chunk.gradient.num_arrived < len(chunk.spec.slots):
            return
        while self._waiting and self._is_complete(self._waiting[0]):
            self._begin(self._waiting.pop(0))

    def _begin(self, chunk: Chunk) -> None:
        """Begin to reduce it, and end the one before the last: a ticket keeps a whole payload."""
        chunk.gradient.begin_reduce()
        self._begun.append(chunk)
        if len(self._begun) > MAX_UNDER_WAY:
            self._end(self._begun.pop(0))
        if self.is_final is not None and self.active:  # where no rank adds to it
            self.is_final(chunk)

    def _end(self, chunk: Chunk) -> None:
        chunk.gradient.end_reduce()
        if self.is_final is not None and self.active:
            self.is_final(chunk)

    def _is_complete(self, chunk: Chunk) -> bool:
        if chunk.spec.id in self._at_end or chunk.gradient.num_arrived < len(chunk.spec.slots):
            return False
        for slot in range(len(chunk.spec.slots)):
            key = chunk.spec.id, slot
            if self._arrivals.get(key, 0) < self._usual.get(key, 1):
                return False
        return True

    def finish(self) -> None:
        """The backward has ended: reduce the rest in order, and wait for all."""
        if self._reduces:
            for chunk in self._waiting:
                chunk.gradient.begin_reduce()
            for chunk in self._order:
                self._end(chunk)
            self._nothing_is_left()
        else:
            for chunk in self._order:
                chunk.gradient.end_backward_unreduced()
            self.has_put_off |= self.synchronise
            self._follows_no_sync |= not self.synchronise
        self.unsynchronised = not self.synchronise
        self._learn()
        self._announced.clear()
        self.reset()

    def _learn(self) -> None:
        """The next backward is expected to be like this one."""
        if self._by_moment:
            self._traced = self._opened.copy()
            last = {chunk: i for i, chunk in enumerate(self._last_opened)}
            self._order.sort(key=lambda chunk: last.get(chunk.spec.id, len(last)))
        self._usual = Counter({key: n for key, n in self._arrivals.items() if n > 1})

    @property
    def leftover(self) -> bool:
        """Gradients that no reduction has: they came late, under `no_sync`, or were put off."""
        return any(chunk.gradient.num_arrived for chunk in self._order)

    def reduce_leftovers(self) -> None:
        """One more reduction of every chunk; all ranks call it when any has a leftover."""
        for chunk in self._order:
            self._begin(chunk)
        for chunk in self._begun:
            chunk.gradient.end_reduce()
        self._begun.clear()
        self._nothing_is_left()

    def reduce_held(self, factor: float) -> None:
        """Times `factor`, one reduction of what `holding` has left; all ranks call it."""
        for chunk in self._order:
            if factor != 1:
                chunk.gradient.scale_local(factor)
        self.reduce_leftovers()
        self.unsynchronised = False

    def reduce_put_off(self) -> None:
        """What was put off is asked for; all ranks call it."""
        if self.has_put_off:
            self.reduce_leftovers()

    def _nothing_is_left(self) -> None:
        self.has_put_off = self._follows_no_sync = False

    def drop_gradients(self) -> None:
        """Of this backward and of those accumulated before it."""
        for chunk in self._order:
            chunk.gradient.drop()
        self._nothing_is_left()
        self.reset()

    def reset(self) -> None:
        self._waiting = list(self._order)
        for counter in (self._opened, self._open, self._arrivals):
            counter.clear()
        self._last_opened.clear()
        self._begun.clear()
        self.active = False
