"""Blocks that pass through a few buffers: used when their transfer has ended, and given back."""

from unittest import mock

import pytest

from gemini.tickets import Done
from nvme import BufferPool, NvmeError, WriteBehind, read_ahead, settle


class Slow:
    """A transfer that ends when somebody waits for it."""

    def __init__(self, events, name, error=None):
        self.events, self.name, self.error = events, name, error

    def ready(self):
        return False

    def wait(self):
        self.events.append(f"waited {self.name}")
        if self.error is not None:
            raise self.error
        return self.name


def reads(events, errors=()):
    def begin(item, buffer):
        events.append(f"began {item}")
        return Slow(events, item, NvmeError("on purpose") if item in errors else None)

    return begin


@pytest.mark.parametrize("count", [1, 2, 3])
def test_as_many_are_read_ahead_as_there_are_buffers(count):
    pool, events = BufferPool(count, 1), []
    for item, _, answer in read_ahead(pool, range(4), reads(events)):
        assert item == answer
        begun = [event for event in events if event.startswith("began")]
        assert len(begun) == min(4, item + count)
    assert pool.num_free == count
    assert [event for event in events if event.startswith("waited")] == [
        f"waited {i}" for i in range(4)
    ]


def test_a_buffer_is_nobodys_but_its_items():
    pool, held = BufferPool(2, 1), []
    for item, buffer, _ in read_ahead(pool, range(5), lambda item, buffer: Done(None)):
        held.append((item, buffer.index))
        assert pool.num_free == 0 or item >= 3
    assert held == [(0, 1), (1, 0), (2, 1), (3, 0), (4, 1)]


@pytest.mark.parametrize("how", ["an error of a read", "an error of who reads", "no more wanted"])
def test_what_is_under_way_is_waited_for_when_reading_ends_early(how):
    pool, events = BufferPool(3, 1), []
    items = read_ahead(pool, range(9), reads(events, {1} if how == "an error of a read" else ()))
    if how == "an error of a read":
        with pytest.raises(NvmeError, match="on purpose"):
            list(items)
    elif how == "an error of who reads":
        with pytest.raises(KeyError):
            for item, _, _ in items:
                raise KeyError(item)
        items.close()
    else:
        next(items)
        items.close()
    begun = {event.split()[1] for event in events if event.startswith("began")}
    assert begun == {event.split()[1] for event in events if event.startswith("waited")}
    assert pool.num_free == 3


def test_who_takes_a_buffer_waits_for_the_oldest_write_alone():
    pool, events = BufferPool(2, 1), []
    writes = WriteBehind(pool)
    for name in "abc":
        writes.add(Slow(events, name), writes.take())
    assert events == ["waited a"] and len(writes) == 2
    writes.drain()
    assert events == ["waited a", "waited b", "waited c"] and pool.num_free == 2


def test_what_has_ended_is_taken_back_without_waiting():
    pool, events = BufferPool(3, 1), []
    writes, ended = WriteBehind(pool), []
    first = mock.Mock(ready=lambda: bool(ended))
    writes.add(first, writes.take())
    writes.add(Slow(events, "b"), writes.take())
    writes.reap()
    assert pool.num_free == 1
    ended.append(True)
    writes.reap()
    assert pool.num_free == 2 and events == []


def test_a_write_that_failed_is_raised_and_its_buffer_given_back():
    pool, events = BufferPool(2, 1), []
    writes = WriteBehind(pool)
    writes.add(Slow(events, "a", NvmeError("on purpose")), writes.take())
    writes.add(Slow(events, "b", NvmeError("another")), writes.take())
    with pytest.raises(NvmeError, match="on purpose"):
        writes.drain()
    assert pool.num_free == 1
    writes.abandon()
    assert pool.num_free == 2 and events == ["waited a", "waited b"]


def test_an_outcome_that_no_longer_matters_is_waited_for():
    events = []
    settle(Slow(events, "a", NvmeError("on purpose")))
    settle(None)
    assert events == ["waited a"]
    with pytest.raises(KeyError):
        settle(Slow(events, "b", KeyError()))


def test_a_transfer_that_cannot_begin_costs_no_buffer():
    """As of a block whose write has failed meanwhile."""
    pool, events = BufferPool(2, 1), []
    begin = reads(events)

    def begins(item, buffer):
        if item == 3:
            raise NvmeError("on purpose")
        return begin(item, buffer)

    with pytest.raises(NvmeError, match="on purpose"):
        list(read_ahead(pool, range(5), begins))
    assert events[-1] == "waited 2" and pool.num_free == 2
