"""Flow of spans between a file and a few buffers, from one step to the next. Pure.

A span is a run of elements that is updated together. Its record brings it into a buffer and takes
it back, and only the record knows where its bytes are. Nothing here reads a clock, a disk or a
tensor: tickets are asked, and whoever carries a flow out waits for them (`optim.state.nvme_state`
for a disk, `gemini.placement.timetable.clock` for a price). One thread at a time.

    begin        a step begins: spans that were read ahead come first, and what it brings beside
                 their state follows
    waits_for    reads are begun; the transfer that must end before the next span is there
    end          a transfer has ended
    take, put    the next span, to be updated; its new version is on its way to the file, as soon
                 as the copies have ended that bring it to the buffer
    committed    the step counts: the next one begins with what is still in a buffer
    settle, undo    whatever is under way ends; the spans whose weights must be restored
    undone       they are: the next step may begin

A new version lies beside the last one, which counts until a commit: so a step is undone by
forgetting what was written, and by restoring weights that were changed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Generic, Protocol, TypeVar

from gemini.tickets import Ticket, TicketGroup
from gemini.units import BlockId


class Record(Protocol):
    """Place of a span's bytes outside of its buffer."""

    @property
    def id(self) -> BlockId:
        """The block whose bytes these are."""
        ...

    def begin(self, buffer: Any) -> Ticket[object]:
        """Begin to read the last version."""
        ...

    def put(self, buffer: Any) -> Ticket[object]:
        """Begin to write the next version."""
        ...


R = TypeVar("R", bound=Record)


@dataclass(slots=True, eq=False)
class Span(Generic[R]):
    """Run of elements that is updated together, and its buffers while it has them."""

    record: R
    buffer: Any = None  # a `nvme.Buffer`
    beside: Record | None = None  # of this step alone, in other files than `record`
    more: Any = None  # the buffers of `beside`, from its read until its write has ended
    # of its transfer, or of the copies that bring it to its buffer; None: it has ended
    ticket: Ticket[object] | None = None
    was_read: bool = False  # its read was begun before the step
    is_touched: bool = False  # its weights may not be those of the last step
    id: BlockId = field(init=False)

    def __post_init__(self) -> None:
        self.id = self.record.id


def num_buffers(depth: int, num_spans: int, more: int = 0) -> int:
    """Number of buffers of a flow: of spans that are read, of one that is updated and one that is
    written, and of `more` that leave a device, or are written, at once."""
    return min(depth + 2, num_spans + 1) + min(more, num_spans)


