"""Replay of recorded calls on a clock: when each begins and ends on a device of given speeds. Pure.

    streams    carry out what they were given in order, each when the events that it waits for are
               over
    links      one copy at a time in each direction, the first that may begin
    kernels    those of several streams that run at once share the device evenly
    disk       one transfer at a time
    threads    of the host: each spends `call` seconds on every call, and waits where it waited

What a thread did because an event was over, or was not, when it asked, it does here too: so calls
are recorded with events that are late (`recorder.recorded`), unless asking decides what is done.
"""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tests.cuda_stub.races import COPIES, Call

LINKS = {"h2d": "host_to_device", "d2h": "device_to_host"}
DISK = {"read from disk": "disk_read", "write to disk": "disk_write"}
FILES = "disk"  # the link of both
UPDATE = "update_kernel"  # what it writes but weights it reads, too


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaySpeeds:
    """Speeds of a device that calls are replayed on: bytes a second, of each link and of memory.

    call: seconds of the host for each call. operators: seconds of a kernel, by the begin of the
    place of its call; those of others are their bytes over `device_memory`.
    """

    host_to_device: float
    device_to_host: float
    device_memory: float
    disk_read: float = 1e30
    disk_write: float = 1e30
    call: float = 0.0
    operators: Mapping[str, float] = field(default_factory=dict)


class Replayed(NamedTuple):
    """Work of a device or of a disk: what it was, where it was asked for, and its seconds."""

    what: str  # `work`, a copy or a transfer of a disk
    place: str
    begin: float
    end: float


