"""A flow of spans alone: drawn steps over a store of two versions, whose transfers end and fail as
drawn."""

import random
from dataclasses import dataclass
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optim.state.flow import Flow, Span, num_buffers


class Fault(Exception):
    pass


class File:
    """Two versions of numbered values, and transfers that end when they are waited for, or sooner.

    fails_at: the numbers of calls, in order of begin, that fail: as they are begun, or at their end
    """

    def __init__(self, count, chance, fails_at=()):
        self.committed = dict.fromkeys(range(count), 0)
        self.written = {}
        self.chance, self.fails_at, self.calls = chance, set(fails_at), 0
        self.reads = []

    def commit(self):
        self.committed.update(self.written)
        self.written.clear()

    def fails(self):
        self.calls += 1
        return self.calls in self.fails_at


@dataclass
class Transfer:
    file: File
    act: object
    fails: bool
    ended: bool = False

    def ready(self):
        if not self.ended and self.file.chance.random() < 0.3:
            self._end()
        return self.ended

    def wait(self):
        if not self.ended:
            self._end()
        if self.fails:
            raise Fault

    def _end(self):
        self.ended = True
        if not self.fails:
            self.act()


@dataclass
class Record:
    file: File
    id: int

    def begin(self, buffer):
        fails = self.file.fails()
        if fails and self.file.chance.random() < 0.5:
            raise Fault
        self.file.reads.append(self.id)
        buffer["busy"] = buffer.get("busy", 0) + 1

        def act():
            buffer.update(id=self.id, value=self.file.committed[self.id])

        return Freed(self.file, act, fails, buffer)

    def put(self, buffer):
        assert buffer["id"] == self.id
        fails = self.file.fails()
        value = buffer["value"]
        buffer["busy"] = buffer.get("busy", 0) + 1

        def act():
            assert buffer["id"] == self.id and buffer["value"] == value  # nobody else had it
            self.file.written[self.id] = value

        return Freed(self.file, act, fails, buffer)


@dataclass
class Beside:
    """What a step brings beside a record: it is read into a set of buffers, or not, and written."""

    file: File
    id: int
    reads: bool

    def begin(self, buffers):
        if self.file.fails() and self.file.chance.random() < 0.5:
            raise Fault
        assert not buffers.get("busy", 0), "buffers of a transfer that goes on"
        buffers.update(id=self.id, value=None, is_put=False)
        act = partial(buffers.update, value=self.file.committed[self.id]) if self.reads else int
        return self._transfer(buffers, act)

    def put(self, buffers):
        assert buffers["id"] == self.id
        buffers["is_put"] = True

        def act():
            assert buffers["id"] == self.id
            self.file.written[self.id] = buffers["value"]

        return self._transfer(buffers, act)

    def _transfer(self, buffers, act):
        buffers["busy"] = buffers.get("busy", 0) + 1
        return Freed(self.file, act, self.file.fails(), buffers)


class Freed(Transfer):
    """Of a buffer that is nobody else's until then."""

    def __init__(self, file, act, fails, buffer):
        super().__init__(file, act, fails)
        self.buffer = buffer

    def _end(self):
        super()._end()
        self.buffer["busy"] -= 1


def made(count, depth, more, chance, fails_at=()):
    file = File(count, chance, fails_at)
    spans = [Span(Record(file, number)) for number in range(count)]
    buffers = [{} for _ in range(num_buffers(depth, count) + more)]
    return file, Flow(spans, depth, list(buffers)), buffers


def check(flow, buffers, at_rest=False):
    """Buffers that spans have and free ones are those there are; no more reads than `depth`."""
    held = [span.buffer for span in flow.spans if span.buffer is not None]
    assert sorted(map(id, (*held, *flow.free))) == sorted(map(id, buffers))
    assert len(flow.reads) <= flow.depth
    assert [span.id for span in flow.reads] == [
        span.id for span in flow.order[: len(flow.reads)]
    ] or flow.in_step
    if at_rest:
        assert not held and all(buffer.get("busy", 0) == 0 for buffer in buffers)


