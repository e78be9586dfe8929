"""Blocks of state on disk, and one step over them, as a machine without effects (ADR 0016).

    note(state, event, row, said)    what has happened: rows and the phase move by two tables
    next_action(state)               what to do next, noted as begun; None: nothing is left to do

Nothing here reads a clock, a disk or a tensor. Who carries actions out is an executor: threads and
a disk (`optim.step.driver`), a clock (`gemini.placement.timetable.clock`), or a test. One thread
at a time.

A row is one block. Its new version is written next to the last one, which counts until a commit: so
a step is undone by forgetting what was written, and by restoring weights that were changed. A row
may be updated before its step is asked for, with what the step is expected to agree on; where that
is held, the step only fetches its new weight.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from enum import IntEnum, auto
from typing import Any

from gemini.tickets import Ticket
from gemini.units import READS_AHEAD, BlockId

from .space import Block

# IntEnum and not Enum: `Enum.__hash__` is a Python call for every look into a table


class Stage(IntEnum):
    """Stage of one row between its last version and its next."""

    IDLE = auto()  # the last version counts; no buffer
    READING = auto()  # the last version is on its way into a buffer
    READY = auto()  # the buffer has the last version
    UPDATING = auto()
    WAITING = auto()  # updated in part, and goes on with other rows; the buffer has that part
    UPDATED = auto()  # the buffer has the new version
    WRITING = auto()  # the new version is on its way to the other version of the file
    WRITTEN = auto()  # the file has both versions; no buffer but where it is kept
    FETCHING = auto()  # the new weight is on its way back into a buffer
    FETCHED = auto()  # the buffer has the new weight
    SPOILED = auto()  # update or write failed; the buffer is kept to undo


class Phase(IntEnum):
    """Phase of the step between two passes."""

    PASS = auto()  # no step is under way
    PREPARING = auto()
    VOTING = auto()
    AGREED = auto()  # every disk did its part
    COMMITTING = auto()
    COMMITTED = auto()  # blocks in memory are to be updated
    RESIDENT = auto()
    UNDOING = auto()


class Do(IntEnum):
    """Action that an executor is told to do next.

    Those from READ to RESTORE are of a row, and end with the event of the same name.
    """

    WAIT = auto()  # until this row's transfer has ended: nothing else can be done before
    READ = auto()
    UPDATE = auto()
    WRITE = auto()
    FETCH = auto()
    PLACE = auto()  # copy the fetched weight into the shard
    RESTORE = auto()  # make the row's weights those of the last version
    DROP = auto()  # let the store forget the written version of this row
    VOTE = auto()  # said: the error of this rank, or None
    COMMIT = auto()
    RESIDENT = auto()  # update blocks in memory
    ROLLBACK = auto()


class Event(IntEnum):
    """Event that `note` is told."""

    READ = auto()
    UPDATED = auto()
    UNCHANGED = auto()  # it has no gradient, and stays as it is
    WAITING = auto()  # its update goes on when other rows have come as far
    WRITTEN = auto()
    FETCHED = auto()
    PLACED = auto()
    RESTORED = auto()
    FAILED = auto()  # an action of a row, or of the step; said: the error
    BACKWARD = auto()  # a backward begins: rows may be updated before their step
    FINAL = auto()  # gradients are final; said: their rows
    STOPPED = auto()  # no row is begun before the step any more
    DROPPED = auto()  # early updates do not count
    ASKED = auto()  # the step begins; said: ids of rows whose early update is held
    VOTED = auto()  # every rank did its part; where one did not, UNDO comes
    COMMITTED = auto()  # said: the next step begins with the first row, and not with the last one
    RESIDENT = auto()  # blocks in memory are updated, or torn
    UNDO = auto()
    ROLLED_BACK = auto()
    LOOK = auto()  # state is to be at rest: early updates and reads do not count
    AHEAD = auto()  # rows of the coming step may be read


@dataclass(slots=True, eq=False)
class Row:
    """Block with its stage.

    The executor sets `is_touched`, and the fields that the machine does not look at.
    """

    block: Block
    stage: Stage = Stage.IDLE
    assumed: Hashable = None  # what an early update was computed with
    is_early: bool = False  # updated before its step: the shard has the weights of before
    is_complete: bool = False  # early, and its parameters were written too: no work for the step
    is_void: bool = False  # to be forgotten when its transfer has ended
    is_touched: bool = False  # the shard's weights may not be those of the last step
    was_read: bool = False  # its last version was read before the step began
    buffer: Any = None  # a `nvme.Buffer`
    ticket: Ticket[object] | None = None
    checksum: int = 0
    id: BlockId = field(init=False)

    def __post_init__(self) -> None:
        self.id = self.block.id


@dataclass(slots=True)
class State:
    """Rows and queues of one target, between steps too.

    Invariant: buffers that rows have and free ones are those there are.
    """

    rows: list[Row]
    depth: int = 1  # rows of a step that are read and not updated, at most
    free: list[Any] = field(default_factory=list)
    phase: Phase = Phase.PASS
    order: list[Row] = field(default_factory=list)  # of the next step
    is_ahead: bool = False  # its first rows are read
    speculates: bool = False
    finals: deque[Row] = field(default_factory=deque)  # whose gradient is final, not read yet
    early: deque[Row] = field(default_factory=deque)  # read for an early update
    todo: deque[Row] = field(default_factory=deque)  # of the step, not begun; or to be restored
    reads: deque[Row] = field(default_factory=deque)  # read for the step, in order
    cached: deque[Row] = field(default_factory=deque)  # written, with a buffer that may be taken
    updating: Row | None = None
    updated: deque[Row] = field(default_factory=deque)  # to be written
    under_way: dict[Row, None] = field(default_factory=dict)  # transfers, in order of issue
    dropped: list[Row] = field(default_factory=list)  # versions that the store is to forget
    error: BaseException | None = None

    def __post_init__(self) -> None:
        self.order = list(self.rows)

    @property
    def assumed(self) -> dict[BlockId, Hashable]:
        """Assumptions of every row that was updated before its step."""
        return {row.id: row.assumed for row in self.rows if row.is_early and not row.is_void}


# what a row becomes by what is begun
BEGIN = {
    (Stage.IDLE, Do.READ): Stage.READING,
    (Stage.READY, Do.UPDATE): Stage.UPDATING,
    (Stage.UPDATED, Do.WRITE): Stage.WRITING,
    (Stage.WRITTEN, Do.FETCH): Stage.FETCHING,
    (Stage.FETCHED, Do.PLACE): Stage.FETCHED,
}
# and by what has ended
END = {
    (Stage.READING, Event.READ): Stage.READY,
    (Stage.UPDATING, Event.UPDATED): Stage.UPDATED,
    (Stage.UPDATING, Event.WAITING): Stage.WAITING,
    (Stage.WAITING, Event.UPDATED): Stage.UPDATED,
    (Stage.WRITING, Event.WRITTEN): Stage.WRITTEN,
    (Stage.FETCHING, Event.FETCHED): Stage.FETCHED,
    (Stage.FETCHED, Event.PLACED): Stage.WRITTEN,
}
TRANSFERS = (Do.READ, Do.WRITE, Do.FETCH)
# by the stage of a row under way: how its transfer ends
ENDS_WITH = {
    Stage.READING: Event.READ, Stage.WRITING: Event.WRITTEN, Stage.FETCHING: Event.FETCHED,
}  # fmt: skip


def num_buffers(depth: int, num_rows: int) -> int:
    """Number of buffers of a step: of rows that are read, of one that is updated and one that is
    written."""
    return min(depth + 2, num_rows + 1)


# -- events --


def note(s: State, event: Event, row: Row | None = None, said: Any = None) -> None:
    """Note an event: rows and the phase move. Raises KeyError for an event that cannot follow."""
    if row is None:
        _OF_STEP[event](s, said)
        return
    # Every event of a row ends what it had under way, a failure too: so the row can be begun again,
    # and nobody waits for a transfer that is over.
    s.under_way.pop(row, None)
    if event is Event.FAILED:
        _row_failed(s, row, said)
        return
    if s.updating is row:
        s.updating = None
    # A row that was dropped while a transfer used its buffer was only marked then: the disk may
    # have written into that buffer until now.
    if row.is_void:
        if row.stage is not Stage.READING:
            s.dropped.append(row)
        _forget(s, row)
        return
    if event in _OF_ROW:
        _OF_ROW[event](s, row)
        return
    row.stage = END[row.stage, event]
    if event is Event.UPDATED:
        s.updated.append(row)
    elif event is Event.WRITTEN:
        # What was written last is still in its buffer, and the next step may begin with it.
        s.cached.append(row)  # until its buffer is asked for


def _unchanged(s: State, row: Row) -> None:
    row.is_touched = False
    _forget(s, row)


def _placed(s: State, row: Row) -> None:
    row.stage = END[row.stage, Event.PLACED]
    _give_buffer(s, row)


def _restored(s: State, row: Row) -> None:
    row.is_touched = False
    if row in s.cached:
        s.cached.remove(row)
    _forget(s, row)


def _row_failed(s: State, row: Row, error: BaseException) -> None:
    if s.updating is row:
        s.updating = None
    if row.stage in (Stage.WRITING, Stage.FETCHING, Stage.FETCHED):
        s.dropped.append(row)
    if row.is_void:
        _forget(s, row)
        return
    # A read for the coming step fails in nobody's call: the step reads the block again, and raises
    # where that fails too.
    if row in s.reads and s.phase is not Phase.PREPARING:
        s.reads.remove(row)
        s.is_ahead = False
        _forget(s, row)
        return
    s.error = s.error or error
    s.speculates = False
    s.finals.clear()
    _leave_queues(s, row)
    # Its buffer may know what the weights were, which the disk does not where there are no masters.
    if row.is_touched:
        row.stage = Stage.SPOILED
    else:
        _forget(s, row)


def _forget(s: State, row: Row) -> None:
    """Forget what was done for a row: it is as the last commit left it, without a buffer."""
    row.stage, row.assumed, row.ticket = Stage.IDLE, None, None
    row.is_early = row.is_complete = row.is_void = row.was_read = False
    _give_buffer(s, row)


def _give_buffer(s: State, row: Row) -> None:
    if row.buffer is not None:
        s.free.append(row.buffer)
        row.buffer = None


def _leave_queues(s: State, row: Row) -> None:
    for queue in (s.early, s.reads, s.cached, s.updated):
        if row in queue:
            queue.remove(row)


def _drop(s: State, row: Row) -> None:
    """Drop what was done for a row. A transfer under way ends first."""
    if row.stage is Stage.IDLE:
        return
    _leave_queues(s, row)
    # The buffer is the disk's until its transfer has ended, so the row is only marked here: `note`
    # forgets it then.
    if row in s.under_way:
        row.is_void, row.is_complete = True, False
        return
    if row.stage >= Stage.WRITTEN:
        s.dropped.append(row)
    _forget(s, row)


def _failed(s: State, said: BaseException) -> None:
    s.error = s.error or said
    s.speculates = False
    s.finals.clear()


def _backward(s: State, said: None) -> None:
    s.speculates = s.error is None


def _final(s: State, said: Iterable[Row]) -> None:
    if s.speculates:
        s.finals += said


def _stopped(s: State, said: None) -> None:
    s.speculates = False
    s.finals.clear()
    for row in list(s.early):
        _drop(s, row)


def _dropped(s: State, said: None) -> None:
    _stopped(s, said)
    s.error = None
    for row in s.rows:
        if row.is_early:
            _drop(s, row)


def _asked(s: State, said: frozenset[BlockId]) -> None:
    _stopped(s, None)
    s.phase = Phase.PREPARING
    s.todo.clear()
    for row in s.order:
        if row.is_early and row.id not in said:
            _drop(s, row)
        # a row whose last version is in memory since before the step can undo it from there
        row.was_read = row.stage in (Stage.READING, Stage.READY) and not row.is_void
        if not (row.was_read or row.is_complete):
            s.todo.append(row)


def _voted(s: State, said: None) -> None:
    s.phase = Phase.AGREED


def _committed(s: State, said: bool) -> None:
    for row in s.order:
        row.is_early = row.is_complete = row.is_touched = row.was_read = False
        row.assumed = None
        if row.stage is Stage.WRITTEN:
            row.stage = Stage.IDLE
    s.order = list(s.rows) if said else s.order[::-1]
    # Orders alternate, so the next step begins with the row that was written last, whose buffer has
    # it already.
    while s.cached:
        row = s.cached.pop()
        if len(s.reads) < s.depth and row is s.order[len(s.reads)]:
            row.stage = Stage.READY
            s.reads.append(row)
        else:
            _give_buffer(s, row)
    s.phase, s.is_ahead = Phase.COMMITTED, True


def _resident(s: State, said: None) -> None:
    s.phase = Phase.PASS


def _undo(s: State, said: None) -> None:
    _look(s, None)
    # rows whose buffer knows what was come first, and give it back
    touched = [row for row in s.rows if row.is_touched]
    s.todo = deque(sorted(touched, key=lambda row: row.buffer is None))
    s.updating = None
    s.updated.clear()
    s.phase = Phase.UNDOING


def _rolled_back(s: State, said: None) -> None:
    s.phase, s.error = Phase.PASS, None
    s.dropped.clear()  # with all that was written


def _look(s: State, said: None) -> None:
    _stopped(s, None)
    s.error, s.is_ahead = None, False
    for row in s.rows:
        if not row.is_touched:
            _drop(s, row)


def _ahead(s: State, said: None) -> None:
    s.is_ahead = True


_OF_ROW: dict[Event, Callable[[State, Row], None]] = {
    Event.UNCHANGED: _unchanged, Event.PLACED: _placed, Event.RESTORED: _restored,
}  # fmt: skip
_OF_STEP: dict[Event, Callable[[State, Any], None]] = {
    Event.FAILED: _failed, Event.BACKWARD: _backward, Event.FINAL: _final, Event.STOPPED: _stopped,
    Event.DROPPED: _dropped, Event.ASKED: _asked, Event.VOTED: _voted,
    Event.COMMITTED: _committed, Event.RESIDENT: _resident, Event.UNDO: _undo,
    Event.ROLLED_BACK: _rolled_back, Event.LOOK: _look, Event.AHEAD: _ahead,
}  # fmt: skip

# -- choice: the only place that chooses --

Action = tuple[Do, Row | None, Any]  # a plain tuple, which costs no call


def next_action(s: State) -> Action | None:
    """Next action that can be done now, in order of what it lets go on; else a wait."""
    action = _next(s)
    if action is None and s.under_way:
        row = _waits_for(s)
        return None if row is None else (Do.WAIT, row, None)
    return action


def _next(s: State) -> Action | None:
    # The store keeps one version that does not count of each block: another must not be begun
    # before it has forgotten this one.
    if s.dropped and s.phase is not Phase.UNDOING:
        return Do.DROP, s.dropped.pop(), None
    phase = s.phase
    # After an error nothing is begun; the vote still waits for transfers under way, as buffers that
    # they use may hold what undoes the step.
    if phase is Phase.PREPARING:
        action = _move(s) if s.error is None else None
        if action is None and not s.under_way and (s.error is not None or _is_prepared(s)):
            s.phase = Phase.VOTING
            return Do.VOTE, None, s.error
        return action
    if phase is Phase.PASS:
        return _move_early(s) or _read_ahead(s)
    if phase is Phase.AGREED:
        s.phase = Phase.COMMITTING
        return Do.COMMIT, None, None
    # Reads of the next step come before updates in memory: the disk would have nothing to do.
    if phase is Phase.COMMITTED:
        action = _read_ahead(s)
        if action is None:
            s.phase = Phase.RESIDENT
            return Do.RESIDENT, None, None
        return action
    if phase is Phase.UNDOING and not s.under_way:
        return (Do.RESTORE, s.todo.popleft(), None) if s.todo else (Do.ROLLBACK, None, None)
    return None


def _is_prepared(s: State) -> bool:
    return not (s.todo or s.reads or s.updated)


def _move(s: State) -> Action | None:
    """Move a row of the step on."""
    if s.updated:
        return _begin(s, Do.WRITE, s.updated[0])
    reads, in_hand = s.reads, s.updating is not None
    # The row that is updated counts as a read: one more read during an update costs 8 % where
    # threads that read use its cores.
    if s.todo and len(reads) + in_hand < s.depth and (s.free or s.cached):
        row = s.todo[0]
        if row.stage is Stage.IDLE or (row.stage is Stage.WRITTEN and not row.is_void):
            reads.append(s.todo.popleft())
            return _begin(s, Do.READ if row.stage is Stage.IDLE else Do.FETCH, row)
    if reads and s.updating is None:
        row = reads[0]
        if row.stage is Stage.READY or row.stage is Stage.FETCHED:
            reads.popleft()
            return _begin(s, Do.UPDATE if row.stage is Stage.READY else Do.PLACE, row)
    return None


def _move_early(s: State) -> Action | None:
    """Move a row on before its step."""
    if s.updated:
        return _begin(s, Do.WRITE, s.updated[0])
    if not s.speculates:
        return None
    while s.finals and s.finals[0].stage is not Stage.IDLE:  # the step reads it
        s.finals.popleft()
    if s.finals and len(s.early) <= READS_AHEAD and (s.free or s.cached):
        row = s.finals.popleft()
        row.is_early = True
        s.early.append(row)
        return _begin(s, Do.READ, row)
    if s.early and s.updating is None and s.early[0].stage is Stage.READY:
        return _begin(s, Do.UPDATE, s.early.popleft())
    return None


def _read_ahead(s: State) -> Action | None:
    """Read the first rows of the coming step."""
    if not (s.is_ahead and len(s.reads) < min(s.depth, len(s.order))):
        return None
    row = s.order[len(s.reads)]
    if row.stage is not Stage.IDLE or not (s.free or s.cached):
        return None
    s.reads.append(row)
    return _begin(s, Do.READ, row)


def _begin(s: State, do: Do, row: Row) -> Action:
    if do is Do.READ or do is Do.FETCH:
        take_buffer(s, row)
    elif do is Do.UPDATE:
        s.updating = row
    elif do is Do.WRITE:
        s.updated.popleft()
    row.stage = BEGIN[row.stage, do]
    if do in TRANSFERS:
        s.under_way[row] = None
    return do, row, None


def take_buffer(s: State, row: Row) -> None:
    """Take a buffer for a row: its own, a free one, or that of the row that was written first."""
    if row.buffer is not None:  # it was written, and is kept
        s.cached.remove(row)
    elif s.free:
        row.buffer = s.free.pop()
    else:
        other = s.cached.popleft()
        row.buffer, other.buffer = other.buffer, None


def _waits_for(s: State) -> Row | None:
    """Row whose transfer must end before there is another action; None: no wait."""
    if s.phase is Phase.PREPARING and s.error is None:
        if s.reads and s.reads[0] in s.under_way:
            return s.reads[0]
        if s.todo and s.todo[0] in s.under_way:
            return s.todo[0]
        return _oldest(s, Stage.WRITING) or next(iter(s.under_way), None)
    if s.phase is not Phase.PASS:
        return next(iter(s.under_way), None)
    # a void row keeps its buffer, and its version is not forgotten, until its transfer has ended
    void = next((row for row in s.under_way if row.is_void), None)
    if void is not None:
        return void
    if s.speculates and s.early:
        return s.early[0]
    return _oldest(s, Stage.WRITING) if s.speculates and s.finals else None


def _oldest(s: State, stage: Stage) -> Row | None:
    return next((row for row in s.under_way if row.stage is stage), None)
