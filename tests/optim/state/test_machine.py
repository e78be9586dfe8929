"""Random programs on the machine alone: a disk of integers carries its moves out, in any order."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from optim.state.machine import (
    ENDS_WITH,
    Do,
    Event,
    Phase,
    Row,
    Stage,
    State,
    next_action,
    note,
    take_buffer,
)

MAY_FAIL = (Do.READ, Do.UPDATE, Do.WRITE, Do.FETCH, Do.PLACE)
MOST_ACTIONS = 2000  # of one phase; a machine that does more runs in circles


class Fault(Exception):
    pass


@dataclass
class Disk:
    """What an executor has: versions that count, versions beside them, weights and buffers."""

    rng: random.Random
    state: State
    in_order: bool
    num_buffers: int
    counts: dict[int, Any] = field(default_factory=dict)
    beside: dict[int, Any] = field(default_factory=dict)
    weights: dict[int, Any] = field(default_factory=dict)
    inputs: dict[int, Any] = field(default_factory=dict)  # of the step; None: no gradient
    fault_in: int = 0  # so many moves; 0: none
    log: list[Do] = field(default_factory=list)

    def check(self) -> None:
        rows = self.state.rows
        used = [row.buffer for row in rows if row.buffer is not None]
        assert sorted([*used, *self.state.free]) == list(range(self.num_buffers))
        assert sum(row.stage is Stage.UPDATING for row in rows) <= 1
        idle = [row for row in rows if row.stage is Stage.IDLE]
        assert all(row.buffer is None and not row.is_early for row in idle)

    def fails(self, do: Do) -> bool:
        if do in MAY_FAIL and self.fault_in:
            self.fault_in -= 1
            return not self.fault_in
        return False

    def content(self, row: Row) -> Any:
        return row.ticket[1]

    def begin(self, do: Do, row: Row) -> None:
        self.log.append(do)
        i = row.block.id
        if do is Do.DROP:
            self.beside.pop(i)
            return
        if do is Do.READ:
            row.ticket = (self.fails(do), self.counts[i])
        elif do is Do.FETCH:
            row.ticket = (self.fails(do), self.beside[i])
        elif do is Do.WRITE:
            assert i not in self.beside, "a version is dropped before another takes its place"
            self.beside[i] = None  # torn until it is there
            row.ticket = (self.fails(do), self.content(row))
        elif do is Do.PLACE:
            row.is_touched = True
            if self.fails(do):
                self.weights[i] = "half"
                note(self.state, Event.FAILED, row, Fault(do))
                return
            self.weights[i] = self.content(row)
            note(self.state, Event.PLACED, row)
        else:
            self._update(row)

    def _update(self, row: Row) -> None:
        i, early = row.block.id, row.is_early
        given = row.assumed if early else self.inputs[i]
        row.is_touched |= not early
        if self.fails(Do.UPDATE):
            if not early:
                self.weights[i] = "half"
            note(self.state, Event.FAILED, row, Fault(Do.UPDATE))
        elif given is None:
            note(self.state, Event.UNCHANGED, row)
        else:
            row.ticket = (False, (self.content(row), given))
            if not early:
                self.weights[i] = row.ticket[1]
            note(self.state, Event.UPDATED, row)

    def end(self, row: Row) -> None:
        failed, content = row.ticket
        if failed:
            note(self.state, Event.FAILED, row, Fault(row.stage))
            return
        if row.stage is Stage.WRITING:
            self.beside[row.block.id] = content
        note(self.state, ENDS_WITH[row.stage], row)

    def turn(self) -> tuple[Do, Any] | None:
        """One action, or the end of a transfer, any of those under way; what is not of a row."""
        self.check()
        if self.state.under_way and self.rng.random() < 0.3:
            self.end(self.rng.choice(list(self.state.under_way)))
            return Do.READ, None
        action = next_action(self.state)
        if action is None:
            return None
        do, row, said = action
        if do is Do.WAIT:
            self.end(row)
        elif row is not None and do is not Do.RESTORE:
            self.begin(do, row)
        elif row is not None:
            self.weights[row.block.id] = self.counts[row.block.id]
            note(self.state, Event.RESTORED, row)
        return do, said

    def until(self, wanted: Do | None) -> Any:
        for _ in range(MOST_ACTIONS):
            found = self.turn()
            if found is None:
                assert wanted is None
                return None
            if found[0] is wanted:
                return found[1]
        raise AssertionError("it runs in circles")


def made(rng: random.Random) -> Disk:
    depth = rng.randint(1, 3)
    rows = [Row(SimpleNamespace(id=i)) for i in range(rng.randint(1, 7))]
    count = depth + 2 + rng.choice([0, 2])
    state = State(rows, depth, list(range(count)))
    disk = Disk(rng, state, rng.random() < 0.5, count)
    disk.counts = {row.block.id: ("first", row.block.id) for row in rows}
    disk.weights = dict(disk.counts)
    return disk


def backward(disk: Disk) -> None:
    """Some rows are updated early, with what the step agrees on, or with something else."""
    rng, state = disk.rng, disk.state
    disk.inputs = {
        row.block.id: None if rng.random() < 0.2 else rng.randint(0, 9) for row in state.rows
    }
    if rng.random() < 0.5:
        return
    note(state, Event.BACKWARD)
    for row in rng.sample(state.rows, len(state.rows)):
        if row.stage is Stage.IDLE and rng.random() < 0.8:
            right = rng.random() < 0.7
            row.assumed = disk.inputs[row.block.id] if right else rng.randint(10, 19)
            note(state, Event.FINAL, None, [row])
        for _ in range(rng.randint(0, 4)):
            disk.turn()
    if rng.random() < 0.5:
        disk.until(None)
    note(state, Event.STOPPED)
    disk.until(None)
    assert not state.early and not state.finals
    if rng.random() < 0.15:
        note(state, Event.DROPPED)
        disk.until(None)
        assert not disk.beside and not state.assumed


def step(disk: Disk) -> bool:
    """Whether it counts."""
    state, rng = disk.state, disk.rng
    held = frozenset(
        i for i, assumed in state.assumed.items() if assumed == disk.inputs[i] is not None
    )
    for row in state.rows:
        if row.block.id in held and rng.random() < 0.3:
            row.is_complete = True  # its parameters are in a file, and count with it
    early_error = state.error
    note(state, Event.ASKED, None, held)
    before = len(disk.log)
    error = disk.until(Do.VOTE)
    assert state.phase is Phase.VOTING and not state.under_way
    if early_error is None and error is None:
        fetched = disk.log[before:].count(Do.FETCH)
        assert fetched == sum(not row.is_complete for row in state.rows if row.block.id in held)
    if error is not None or rng.random() < 0.1:
        note(state, Event.UNDO)
        disk.until(Do.ROLLBACK)
        disk.beside.clear()
        note(state, Event.ROLLED_BACK)
        return False
    note(state, Event.VOTED)
    disk.until(Do.COMMIT)
    for row in state.rows:
        if row.is_complete:
            disk.weights[row.block.id] = disk.beside[row.block.id]
    wanted = {i for i, given in disk.inputs.items() if given is not None}
    assert disk.beside.keys() == wanted, "what counts is what the step updates"
    disk.counts |= disk.beside
    disk.beside.clear()
    note(state, Event.COMMITTED, None, disk.in_order)
    disk.until(Do.RESIDENT)
    note(state, Event.RESIDENT)
    return True


def program(seed: int) -> tuple[int, int]:
    """How many steps counted, and how many were undone."""
    rng = random.Random(seed)
    disk = made(rng)
    oracle, found = dict(disk.counts), [0, 0]
    for _ in range(rng.randint(1, 6)):
        disk.fault_in = rng.randint(1, 25) if rng.random() < 0.3 else 0
        backward(disk)
        counted = step(disk)
        found[not counted] += 1
        if counted:
            for i, given in disk.inputs.items():
                oracle[i] = oracle[i] if given is None else (oracle[i], given)
        assert disk.counts == oracle and disk.weights == oracle
        if rng.random() < 0.3:  # somebody looks at state, and may write to it
            note(disk.state, Event.LOOK)
            disk.until(None)
            assert len(disk.state.free) == disk.num_buffers
            note(disk.state, Event.AHEAD)
    return found[0], found[1]


@pytest.mark.parametrize(
    "first",
    [
        *range(0, 1500, 500),
        *(pytest.param(n, marks=pytest.mark.deep) for n in range(1500, 30000, 500)),
    ],
)
def test_every_program_comes_to_what_its_steps_do_one_after_the_other(first):
    counted, undone = map(sum, zip(*map(program, range(first, first + 500)), strict=True))
    assert counted > 700 and undone > 200


def test_a_step_has_its_depth_of_reads_under_way_and_no_more():
    state = State([Row(SimpleNamespace(id=i)) for i in range(6)], 2, list(range(4)))
    note(state, Event.ASKED, None, frozenset())
    assert [next_action(state) for _ in range(3)] == [
        *((Do.READ, row, None) for row in state.rows[:2]),
        (Do.WAIT, state.rows[0], None),
    ]
    note(state, Event.READ, state.rows[0])
    assert next_action(state) == (Do.UPDATE, state.rows[0], None)
    assert next_action(state) == (Do.WAIT, state.rows[1], None)  # what is updated is one of them


def test_what_cannot_follow_is_refused():
    row = Row(SimpleNamespace(id=0))
    state = State([row], 1, [0])
    take_buffer(state, row)
    with pytest.raises(KeyError):
        note(state, Event.WRITTEN, row)