def put(flow, file, span, by_device):
    """Take back a value that is one more; of a device it is in its buffer when a copy has ended."""
    buffer, value = span.buffer, span.buffer["value"] + 1
    if not by_device:
        buffer["value"] = value
        flow.put(span)
        return
    buffer["value"], buffer["busy"] = None, buffer.get("busy", 0) + 1
    copies = Freed(file, lambda: buffer.update(value=value), file.fails(), buffer)
    flow.put(span, copies)


def step(flow, file, buffers, weights, untouched=(), waits=False, by_device=False, beside=None):
    """One step: every value is one more, and so is its weight. Returns whether it counts.

    beside: (records of files beside, their file, buffers).
    """
    told = []

    def tell(span):
        told.append((span.id, span.buffer["value"]))
        assert span.id not in found or span.more["is_put"]

    found, other, sets = beside or ({}, None, ())
    found = {i: record for i, record in found.items() if i not in untouched}
    flow.begin(tell, found, sets)
    done, waiting = [], []
    try:
        while True:
            while (busy := flow.waits_for()) is not None:
                assert busy.ticket is not None
                flow.end(busy)
            span = flow.take()
            check(flow, buffers)
            if span is None:
                break
            assert span.buffer["id"] == span.id and span.buffer["value"] == file.committed[span.id]
            done.append(span.id)
            if span.id in untouched:
                flow.give(span)
                continue
            span.is_touched = True
            if span.id in found:
                assert span.more["id"] == span.id
                if found[span.id].reads:
                    assert span.more["value"] == other.committed[span.id]
                span.more["value"] = span.buffer["value"] + 1
            weights[span.id] += 1
            if waits and not waiting:
                waiting.append(span)
                continue
            assert len(flow.leaving) <= flow.window
            put(flow, file, span, by_device)
            while waiting:
                put(flow, file, waiting.pop(), by_device)
        while waiting:
            put(flow, file, waiting.pop(), by_device)
        while (busy := flow.ends_next()) is not None:
            flow.end(busy)
    except Fault:
        for span in flow.undo():
            weights[span.id] = file.committed[span.id]
            flow.give(span)
        flow.undone()
        file.written.clear()
        if other is not None:
            other.written.clear()
        check(flow, buffers, at_rest=True)
        assert not any(buffers.get("busy", 0) for buffers in sets)
        return False
    assert sorted(done) == list(range(len(flow.spans)))
    assert dict(told) == file.written and len(told) == len(done) - len(untouched)
    if other is not None:
        assert other.written == {i: file.written[i] for i in found}
        assert sorted(map(id, flow.more)) == sorted(map(id, sets))
        other.commit()
    file.commit()
    return True


@settings(max_examples=300, deadline=None)
@given(
    count=st.integers(1, 9), depth=st.integers(1, 4), more=st.integers(0, 2),
    seed=st.integers(0, 1 << 30), in_order=st.booleans(), waits=st.booleans(),
    by_device=st.booleans(), num_sets=st.integers(0, 4),
    fails_at=st.sets(st.integers(1, 90), max_size=4), steps=st.integers(1, 5),
)  # fmt: skip
def test_a_step_counts_as_a_whole_or_not_at_all(
    count, depth, more, seed, in_order, waits, by_device, num_sets, fails_at, steps
):
    chance = random.Random(seed)
    file, flow, buffers = made(count, depth, more + waits, chance, fails_at)
    weights, want = dict.fromkeys(range(count), 0), dict.fromkeys(range(count), 0)
    other = File(count, chance, fails_at)
    for _ in range(steps):
        beside = None
        if num_sets:
            some = [number for number in range(count) if chance.random() < 0.7]
            records = {number: Beside(other, number, chance.random() < 0.5) for number in some}
            beside = records, other, [{} for _ in range(num_sets + waits)]
        if chance.random() < 0.3:
            flow.quiesce()
            check(flow, buffers, at_rest=True)
        if chance.random() < 0.5:
            flow.read_ahead()
        untouched = {number for number in range(count) if chance.random() < 0.2}
        other.committed = dict(file.committed)  # also of those that were not beside before
        if step(flow, file, buffers, weights, untouched, waits, by_device, beside):
            flow.committed(in_order=in_order)
            flow.read_ahead()
            want = {n: value + (n not in untouched) for n, value in want.items()}
        check(flow, buffers)
        assert file.committed == weights == want
    flow.quiesce()
    check(flow, buffers, at_rest=True)


