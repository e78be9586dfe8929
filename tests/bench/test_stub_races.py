"""The checker of `tests.cuda_stub`, on logs that are written by hand: it needs no CUDA."""

import pytest

from tests.cuda_stub.races import PAGE_BITS, Call, Race, parse, races

A, B, EVENT = 1, 2, 7  # two streams, and an event
AT, N = 0x1000, 64


def work(stream, what, at=AT, nbytes=N, place="?"):
    return [Call("work", stream), Call(what, at=at, nbytes=nbytes, place=place)]


def by_host(what, at=AT, nbytes=N):
    return [Call("host"), Call(what, at=at, nbytes=nbytes)]


RECORDED, ORDERED = Call("record", A, EVENT), Call("order", B, EVENT)
WRITES = work(A, "write")


def pairs(*parts):
    calls = []
    for part in parts:
        calls += [part] if isinstance(part, Call) else part
    return races(calls).total()


@pytest.mark.parametrize("first, second", [("write", "read"), ("read", "write"), ("write",) * 2])
def test_streams_race_where_one_writes(first, second):
    assert pairs(work(A, first), work(B, second)) == 1


def test_reads_do_not_race_and_a_stream_is_in_order():
    assert pairs(work(A, "read"), work(B, "read")) == 0
    assert pairs(WRITES, work(A, "read"), work(A, "write")) == 0


def test_only_bytes_that_overlap_race():
    assert pairs(WRITES, work(B, "write", AT + N)) == 0
    assert pairs(WRITES, work(B, "write", AT + N - 1)) == 1


def test_an_event_orders_what_was_given_before_it():
    assert pairs(WRITES, RECORDED, ORDERED, work(B, "read")) == 0
    assert pairs(RECORDED, WRITES, ORDERED, work(B, "read")) == 1
    assert pairs(WRITES, RECORDED, work(B, "read"), ORDERED) == 1
    assert pairs(WRITES, RECORDED, Call("order", 3, EVENT), work(B, "read")) == 1


def test_an_event_that_is_recorded_again_is_of_its_last_record():
    again = Call("record", B, EVENT)
    assert pairs(WRITES, RECORDED, again, Call("order", 3, EVENT), work(3, "read")) == 1


def test_order_goes_on_from_stream_to_stream():
    onwards = [Call("record", B, 8), Call("order", 3, 8)]
    assert pairs(WRITES, RECORDED, ORDERED, onwards, work(3, "write")) == 0


@pytest.mark.parametrize("what", ["read", "write"])
def test_the_host_waits_for_what_a_stream_writes(what):
    assert pairs(WRITES, by_host(what)) == 1
    assert pairs(WRITES, Call("settled", A), by_host(what)) == 0
    assert pairs(WRITES, Call("settled", B), by_host(what)) == 1
    assert pairs(WRITES, Call("idle"), by_host(what)) == 0
    assert pairs(WRITES, RECORDED, by_host(what)) == 1
    assert pairs(WRITES, RECORDED, Call("ended", at=EVENT), by_host(what)) == 0


def test_the_host_may_read_what_a_stream_reads():
    assert pairs(work(A, "read"), by_host("read")) == 0
    assert pairs(work(A, "read"), by_host("write")) == 1


def test_streams_come_after_the_host_and_what_it_has_waited_for():
    assert pairs(by_host("write"), work(A, "read")) == 0
    assert pairs(WRITES, Call("settled", A), work(B, "read")) == 0
    assert pairs(WRITES, RECORDED, work(A, "write"), Call("ended", at=EVENT), work(B, "read")) == 1


def test_memory_is_not_unpinned_under_a_copy():
    unpin = Call("unpin", at=AT - N, nbytes=4 * N)
    assert pairs(work(A, "read"), unpin) == 1
    assert pairs(work(A, "read"), Call("settled", A), unpin) == 0
    (race,) = races([*work(A, "read", place="a copy"), unpin])
    assert race == Race("stream 0x1 reads: a copy", "the host unpins: ?")


def test_what_a_later_write_covers_is_reported_once():
    covers = work(A, "write", AT - N, 4 * N)
    assert pairs(WRITES, covers, work(B, "read")) == 1
    part = work(A, "write", AT, N // 2)
    assert pairs(WRITES, part, work(B, "read")) == 2  # either is still there


def test_a_pair_counts_once_over_pages():
    pages = 3 << PAGE_BITS
    assert pairs(work(A, "write", AT + 8, pages), work(B, "read", AT, pages)) == 1


def test_one_work_may_touch_much_and_does_not_race_with_itself():
    both = [Call("work", A), *(Call(what, at=AT, nbytes=N) for what in ("read", "write"))]
    assert pairs(both, both) == 0
    assert pairs(both, Call("work", B), Call("read", at=AT, nbytes=N)) == 1


def test_a_log_is_read_by_line():
    lines = "work\t5\t0\t0\t11\t-1\nwrite\t5\t4096\t64\t11\t1\n"
    assert parse(lines, ["here", "there"]) == [
        Call("work", 5, thread=11, place="thread 11"), Call("write", 5, 4096, 64, 11, "there"),
    ]  # fmt: skip


def test_a_line_that_is_unknown_is_refused():
    with pytest.raises(ValueError, match="'waits' is no call of a log"):
        races([Call("waits", A)])


def test_an_event_that_was_asked_for_is_known_to_be_over():
    asked = Call("asked", at=EVENT)
    assert pairs(WRITES, RECORDED, by_host("read"), asked) == 1
    assert pairs(WRITES, RECORDED, asked, by_host("read")) == 0


@pytest.mark.parametrize("what", ["h2d", "d2h", "d2d"])
def test_copies_are_work(what):
    copies = [Call(what, B), Call("read", at=AT, nbytes=N)]
    assert pairs(WRITES, *copies) == 1
    assert pairs(WRITES, RECORDED, ORDERED, *copies) == 0


def test_who_of_the_host_waits_for_whom_orders_nothing():
    host = [Call("signal", at=1), Call("wait", at=1), Call("read from disk", nbytes=N)]
    assert pairs(WRITES, *host, work(B, "read")) == 1
