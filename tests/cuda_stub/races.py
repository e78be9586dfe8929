"""Races in a log of CUDA's calls: accesses of the same bytes, one of which writes, in no order.

Vector clocks. The work of a stream is numbered. For each stream and for the host, `_known` has up
to which number every stream's work is done before what that one does next; an event has what its
stream knew when it was recorded. Work of the host is done when the host goes on, so streams come
after it.

All threads of the host are one: what they do to each other is no matter of a device.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

PAGE_BITS = 12  # accesses are kept by page, so that few are compared
HOST = -1
COPIES = ("h2d", "d2h", "d2d")  # work that the stub itself sees: which way it goes
# what is no matter of a device: who of the host waits for whom, and what a disk moves
OF_HOST = ("signal", "wait", "read from disk", "write to disk")

Clock = Counter[int]  # by stream; `|` is the later of two


class Call(NamedTuple):
    """One line of the log.

    work    stream              begins work, which `read` and `write` tell the accesses of
    h2d, d2h, d2d   stream      ... which is a copy, from the host, to it, or on the device
    host                        the host works, likewise
    read    address, nbytes
    write   address, nbytes
    record  stream, event
    order   stream, event       the stream's next work comes after the event
    ended   event               the host has waited for it
    asked   event               the host has asked, and knows that it is over
    settled stream              the host knows that all its work is
    idle                        ... that the work of every stream is
    unpin   address, nbytes     memory of the host that no copy may be using
    signal  number              a thread of the host goes on past what others wait for
    wait    number              ... and one that waits for it
    read from disk, write to disk   nbytes
    """

    what: str
    stream: int = 0
    at: int = 0  # address or event
    nbytes: int = 0
    thread: int = 0
    place: str = "?"


class Race(NamedTuple):
    """Two accesses in no order: what each is, and where it was asked for."""

    earlier: str
    later: str


class Access(NamedTuple):
    """Access of a stream that something may have to come after."""

    stream: int
    number: int  # of the work
    start: int
    end: int
    writes: bool
    place: str

    def __str__(self) -> str:
        return f"stream {self.stream:#x} {'writes' if self.writes else 'reads'}: {self.place}"


def parse(log: str, places: Sequence[str]) -> list[Call]:
    """Calls of a log of the stub; a line's place is the index of one of `places`."""
    calls = []
    for line in log.splitlines():
        what, *numbers, place = line.split("\t")
        stream, at, nbytes, thread = map(int, numbers)
        said = places[int(place)] if int(place) >= 0 else f"thread {thread}"
        calls.append(Call(what, stream, at, nbytes, thread, said))
    return calls


def races(calls: Iterable[Call]) -> Counter[Race]:
    """Pairs of accesses in no order, and how often each is there."""
    checker = _Checker()
    for call in calls:
        checker.take(call)
    return checker.found


class _Checker:
    def __init__(self) -> None:
        self.found: Counter[Race] = Counter()
        self._numbers: Clock = Counter()  # of the last work of each stream
        self._known: defaultdict[int, Clock] = defaultdict(Counter)  # by stream, or HOST
        self._events: dict[int, Clock] = {}
        self._kept: defaultdict[int, list[Access]] = defaultdict(list)  # by page
        self._worker = HOST

    def take(self, call: Call) -> None:
        known, stream = self._known, call.stream
        match call.what:
            case "work" | "h2d" | "d2h" | "d2d":
                self._worker = stream
                self._numbers[stream] += 1
                known[stream] |= known[HOST]
                known[stream][stream] = self._numbers[stream]
            case "host":
                self._worker = HOST
            case "read" | "write":
                self._touch(call, call.what == "write")
            case "record":
                self._events[call.at] = known[stream] | known[HOST]
            case "order":
                known[stream] |= self._events.get(call.at, Counter())
            case "ended" | "asked":
                known[HOST] |= self._events.get(call.at, Counter())
            case "settled":
                known[HOST] |= known[stream]
            case "idle":
                known[HOST] |= self._numbers
            case "unpin":
                self._worker = HOST
                self._touch(call, True)
            case what if what in OF_HOST:
                return
            case _:
                raise ValueError(f"{call.what!r} is no call of a log")

    def _touch(self, call: Call, writes: bool) -> None:
        start, end, worker = call.at, call.at + call.nbytes, self._worker
        new = Access(worker, self._numbers[worker], start, end, writes, call.place)
        known = self._known[worker]
        for page in range(start >> PAGE_BITS, -(-end >> PAGE_BITS)):
            kept = []
            for old in self._kept[page]:
                first = max(start, old.start)
                if first < min(end, old.end):
                    if (writes or old.writes) and known[old.stream] < old.number:
                        self.found[self._race(old, new, call)] += first >> PAGE_BITS == page
                    # what comes after the new one comes after the old one, or was found with it
                    is_over = writes or (not old.writes and old.stream == worker)
                    if is_over and start <= old.start and old.end <= end:
                        continue
                kept.append(old)
            if worker != HOST:
                kept.append(new)
            self._kept[page] = kept

    def _race(self, old: Access, new: Access, call: Call) -> Race:
        if new.stream != HOST:
            return Race(str(old), str(new))
        does = "unpins" if call.what == "unpin" else "writes" if new.writes else "reads"
        return Race(str(old), f"the host {does}: {call.place}")