@pytest.mark.parametrize("in_order", [False, True])
def test_the_next_step_begins_with_what_was_written_last_or_with_the_first(in_order):
    """What is still in a buffer is not read again."""
    file, flow, buffers = made(7, 2, 0, random.Random(0))
    weights = dict.fromkeys(range(7), 0)
    assert step(flow, file, buffers, weights)
    flow.committed(in_order=in_order)
    file.reads.clear()
    assert [span.id for span in flow.order] == (
        list(range(7)) if in_order else [6, 5, 4, 3, 2, 1, 0]
    )
    assert [span.id for span in flow.reads] == ([] if in_order else [6, 5])
    flow.read_ahead()
    assert file.reads == ([0, 1] if in_order else [])


def test_a_span_that_was_read_before_its_step_is_known_as_such():
    _, flow, _ = made(5, 2, 0, random.Random(0))
    flow.read_ahead()
    flow.begin()
    assert [span.was_read for span in flow.spans] == [True, True, False, False, False]
    flow.committed(in_order=True)
    assert not any(span.was_read for span in flow.spans)


def test_spans_whose_buffer_knows_what_was_are_undone_first():
    _, flow, _ = made(6, 1, 0, random.Random(0), fails_at={11})
    weights = dict.fromkeys(range(6), 0)
    flow.begin()
    with pytest.raises(Fault):
        while True:
            while (busy := flow.waits_for()) is not None:
                flow.end(busy)
            span = flow.take()
            span.is_touched, span.buffer["value"] = True, span.buffer["value"] + 1
            flow.put(span)
    undone = flow.undo()
    known = [span.buffer is not None for span in undone]
    assert known == sorted(known, reverse=True) and known[0] and not known[-1]
    assert {span.id for span in undone} == {span.id for span in flow.spans if span.is_touched}
    assert weights == dict.fromkeys(range(6), 0)


def test_other_spans_keep_the_order_of_those_that_stay():
    file, flow, buffers = made(4, 1, 0, random.Random(0))
    assert step(flow, file, buffers, dict.fromkeys(range(4), 0))
    flow.committed(in_order=False)
    flow.quiesce()
    new = [Span(Record(file, number)) for number in (4, 5)]
    flow.change([*flow.spans[1:], *new], [{} for _ in range(3)])
    assert [span.id for span in flow.order] == [3, 2, 1, 4, 5] and len(flow.free) == 3


@pytest.mark.parametrize(("more", "most"), [(0, 30), (3, 8), (7, 4)])
def test_a_host_waits_once_for_a_window_of_spans_that_leave_a_device(more, most):
    """Of 30 whose reads are there: copies end when the host waits, and all before them."""
    chance = random.Random(0)
    file, flow, _ = made(30, 2, more, chance)
    copies, waits = [], []

    @dataclass
    class Copies:
        number: int
        ended: bool = False

        def ready(self):
            return self.ended

        def wait(self):
            if not self.ended:
                waits.append(self.number)
            for other in copies[: self.number + 1]:  # in their order
                other.ended = True

    flow.begin()
    for _ in range(30):
        while (busy := flow.waits_for()) is not None:
            flow.end(busy)
        for span in (*flow.reads, *flow.writes):  # a disk that is faster than the link
            span.ticket.wait() if span.ticket is not None else None
        span = flow.take()
        assert len(flow.leaving) <= flow.window  # so many buffers are left for reads
        span.is_touched = True
        copies.append(Copies(len(copies)))
        flow.put(span, copies[-1])
    while (busy := flow.ends_next()) is not None:
        flow.end(busy)
    assert flow.window == 1 + more and sorted(file.written) == list(range(30))
    assert len(waits) <= most


@pytest.mark.parametrize(("depth", "count", "want"), [(2, 10, 4), (2, 1, 2), (4, 3, 4), (1, 2, 3)])
def test_buffers_are_those_of_reads_an_update_and_a_write(depth, count, want):
    assert num_buffers(depth, count) == want
