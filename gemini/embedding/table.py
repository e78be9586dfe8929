"""Rows of one rank: a cache on the compute device over a home. Executes plans and steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .homes import RowHome
from .planner import RowPlan, RowPlanner
from .rules import RowRule

PART_BYTES = 1 << 20  # of records that are read or written at once, outside of plans


@dataclass(frozen=True, slots=True)
class RowReport:
    """What one rank's cache did since it was made. Bytes are those between cache and home."""

    policy: str  # "belady" if every batch was announced, "lru" if none was, else "belady, lru"
    lookahead: int
    batches: int  # plans that were carried out
    unannounced: int  # of them, those without a loader that announced their rows
    hits: int
    misses: int
    rows_written: int  # that left the cache changed
    planned_read_bytes: int
    read_bytes: int
    planned_written_bytes: int
    written_bytes: int  # with those of commits
    cache_bytes: int
    step: int


@dataclass(frozen=True, slots=True)
class _Undo:
    """Records of the last step's rows as they were before it."""

    rows: Tensor
    records: Tensor
    step: int


class RowTable:
    """Records [num_rows, width] of this rank: all in `home`, `cache_rows` of them on `device`.

    Invariants: a resident row's record in the cache is the last confirmed step's. If its slot is
    not dirty, the home has the same bytes. Rows change in `confirm` and `undo` alone, after their
    home has made them durable.
    """

    def __init__(
        self, num_rows: int, dim: int, cache_rows: int, rule: RowRule, home: RowHome
    ) -> None:
        self.num_rows, self.dim, self.rule, self.home = num_rows, dim, rule, home
        self.width = dim + rule.state_numel(dim)
        self.cache = torch.zeros(cache_rows, self.width)
        self._dirty = torch.zeros(cache_rows, dtype=torch.bool)
        self._planner = RowPlanner(cache_rows)
        self._current: tuple[int, ...] | None = None  # rows of the batch that a loader gave last
        self._waiting: set[int] = set()  # rows whose gradients a step has not had yet
        self._prepared: tuple[Tensor, Tensor, int] | None = None
        self._undo: _Undo | None = None
        self._batches = self._unannounced = self._hits = self._misses = self._rows_written = 0

    # -- batches --

    def announce(self, rows: Iterable[int]) -> None:
        """Add a batch to the window; see `RowPlanner`."""
        self._planner.announce(rows)

    def forget(self) -> None:
        """Drop the window, and let the last announced batch go."""
        self._planner.forget()
        self._current = None

    def next_batch(self) -> None:
        """Bring the first batch of the window into the cache, where it stays until the next."""
        plan = self._planner.next_batch(self._waiting)
        self._carry_out(plan)
        self._current = plan.rows

    def slots_of(self, rows: list[int], *, waits: bool) -> Tensor:
        """Slots of `rows`, each once, which are in the cache when this returns.

        waits: they stay until a step has had their gradients.
        """
        resident = self._planner.resident
        if self._current is None or not all(row in resident for row in rows):
            # of rows that were not announced: the batch that was stays, and so does what waits
            plan = self._planner.plan(rows, self._waiting | {*(self._current or ())})
            self._unannounced += 1
            self._carry_out(plan)
        if waits:
            self._waiting.update(rows)
        return self._resident_slots(rows)

    def _resident_slots(self, rows: list[int]) -> Tensor:
        resident = self._planner.resident
        return torch.tensor([resident[row] for row in rows], dtype=torch.int64)

    def _carry_out(self, plan: RowPlan) -> None:
        # 1. what leaves goes home, if a step changed it since it came
        gone = torch.tensor(plan.evicted, dtype=torch.int64).view(-1, 2)
        gone = gone[self._dirty[gone[:, 1]]]
        rows, slots = gone.unbind(1)
        come = torch.tensor(plan.fetched, dtype=torch.int64).view(-1, 2)
        self._write_home(rows, self.cache[slots])
        self._dirty[slots] = False
        # 2. what comes takes its slots
        if len(come):
            records = self._read_home(come[:, 0])
            self.cache[come[:, 1]] = records.to(self.cache.device)
        self._batches += 1
        self._hits += plan.hits
        self._misses += len(plan.fetched)

    def _read_home(self, rows: Tensor) -> Tensor:
        self._expect(rows, rows[:0])
        return self.home.read(rows)

    def _write_home(self, rows: Tensor, records: Tensor) -> None:
        if len(rows):
            self._expect(rows[:0], rows)
            self.home.write(rows, records.cpu())
            self._rows_written += len(rows)

    def _expect(self, read: Tensor, written: Tensor) -> None:
        """Add what a move is planned to cost."""
        costs = self.home.cost(read, written)
        self.home.traffic.planned_read += costs[0]
        self.home.traffic.planned_written += costs[1]

    # -- steps: prepare, then confirm; or neither --

    def prepare(self, rows: list[int], grads: Tensor) -> None:
        """Compute the step of `rows` [n], each once, with `grads` [n, dim], and make it durable.

        The cache is as before until `confirm`. Raises NvmeError.
        """
        if not self._waiting.issuperset(rows):  # another rank's: this one has dropped its gradients
            self.slots_of(rows, waits=True)
        slots = self._resident_slots(rows)
        if not self.home.has_room(len(rows)):
            self.write_back()
        records, step = self.cache[slots], self.home.step + 1
        self.rule.update(records, grads, step)
        self._make_durable(torch.tensor(rows, dtype=torch.int64), records, step)

    def prepare_undo(self) -> None:
        """Prepare the step before the last one, which must be there: see `can_undo`."""
        assert self._undo is not None
        undo = self._undo
        if not self.home.has_room(len(undo.rows)):
            self.write_back()
        self._make_durable(undo.rows, undo.records, undo.step)

    @property
    def can_undo(self) -> bool:
        """Whether the last thing that was confirmed is a step."""
        return self._undo is not None

    def _make_durable(self, rows: Tensor, records: Tensor, step: int) -> None:
        self._prepared = None
        self.home.prepare(step, rows, records.cpu())
        self._prepared = rows, records, step

    def confirm(self) -> None:
        """Let what was prepared count."""
        assert self._prepared is not None
        (rows, records, step), self._prepared = self._prepared, None
        before = self.home.step
        self.home.confirm()
        resident = self._planner.resident
        here = torch.tensor([row in resident for row in rows.tolist()], dtype=torch.bool)
        slots = self._resident_slots(rows[here].tolist())
        if step > before:  # all of its rows waited, so all are here
            self._undo = _Undo(rows, self.cache[slots], before)
        else:
            self._undo = None
            self._write_home(rows[~here], records[~here])
        self.cache[slots] = records[here]
        self._dirty[slots] = True

    def let_go(self) -> None:
        """Let rows leave whose gradients a step has had, or will never have."""
        self._waiting.clear()

    def write_back(self) -> None:
        """Write every changed row home."""
        found = [(row, slot) for row, slot in self._planner.resident.items() if self._dirty[slot]]
        rows, slots = torch.tensor(sorted(found), dtype=torch.int64).view(-1, 2).unbind(1)
        self._write_home(rows, self.cache[slots])
        self._dirty[slots] = False
        self.home.rebase()

    # -- all rows --

    def parts(self) -> Iterator[Tensor]:
        """All records in row order, as the last step left them, about PART_BYTES at a time."""
        self.write_back()  # now, and not when the first part is asked for
        return self._parts()

    def _parts(self) -> Iterator[Tensor]:
        count = max(1, PART_BYTES // (4 * self.width))
        for at in range(0, self.num_rows, count):
            yield self._read_home(torch.arange(at, min(at + count, self.num_rows)))

    def fill(self, parts: Iterable[Tensor], step: int) -> None:
        """Replace all records; whatever waits for a step is dropped."""
        self.home.fill(parts, step)
        self._planner = RowPlanner(len(self.cache))
        self._dirty.zero_()
        self._current, self._undo, self._prepared = None, None, None
        self._waiting.clear()

    def move(self, change: Callable[[Tensor], Tensor]) -> None:
        """Let `change`, as of `nn.Module.to`, put the cache on another device."""
        cache = change(self.cache)
        if cache.dtype != torch.float32:
            raise ValueError(f"rows are fp32, not {cache.dtype}; expected a change of device alone")
        self.cache = cache

    def report(self, lookahead: int) -> RowReport:
        """What was done so far."""
        traffic, some = self.home.traffic, self._unannounced
        is_all = some == self._batches
        return RowReport(
            policy="lru" if is_all else "belady, lru" if some else "belady",
            lookahead=lookahead,
            batches=self._batches,
            unannounced=some,
            hits=self._hits,
            misses=self._misses,
            rows_written=self._rows_written,
            planned_read_bytes=traffic.planned_read,
            read_bytes=traffic.read,
            planned_written_bytes=traffic.planned_written,
            written_bytes=traffic.written,
            cache_bytes=self.cache.nbytes,
            step=self.home.step,
        )
