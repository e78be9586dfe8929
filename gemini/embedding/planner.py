"""Which rows are in the cache, and which leave it: the plan of every batch. Pure.

A window of announced batches says which rows they use. A row that must leave is the one whose next
use is farthest (Belady's rule, optimal as all rows have one size). Rows without an announced use
leave before those that have one, the least recently used first: without a loader, that is LRU.

Invariants of every plan, which `RowPlan.check` asserts and tests draw:
1. Every row of the batch has a slot of its own, and no other resident row has it.
2. A pinned row and a row of the batch never leave.
3. A row is fetched only if it was not resident, and leaves only if it was.
4. A row leaves only if there is no free slot for one that is fetched.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

NEVER = 1 << 62  # next use of a row that no announced batch has


@dataclass(frozen=True, slots=True)
class RowPlan:
    """Moves of one batch. Rows are numbers of this rank's table, slots of its cache."""

    rows: tuple[int, ...]  # of the batch, each once, ascending
    slots: tuple[int, ...]  # of `rows`
    evicted: tuple[tuple[int, int], ...]  # (row, its slot): carried out before `fetched`
    fetched: tuple[tuple[int, int], ...]  # (row, its slot)

    @property
    def hits(self) -> int:
        """Rows that were resident."""
        return len(self.rows) - len(self.fetched)

    def check(self, before: Mapping[int, int], pinned: Collection[int], num_slots: int) -> None:
        """Assert the invariants. before: row -> slot, of all that were resident."""
        after = dict(before)
        for row, slot in self.evicted:
            assert after.pop(row) == slot and row not in pinned
        for row, slot in self.fetched:
            assert row not in before and 0 <= slot < num_slots
            after[row] = slot
        assert len(set(after.values())) == len(after), "two rows in one slot"
        assert [after[row] for row in self.rows] == list(self.slots)
        assert list(self.rows) == sorted(set(self.rows))
        free = num_slots - len(before)
        assert len(self.evicted) == max(0, len(self.fetched) - free)


class RowPlanner:
    """Planner of one cache of `num_slots` rows: announced batches in, one plan for each out.

    It knows what is resident as its plans say; who executes them keeps to their order.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.resident: dict[int, int] = {}  # row -> slot
        self._free = list(range(num_slots - 1, -1, -1))
        self._window: deque[tuple[int, ...]] = (
            deque()
        )  # batches that were announced, the next first
        self._uses: dict[int, deque[int]] = {}  # row -> numbers of announced batches
        self._announced = self._begun = 0  # batches so far
        self._last: dict[int, int] = {}  # resident row -> clock of its last use
        self._clock = 0
        # (-next use, last use, row), also out of date: an entry counts if it is the row's key now
        self._heap: list[tuple[int, int, int]] = []

    def announce(self, rows: Iterable[int]) -> None:
        """Add a batch to the end of the window."""
        batch = tuple(sorted(set(rows)))
        self._window.append(batch)
        for row in batch:
            uses = self._uses.setdefault(row, deque())
            uses.append(self._announced)
            if len(uses) == 1 and row in self.resident:
                self._push(row)
        self._announced += 1

    def forget(self) -> None:
        """Drop all announced batches: their loader ended."""
        rows = [row for row in self._uses if row in self.resident]
        self._begun = self._announced
        self._window.clear()
        self._uses.clear()
        for row in rows:
            self._push(row)

    def next_batch(self, pinned: Collection[int] = ()) -> RowPlan:
        """Plan of the first batch of the window, which leaves it. Its rows have later uses only
        from then on. Raises as `plan` does, and the window stays."""
        batch = self._window[0]
        self._check_room(batch, pinned)
        self._window.popleft()
        for row in batch:
            self._uses[row].popleft()
            if not self._uses[row]:
                del self._uses[row]
        self._begun += 1
        return self.plan(batch, pinned)

    def plan(self, rows: Sequence[int], pinned: Collection[int] = ()) -> RowPlan:
        """Plan of rows, each once, that are needed now, announced or not. pinned: rows that stay.

        Raises ValueError, and changes nothing, if `rows` and `pinned` are more than the slots.
        """
        self._check_room(rows, pinned)
        rows = sorted(rows)
        needed = {*rows, *pinned}
        missing = [row for row in rows if row not in self.resident]
        evicted = self._evict(len(missing) - len(self._free), needed)
        fetched = []
        for row in missing:
            slot = self._free.pop()
            self.resident[row] = slot
            fetched.append((row, slot))
        self._clock += 1
        for row in rows:
            self._last[row] = self._clock
            self._push(row)
        slots = tuple(self.resident[row] for row in rows)
        return RowPlan(tuple(rows), slots, evicted, tuple(fetched))

    def _check_room(self, rows: Collection[int], pinned: Collection[int]) -> None:
        others = len(pinned) - sum(row in pinned for row in rows)
        if len(rows) + others > self.num_slots:
            waiting = f" and {others} wait for step() or zero_grad()" if others else ""
            raise ValueError(
                f"cache_rows={self.num_slots}: a batch has {len(rows)} rows of its own{waiting}; "
                f"expected cache_rows of at least {len(rows) + others}, or smaller batches"
            )

    def _evict(self, count: int, needed: set[int]) -> tuple[tuple[int, int], ...]:
        """Take `count` rows out, farthest next use first; none of `needed`."""
        evicted: list[tuple[int, int]] = []
        kept: list[tuple[int, int, int]] = []
        while len(evicted) < count:
            entry = heapq.heappop(self._heap)
            row = entry[2]
            if row not in self.resident or entry != self._key(row):
                continue
            if row in needed:
                kept.append(entry)
                continue
            slot = self.resident.pop(row)
            del self._last[row]
            self._free.append(slot)
            evicted.append((row, slot))
        for entry in kept:
            heapq.heappush(self._heap, entry)
        return tuple(evicted)

    def _key(self, row: int) -> tuple[int, int, int]:
        uses = self._uses.get(row)
        return (-(uses[0] if uses else NEVER), self._last[row], row)

    def _push(self, row: int) -> None:
        heapq.heappush(self._heap, self._key(row))
        if len(self._heap) > 8 * self.num_slots + 64:  # most are out of date
            self._heap = [self._key(row) for row in self.resident if row in self._last]
            heapq.heapify(self._heap)