class Flow(Generic[R]):
    """Spans of one file, in and out of `free` buffers; `depth` are read before their update.

    window: spans whose copies go on beside the next update. They are as many as buffers are left by
        those that are read and the one that is updated: a host that waits for the last of them
        waits once for all.

    Invariant: buffers that spans have and free ones are those there are.
    """

    def __init__(self, spans: Sequence[Span[R]], depth: int, free: list[Any]) -> None:
        self.spans = list(spans)
        self.order = list(spans)  # of the next step
        self.depth = depth
        self._own(free)
        self.in_step = False  # between `begin` and the commit or the undo
        self.todo: deque[Span[R]] = deque()  # of the step, not begun
        self.reads: deque[Span[R]] = deque()  # begun or there, in order: the first of `order`
        self.leaving: deque[Span[R]] = deque()  # updated, on the way to their buffer, in order
        self.writes: deque[Span[R]] = deque()  # in order
        self.cached: deque[Span[R]] = deque()  # written, with a buffer that may be taken
        self.more: list[Any] = []  # free buffers of what a step brings beside the spans' records
        self._has_more = False  # the step brings something beside
        self._updated: Callable[[Span[R]], object] | None = None  # of the step, and no longer

    def change(self, spans: Sequence[Span[R]], free: list[Any]) -> None:
        """Have other spans and other buffers. Nothing is under way; the order of known ones
        stays."""
        there = {span.id for span in spans}
        kept = [span for span in self.order if span.id in there]
        known = {span.id for span in kept}
        self.order = kept + [span for span in spans if span.id not in known]
        self.spans = list(spans)
        self._own(free)

    def _own(self, free: list[Any]) -> None:
        """Have these buffers, and no others."""
        self.free, self.window = free, max(1, len(free) - self.depth - 1)

    # -- a step --

    def begin(
        self,
        updated: Callable[[Span[R]], object] | None = None,
        beside: Mapping[BlockId, Record] = MappingProxyType({}),
        more: Sequence[Any] = (),
    ) -> None:
        """Begin a step of all spans.

        updated: told of each whose new version is in its buffer, before it is written, and behind
            the write of what is `beside` it.
        beside: what the step reads and writes with a span in other files; `more`: buffers for that,
            of which the caller is the owner again when the step has ended.
        """
        self.in_step, self._updated = True, updated
        self._has_more, self.more = bool(beside), list(more)
        for span in self.spans if beside else ():
            span.beside = beside.get(span.id)
        for span in self.reads:
            span.was_read = True
        self.todo = deque(self.order[len(self.reads) :])

    def waits_for(self) -> Span[R] | None:
        """Begin the reads that have room, and tell the span whose transfer must end before `take`;
        None: none must."""
        while self.todo and len(self.reads) < self.depth and self._has_buffer(self.todo[0]):
            span = self.todo.popleft()
            self.reads.append(span)
            span.ticket = span.record.begin(span.buffer)
        if self._has_more:
            self._begin_beside()
        if len(self.leaving) > self.window:
            return self.leaves_last(self.window)
        if self.reads:
            first = self.reads[0]
            if first.beside is not None and first.more is None:
                return self.ends_next()  # which has its buffers
            if first.ticket is None:
                return None
            # While it is on its way: copies to buffers are over sooner than a transfer.
            return self.ends_next() if self.leaving and not first.ticket.ready() else first
        if not self.todo:
            return None
        return self.ends_next() if self.leaving else self.writes[0]

    def ends_next(self) -> Span[R] | None:
        """The span whose transfer ends next if nothing is begun: the last that leaves, and all
        before it, else the first that is written; None: nothing leaves or is written."""
        if self.leaving:
            return self.leaves_last(len(self.leaving))
        return self.writes[0] if self.writes else None

    def leaves_last(self, count: int) -> Span[R]:
        """The last of the first `count` that leave, or one before it if it has left already."""
        for i in reversed(range(count)):
            if self.leaving[i].ticket is not None:
                return self.leaving[i]
        raise AssertionError("what has left is not written")

    def take(self) -> Span[R] | None:
        """The next span, which is there; None: there is none."""
        return self.reads.popleft() if self.reads else None

    def put(self, span: Span[R], copies: Ticket[object] | None = None) -> None:
        """Begin to take an updated span back, when the `copies` to its buffer have ended."""
        if copies is None:
            self._write(span)
            return
        span.ticket = copies
        self.leaving.append(span)
        self._write_what_left()

    def _write_what_left(self) -> None:
        """Begin to write, in order, spans whose copies have ended. Raises their errors."""
        while self.leaving:
            first = self.leaving[0]
            ticket, first.ticket = first.ticket, None
            if ticket is not None and not ticket.ready():
                first.ticket = ticket
                return
            if ticket is not None:
                ticket.wait()
            self._write(self.leaving.popleft())

    def _write(self, span: Span[R]) -> None:
        self.writes.append(span)
        if span.beside is not None:
            span.ticket = span.beside.put(span.more)
        if self._updated is not None:
            self._updated(span)
        ticket = span.record.put(span.buffer)
        span.ticket = ticket if span.ticket is None else TicketGroup([span.ticket, ticket])

    def end(self, span: Span[R]) -> None:
        """Wait for a span's transfer, of writes the first. Raises its error. Copies end in their
        order, so of those that leave one may be waited for instead of all before it."""
        ticket, span.ticket = span.ticket, None
        assert ticket is not None
        is_written = bool(self.writes) and self.writes[0] is span
        if is_written:
            self.cached.append(self.writes.popleft())
        ticket.wait()
        if is_written and span.more is not None:
            self.more.append(span.more)
            span.more = None
        if self.leaving:
            self._write_what_left()

    def _begin_beside(self) -> None:
        """Begin to read, in order, what the step brings beside spans that are read. Never waits."""
        for span in self.reads:
            if span.beside is None or span.more is not None:
                continue
            if self.writes and not self.more:
                self._end_first_write()
            if not self.more:
                return
            span.more = self.more.pop()
            ticket = span.beside.begin(span.more)
            span.ticket = ticket if span.ticket is None else TicketGroup([span.ticket, ticket])

    def _has_buffer(self, span: Span[R]) -> bool:
        """Take a buffer for a span if there is one. Never waits."""
        # Only where one is needed: a written span that keeps its buffer is not read again.
        if self.writes and not (self.free or self.cached):
            self._end_first_write()
        if self.free:
            span.buffer = self.free.pop()
        elif self.cached:
            other = self.cached.popleft()
            span.buffer, other.buffer = other.buffer, None
        return span.buffer is not None

    def _end_first_write(self) -> None:
        """End it if it is over. Never waits."""
        ticket = self.writes[0].ticket
        if ticket is not None and ticket.ready():
            self.end(self.writes[0])

    def give(self, span: Span[R]) -> None:
        """Take the buffer of a span back: its weights and its file are those of the last step."""
        if span.buffer is not None:
            self.free.append(span.buffer)
        span.buffer = None
        span.was_read = span.is_touched = False

    def committed(self, *, in_order: bool) -> None:
        """Note that the step counts.

        in_order: the next one begins with the first span; else with the last of this one, whose
            buffer has it already.
        """
        self._end_step()
        self.order = list(self.spans) if in_order else self.order[::-1]
        for span in self.spans:
            span.was_read = span.is_touched = False
        while self.cached:
            span = self.cached.pop()
            place = len(self.reads)
            if place < self.depth and span is self.order[place]:
                self.reads.append(span)
            else:
                self.give(span)

    # -- between steps --

    def read_ahead(self) -> None:
        """Begin to read the first spans of the next step. Never waits. Raises nothing, as nobody's
        call would fail: the step begins what could not be begun."""
        while len(self.reads) < min(self.depth, len(self.order)):
            span = self.order[len(self.reads)]
            if not self._has_buffer(span):
                return
            try:
                span.ticket = span.record.begin(span.buffer)
            except Exception:
                self.give(span)
                return
            self.reads.append(span)

    def settle(self) -> None:
        """Wait for all transfers, whatever becomes of them."""
        for span in (*self.reads, *self.leaving, *self.writes):
            ticket, span.ticket = span.ticket, None
            if ticket is not None:
                with suppress(Exception):
                    ticket.wait()

    def quiesce(self) -> None:
        """Quiesce: nothing is under way, and no buffer has a span that is not touched."""
        self.settle()
        for queue in (self.todo, self.reads, self.leaving, self.writes, self.cached):
            queue.clear()
        for span in self.spans:
            if not span.is_touched:
                self.give(span)

    def undo(self) -> list[Span[R]]:
        """Begin to undo a step, however far it came: the spans whose weights must be restored.

        Those come first whose buffer knows the weights of before; each gives it back by `give`.
        """
        self.quiesce()
        touched = [span for span in self.spans if span.is_touched]
        return sorted(touched, key=lambda span: span.buffer is None)

    def undone(self) -> None:
        """Note that the step is undone: the next one may begin."""
        self._end_step()

    def _end_step(self) -> None:
        self.in_step, self._updated, self.more = False, None, []
        for span in self.spans if self._has_more else ():
            span.beside = span.more = None
        self._has_more = False