@dataclass(slots=True, eq=False)
class _Item:
    """Anything that ends: work, the mark of an event, a signal of a thread."""

    what: str
    stream: int = 0
    place: str = "?"
    read: int = 0  # bytes
    written: int = 0
    behind: _Item | None = None  # of an order: the mark
    begin: float = 0.0
    end: float | None = None
    waiting: list[Callable[[], object]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Act:
    """One act of a thread: it gives an item to a stream, carries it out, or waits for some."""

    what: str  # give, do, await
    items: tuple[_Item, ...]


def replay(calls: Iterable[Call], speeds: ReplaySpeeds) -> list[Replayed]:
    """Work in the order of its begin. Calls of a thread are in its order, and what a call waits for
    comes before it."""
    return _Clock(_acts(calls), speeds).run()


def begins(found: Iterable[Replayed], name: str) -> list[float]:
    """Seconds at which operators begin whose place begins with `name`."""
    return [one.begin for one in found if one.place.startswith(name)]


def _acts(calls: Iterable[Call]) -> dict[int, list[_Act]]:
    """Acts by thread. Which mark a wait is for follows from the order of the log."""
    threads: dict[int, list[_Act]] = defaultdict(list)
    marks: dict[int, _Item] = {}
    last: dict[int, _Item] = {}  # by stream
    signals: dict[int, _Item] = {}
    copied: dict[int, str] = {}  # by thread, the place of a copy: an operator's, which follows
    item = _Item("host")
    for call in calls:
        acts = threads[call.thread]
        match call.what:
            case "work" if copied.pop(call.thread, None) == call.place:
                item = _Item("host")  # the stub has logged it
            case "work" | "h2d" | "d2h" | "d2d":
                item = _Item("work" if call.what == "d2d" else call.what, call.stream, call.place)
                acts.append(_Act("give", (item,)))
                last[call.stream] = item
                if call.what in COPIES:
                    copied[call.thread] = call.place
            case "host":
                item = _Item("host")
            case "read":
                item.read += call.nbytes
            case "write":
                item.written += call.nbytes
            case "record":
                marks[call.at] = last[call.stream] = _Item("mark", call.stream)
                acts.append(_Act("give", (marks[call.at],)))
            case "order" if call.at in marks:
                last[call.stream] = _Item("order", call.stream, behind=marks[call.at])
                acts.append(_Act("give", (last[call.stream],)))
            case "ended" if call.at in marks:
                acts.append(_Act("await", (marks[call.at],)))
            case "settled" if call.stream in last:
                acts.append(_Act("await", (last[call.stream],)))
            case "idle":
                acts.append(_Act("await", tuple(last.values())))
            case "signal":
                signals[call.at] = _Item("signal")
                acts.append(_Act("do", (signals[call.at],)))
            case "wait" if call.at in signals:
                acts.append(_Act("await", (signals[call.at],)))
            case "read from disk" | "write to disk":
                acts.append(_Act("do", (_Item(call.what, place=call.place, read=call.nbytes),)))
    return threads


class _Link:
    """What carries one item at a time."""

    def __init__(self) -> None:
        self.is_busy = False
        self.waiting: deque[_Item] = deque()


class _Clock:
    def __init__(self, threads: Mapping[int, Sequence[_Act]], speeds: ReplaySpeeds) -> None:
        self._speeds = speeds
        self._threads = {thread: deque(acts) for thread, acts in threads.items()}
        self._streams: dict[int, deque[_Item]] = defaultdict(deque)
        self._links = {name: _Link() for name in (*LINKS.values(), FILES)}
        self._running: dict[_Item, float] = {}  # kernels, and what is left of each
        self._since = 0.0
        self._now = 0.0
        self._number = itertools.count()
        self._coming: list[tuple[float, int, Callable[[], object]]] = []
        self._last_turn = 0  # of the kernels that run
        self._done: list[Replayed] = []

    def run(self) -> list[Replayed]:
        for thread in self._threads:
            self._at(0.0, lambda thread=thread: self._go_on(thread))
        while self._coming:
            self._now, _, act = heapq.heappop(self._coming)
            act()
        assert not any(self._threads.values()) and not any(self._streams.values())
        return sorted(self._done, key=lambda one: one.begin)

    def _at(self, seconds: float, act: Callable[[], object]) -> None:
        heapq.heappush(self._coming, (seconds, next(self._number), act))

    # -- threads --

    def _go_on(self, thread: int) -> None:
        acts = self._threads[thread]
        while acts:
            act, (item, *_) = acts[0], acts[0].items or (None,)
            if act.what == "await":
                late = next((one for one in act.items if one.end is None), None)
                if late is not None:
                    late.waiting.append(lambda: self._go_on(thread))
                    return
                acts.popleft()
                continue
            acts.popleft()
            assert item is not None
            if act.what == "give":
                self._give(item)
                self._at(self._now + self._speeds.call, lambda: self._go_on(thread))
                return
            if item.what == "signal":
                self._end(item)
                continue
            item.waiting.append(lambda: self._go_on(thread))
            self._carry(FILES, item)
            return

    # -- streams --

    def _give(self, item: _Item) -> None:
        stream = self._streams[item.stream]
        stream.append(item)
        if stream[0] is item:
            self._begin_next(item.stream)

    def _begin_next(self, number: int) -> None:
        stream = self._streams[number]
        while stream:
            item = stream[0]
            if item.what == "order" and item.behind is not None and item.behind.end is None:
                item.behind.waiting.append(lambda: self._begin_next(number))
                return
            if item.what in ("order", "mark"):
                stream.popleft()
                self._end(item)
                continue
            item.waiting.append(lambda: self._next_of(number))
            if item.what in LINKS:
                self._carry(LINKS[item.what], item)
            else:
                self._run_kernel(item)
            return

    def _next_of(self, number: int) -> None:
        self._streams[number].popleft()
        self._begin_next(number)

    def _end(self, item: _Item) -> None:
        item.end = self._now
        if item.what not in ("order", "mark", "signal"):
            self._done.append(Replayed(item.what, item.place, item.begin, item.end))
        waiting, item.waiting = item.waiting, []
        for act in waiting:  # not from here: a thread would give this stream more in between
            self._at(self._now, act)

    # -- links --

    def _carry(self, name: str, item: _Item) -> None:
        link = self._links[name]
        link.waiting.append(item)
        if not link.is_busy:
            self._carry_next(name)

    def _carry_next(self, name: str) -> None:
        link = self._links[name]
        link.is_busy = bool(link.waiting)
        if not link.is_busy:
            return
        item = link.waiting.popleft()
        item.begin = self._now
        speed = getattr(self._speeds, LINKS.get(item.what) or DISK[item.what])
        self._at(
            self._now + max(item.read, item.written) / speed, lambda: self._carried(name, item)
        )

    def _carried(self, name: str, item: _Item) -> None:
        self._end(item)
        self._carry_next(name)

    # -- kernels --

    def _seconds(self, item: _Item) -> float:
        for name, seconds in self._speeds.operators.items():
            if item.place.startswith(name):
                return seconds
        again = item.written if item.place.startswith(UPDATE) else 0
        return (item.read + item.written + again) / self._speeds.device_memory

    def _run_kernel(self, item: _Item) -> None:
        self._share()
        item.begin = self._now
        self._running[item] = self._seconds(item)
        self._plan_end()

    def _share(self) -> None:
        """Take from all that run what they did since the last time."""
        done = (self._now - self._since) / max(1, len(self._running))
        self._running = {item: left - done for item, left in self._running.items()}
        self._since = self._now

    def _plan_end(self) -> None:
        self._last_turn += 1
        if self._running:
            turn, (item, left) = self._last_turn, min(self._running.items(), key=lambda kv: kv[1])
            end = self._now + max(0.0, left) * len(self._running)
            self._at(end, lambda: self._end_kernel(item) if turn == self._last_turn else None)

    def _end_kernel(self, item: _Item) -> None:
        self._share()
        del self._running[item]
        self._plan_end()
        self._end(item)
