"""The replay of `tests.cuda_stub`, of logs that are written by hand: it needs no CUDA."""

import pytest

from tests.cuda_stub.races import Call
from tests.cuda_stub.replay import Replayed, ReplaySpeeds, begins, replay

A, B, EVENT = 1, 2, 7  # two streams, and an event
N = 100  # bytes: a second of a link
SPEEDS = ReplaySpeeds(
    host_to_device=N, device_to_host=N / 2, device_memory=N, disk_read=N, disk_write=N / 4,
    operators={"product": 3.0},
)  # fmt: skip


def copy(what, stream, nbytes=N, thread=0):
    return [
        Call(what, stream, 0, 0, thread, "copied"), Call("read", stream, 1, nbytes, thread),
        Call("write", stream, 2, nbytes, thread),
    ]  # fmt: skip


def product(stream=A, thread=0):
    return [Call("work", stream, 0, 0, thread, "product")]


def spans(*parts, speeds=SPEEDS):
    calls = [call for part in parts for call in ([part] if isinstance(part, Call) else part)]
    return [(one.what, one.begin, one.end) for one in replay(calls, speeds)]


RECORDED, ORDERED = Call("record", A, EVENT), Call("order", B, EVENT)


def test_both_directions_copy_at_once_and_each_one_at_a_time():
    found = spans(copy("h2d", A), copy("d2h", B), copy("h2d", 3))
    assert found == [("h2d", 0, 1), ("d2h", 0, 2), ("h2d", 1, 2)]


def test_a_stream_is_in_order_and_waits_for_events():
    assert spans(copy("h2d", A), product(A)) == [("h2d", 0, 1), ("work", 1, 4)]
    assert spans(copy("h2d", A), product(B)) == [("h2d", 0, 1), ("work", 0, 3)]
    waits = spans(copy("h2d", A), RECORDED, ORDERED, product(B))
    assert waits == [("h2d", 0, 1), ("work", 1, 4)]
    unmarked = spans(RECORDED, copy("h2d", A), ORDERED, product(B))
    assert unmarked == [("h2d", 0, 1), ("work", 0, 3)]


def test_an_order_is_after_the_record_that_the_log_has_before_it():
    later = Call("record", B, EVENT)
    found = spans(copy("h2d", A), RECORDED, Call("order", 3, EVENT), product(B), later, product(3))
    assert sorted(found) == [("h2d", 0, 1), ("work", 0, 5), ("work", 1, 6)]


def test_a_link_carries_what_may_begin_first():
    held = spans(product(A), RECORDED, ORDERED, copy("h2d", B), copy("h2d", 3))
    assert sorted(held) == [("h2d", 0, 1), ("h2d", 3, 4), ("work", 0, 3)]


def test_kernels_share_the_device():
    assert spans(product(A), product(B)) == [("work", 0, 6), ("work", 0, 6)]
    one_later = spans(copy("h2d", B), product(B), product(A))
    assert one_later == [("h2d", 0, 1), ("work", 0, 5), ("work", 1, 6)]


def test_a_kernel_takes_its_bytes_and_an_update_reads_what_it_writes():
    touched = [Call("read", A, 1, N), Call("write", A, 2, N)]
    named = [Call("work", A, place="another"), *touched]
    update = [Call("work", A, place="update_kernel in a step"), *touched]
    assert spans(named) == [("work", 0, 2)]
    assert spans(update) == [("work", 0, 3)]
    assert spans([Call("host"), *touched]) == []


def test_the_host_spends_a_call_and_waits_where_it_waited():
    slow = ReplaySpeeds(host_to_device=N, device_to_host=N, device_memory=N, call=0.25)
    assert spans(copy("h2d", A), copy("h2d", B), speeds=slow)[1] == ("h2d", 1, 2)
    waits = [Call("ended", at=EVENT), copy("d2h", B)]
    assert spans(copy("h2d", A), RECORDED, *waits) == [("h2d", 0, 1), ("d2h", 1, 3)]
    asks = [Call("asked", at=EVENT), copy("d2h", B)]
    assert spans(copy("h2d", A), RECORDED, *asks) == [("h2d", 0, 1), ("d2h", 0, 2)]
    for whole in (Call("settled", A), Call("idle")):
        assert spans(copy("h2d", A), whole, copy("d2h", B))[1] == ("d2h", 1, 3)


def test_threads_of_the_host_have_clocks_of_their_own():
    """One waits for a copy; the other goes on, until it waits for the first."""
    beside = [*copy("h2d", A, thread=5), Call("record", A, EVENT, thread=5)]
    beside += [Call("ended", at=EVENT, thread=5), Call("signal", at=9, thread=5)]
    assert spans(beside, copy("d2h", B)) == [("h2d", 0, 1), ("d2h", 0, 2)]
    waits = spans(beside, Call("wait", at=9), copy("d2h", B))
    assert waits == [("h2d", 0, 1), ("d2h", 1, 3)]
    assert spans(beside, Call("wait", at=8), copy("d2h", B))[1] == ("d2h", 0, 2)  # of before


def test_a_disk_moves_one_thing_at_a_time_and_holds_its_thread():
    reads = Call("read from disk", nbytes=N, thread=5)
    writes = Call("write to disk", nbytes=N, thread=6)
    assert spans(reads, writes) == [("read from disk", 0, 1), ("write to disk", 1, 5)]
    assert spans(reads, copy("h2d", A, thread=5))[1] == ("h2d", 1, 2)


def test_what_the_stub_has_logged_an_operator_does_not_do_again():
    again = [Call("work", A, place="copied"), Call("write", A, 2, N)]
    assert spans(copy("h2d", A), again) == [("h2d", 0, 1)]
    other = Call("work", A, place="product")
    assert len(spans(copy("h2d", A), other)) == 2


def test_begins_are_found_by_the_begin_of_a_place():
    found = [Replayed("work", "product of", 1.0, 2.0), Replayed("h2d", "copied", 0.0, 1.0)]
    assert begins(found, "product") == [1.0]


@pytest.mark.parametrize("call", [0.0, 0.5])
def test_a_replay_keeps_the_order_of_what_begins(call):
    speeds = ReplaySpeeds(host_to_device=N, device_to_host=N, device_memory=N, call=call)
    log = [c for _ in range(4) for c in (*copy("h2d", A), RECORDED, ORDERED, *copy("d2h", B))]
    found = replay(log, speeds)
    assert [one.begin for one in found] == sorted(one.begin for one in found)
    assert len(found) == 8
