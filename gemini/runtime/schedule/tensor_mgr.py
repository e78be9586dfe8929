"""StatefulTensorMgr: states of parameters, and which chunks are gathered.

The manager follows the plan's `GatherSteps` for this kind of iteration and these inputs, if the
plan has some and its calls are the calls that come: then the bytes moved are the plan's. Other
cycles (two forwards before one backward, evaluations of several ranks) get steps of their own from
what they needed last, in the room that the plan leaves at its fullest moment. At a call that needs
other chunks the manager gathers on demand and releases the least recently used, in that room.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from enum import Enum

from gemini.arguments import by_name
from gemini.chunk.layout import ChunkLayout
from gemini.chunk.opaque import Opaque
from gemini.chunk.storage import Chunk
from gemini.memtracer.trace import Kind
from gemini.placement.sizes import UNLIMITED
from gemini.placement.tiers import Tier
from gemini.placement.timetable.gathers import Call, GatherStep, GatherSteps, gather_steps
from gemini.placement.timetable.steps import room_ahead, schedule_gathers
from gemini.runtime.memory.ledger import MemoryLedger
from gemini.units import ChunkId, ParamId

MAX_CYCLES = 16

# Name of a cycle: kind and inputs, and a hash of what the cycle before it needed. So two forwards
# before one backward, or evaluations between steps, have steps of their own.
Cycle = tuple[Kind, str, int]
StepsFor = Callable[[Kind, str], "GatherSteps | None"]


class TensorState(Enum):
    """State of one parameter's bytes: `shard` persists, `payload` is what a gather makes."""

    __hash__ = object.__hash__  # members are compared by identity; enum's own hash is in Python

    FREE = "free"  # no values anywhere yet
    HOLD = "hold"  # shard only, or payload idle: may be released and moved
    COMPUTE = "compute"  # payload on the compute device, in use by a module: stays there
    HOLD_AFTER_FORWARD = "hold_after_forward"  # as HOLD; its backward is still to come
    HOLD_AFTER_BACKWARD = "hold_after_backward"  # as HOLD; its module is done with it
    READY_FOR_REDUCE = "ready_for_reduce"  # its gradient has arrived in the chunk's gradient buffer


_S = TensorState
LEGAL: dict[TensorState, frozenset[TensorState]] = {
    _S.FREE: frozenset({_S.HOLD}),
    _S.HOLD: frozenset({_S.COMPUTE, _S.READY_FOR_REDUCE, _S.FREE}),
    _S.COMPUTE: frozenset(
        {
            _S.COMPUTE,  # entered again before it was left: reused or nested modules
            _S.HOLD_AFTER_FORWARD,
            _S.HOLD_AFTER_BACKWARD,
            _S.READY_FOR_REDUCE,
            _S.HOLD,
        }
    ),
    _S.HOLD_AFTER_FORWARD: frozenset({_S.COMPUTE, _S.READY_FOR_REDUCE, _S.HOLD}),
    _S.HOLD_AFTER_BACKWARD: frozenset({_S.COMPUTE, _S.READY_FOR_REDUCE, _S.HOLD}),
    _S.READY_FOR_REDUCE: frozenset(
        {
            _S.COMPUTE,  # used again: reentrant checkpointing, tied modules
            _S.READY_FOR_REDUCE,
            _S.HOLD,
        }
    ),
}


class IllegalTransition(RuntimeError):
    """State change that no parameter may make: a bug of the engine, not of its user."""


def check_transition(name: str, old: TensorState, new: TensorState) -> TensorState:
    """`new`, if a parameter in state `old` may take it. Raises IllegalTransition with its name."""
    if new not in LEGAL[old]:
        allowed = ", ".join(sorted(state.value for state in LEGAL[old]))
        raise IllegalTransition(
            f"parameter {name} went from {old.value} to {new.value}; expected one of: {allowed}"
        )
    return new


@by_name
class StatefulTensorMgr:
    """States and gathered chunks of one engine.

    steps_for: the plan's steps for a kind of iteration and a signature of its inputs, if it has
        any.
    payload_room_bytes: says what payloads may take, wherever no plan is followed.
    agree: where other ranks follow the same steps: called before a planned call gathers chunks that
        its steps do not name; before all, where `asks_first`: the cycle before was not of steps.
    opaque: parameters that are told of the calls that use them.
    """

    def __init__(
        self,
        layout: ChunkLayout,
        chunks: Sequence[Chunk],
        never_released: Iterable[ChunkId],
        max_prefetch: int,
        ledger: MemoryLedger | None = None,
        payload_room_bytes: Callable[[], int] = lambda: UNLIMITED,
        steps_for: StepsFor = lambda kind, signature: None,
        agree: Callable[[Sequence[ChunkId]], None] | None = None,
        opaque: Mapping[ParamId, Opaque] | None = None,
    ) -> None:
        self.ledger = ledger or MemoryLedger(chunks)
        self._names = [spec.name for spec in layout.params]
        self._chunks = chunks
        self._opaque = opaque or {}
        self._states = [TensorState.HOLD for _ in layout.params]
        never_released = self._never_released = set(never_released)
        self._nbytes = {
            chunk.spec.id: chunk.spec.payload_bytes
            for chunk in chunks
            if not chunk.is_unsharded and chunk.spec.id not in never_released
        }
        self._max_prefetch = max_prefetch
        self._room_ahead = room_ahead(self._nbytes.values(), max_prefetch)
        self._room_of_plan = payload_room_bytes
        self._payload_room_bytes = payload_room_bytes()  # as the cycle began
        self._steps_for = steps_for
        self._agree = agree
        self.asks_first = False
        self._users: dict[ChunkId, int] = dict.fromkeys(self._nbytes, 0)
        self._computing = [0] * len(layout.params)  # calls that use a parameter now
        self._pinned: dict[ChunkId, None] = {}  # borrowed, or seen in an output: until the end
        self._recent: dict[ChunkId, None] = {}  # gathered, least recently used first
        self._overdue: dict[ChunkId, None] = {}  # to be released, and still in use
        self._seen: list[Call] = []  # needs of this cycle's calls so far, none twice in succession
        self._cycle: Cycle = ("train", "", 0)
        self._cycle_steps: dict[Cycle, GatherSteps] = {}  # most recently used last
        self._steps: GatherSteps | None = None  # that this cycle follows
        self._place = 0  # there: of the next step
        self._step: GatherStep | None = None  # of the call that came last
        self._carried: frozenset[ChunkId] = frozenset()  # by the plan, through a step
        self._behind: list[tuple[ChunkId, ...]] = []  # to release at the next ends of calls
        self._largest_need = 0
        self.holds = False  # all is gathered, and stays so to the end of a schedule
        self._fills_room = False  # payloads stay as long as there is room
        self.deviated = False  # this cycle left its steps
        self._ranks_differ = False  # they came to the end of this cycle by other calls
        # there: the call that was next, and that came
        self.left_steps: tuple[Call, Call] = ((), ())
        self.gathers_of = Counter[ChunkId]()  # payloads made so far, of each chunk
        self._before_release: Callable[[Chunk], None] = lambda chunk: None

    @property
    def releases_nothing(self) -> bool:
        """Whether every chunk stays gathered: hooks and on-demand fetches have nothing to do."""
        return not self._nbytes

    @property
    def num_calls(self) -> int:
        """Number of calls of this cycle so far that needed other chunks than the one before."""
        return len(self._seen)

    @property
    def follows_steps(self) -> bool:
        """Whether gathers and releases are those of this cycle's steps."""
        return self._steps is not None and not self.deviated

    @property
    def calls(self) -> tuple[Call, ...]:
        """Needs of this cycle's calls, none twice in succession: by its steps, or so far."""
        steps = self._steps
        return tuple(self._seen) if steps is None or self.deviated else steps.needs

    def last_calls(self) -> dict[ChunkId, int]:
        """Number of the last call so far that needed each chunk."""
        return {chunk: i for i, call in enumerate(self._seen, 1) for chunk in call}

    def follow_to_end(self) -> bool:
        """Whether the steps of this cycle were followed, and no other call is left."""
        if self._steps is None or self.deviated:
            return False
        self._end_repeats(self._steps.steps)
        return self._place == len(self._steps.steps)

    def state_of(self, param: ParamId) -> TensorState:
        """State of a parameter."""
        return self._states[param]

    def set_state(self, params: Iterable[ParamId], state: TensorState) -> None:
        """Move parameters to a state; an illegal transition raises with the parameter's name."""
        for param in params:
            old = self._states[param]
            if state not in LEGAL[old]:
                check_transition(self._names[param], old, state)
            self._states[param] = state

    def gradient_arrived(self, param: ParamId) -> None:
        """Note that the gradient of `param` waits to be reduced."""
        old = self._states[param]
        if TensorState.READY_FOR_REDUCE not in LEGAL[old]:
            check_transition(self._names[param], old, TensorState.READY_FOR_REDUCE)
        self._states[param] = TensorState.READY_FOR_REDUCE

    def reset_states(self) -> None:
        """Set all parameters to `HOLD`: a backward has ended, none is used, no gradient waits."""
        self._states = [TensorState.HOLD] * len(self._states)  # which is legal from any state

    def homes_changed(self) -> None:
        """Follow shards that have moved, between cycles: unsharded chunks need no gathers."""
        for chunk in [chunk for chunk in self._nbytes if self._chunks[chunk].is_unsharded]:
            for known in (self._nbytes, self._users, self._pinned, self._recent, self._overdue):
                known.pop(chunk, None)
        for there in self._chunks:  # and those that went to the host need some
            name = there.spec.id
            if not (there.is_unsharded or name in self._never_released or name in self._nbytes):
                self._nbytes[name] = there.spec.payload_bytes
                self._users[name] = 0
                if there.gathered:
                    self._recent[name] = None
        self._room_ahead = room_ahead(self._nbytes.values(), self._max_prefetch)
        self._payload_room_bytes = self._room_of_plan()
        self._cycle_steps.clear()
        self._steps, self._behind, self._carried = None, [], frozenset()

    # -- bytes --

    def bytes_in_use(self) -> dict[tuple[Tier, str], int]:
        """Bytes of model data by tier and kind, now; what has none is left out."""
        return self.ledger.bytes_in_use()

    # -- calls --

    def advance_to(self, chunks: Call) -> bool:
        """Find the step of a call that begins, and carry out repeats before it; `prepare` follows.

        Returns whether the call needs other chunks than the one before.
        """
        is_other = not self._seen or self._seen[-1] != chunks
        if is_other:
            self._seen.append(chunks)
            needed = 0
            for chunk in chunks:
                needed += self._nbytes.get(chunk, 0)
            self._largest_need = max(self._largest_need, needed)
        self._step = self._next_step(chunks, is_other)
        return is_other

    def prepare(self, chunks: Call, in_cycle: bool = True) -> None:
        """Gather `chunks` for a call that begins; release and prefetch what its step says.

        in_cycle: `advance_to` was called for it; False for a module that was called by itself.
        """
        storage = self.ledger.storage
        if storage is not None and storage.host_gradients is not None:
            storage.host_gradients.moment(begins=True)
        wanted: list[ChunkId] = []
        for chunk in chunks:
            if chunk in self._nbytes:
                wanted.append(chunk)
        step = self._step if in_cycle else None
        if step is None:
            if in_cycle:
                self._ask(wanted)
            else:
                self._payload_room_bytes = self._room_of_plan()
            self._gather_now(wanted)
        else:
            self._execute_step(step, wanted)
        for chunk in wanted:
            if self._chunks[chunk].pending is not None:
                self._chunks[chunk].wait_gathered()
            self._recent.pop(chunk, None)
            self._recent[chunk] = None
        if self.ledger.watched or self.ledger.limited:
            self.ledger.note()

    def call_ended(self) -> None:
        """Release what the step says, as a call has ended and uses its chunks no more."""
        storage = self.ledger.storage
        if storage is not None and storage.host_gradients is not None:
            storage.host_gradients.moment(begins=False)
        if self._behind:
            rows = self._behind.pop(0)
            kept = self._kept_for_repeats(rows)
            self._release_planned([chunk for chunk in rows if chunk not in kept])
            if kept:
                self._behind.append(kept)

    def begin_use(self, chunks: Iterable[ChunkId], params: Sequence[ParamId]) -> None:
        """Count a call's use of these: its chunks may not be released meanwhile."""
        for chunk in chunks:
            if chunk in self._users:
                self._users[chunk] += 1
        for param in params:
            self._computing[param] += 1
            if param in self._opaque:
                self._opaque[param].call_begins()
        self.set_state(params, TensorState.COMPUTE)

    def end_use(
        self, chunks: Iterable[ChunkId], params: Iterable[ParamId], state: TensorState
    ) -> None:
        """End a call's use of these; parameters that no other call uses take `state`.

        A parameter whose gradient has arrived meanwhile keeps the state that says so.
        """
        for chunk in chunks:
            if chunk in self._users:
                self._users[chunk] -= 1
        done: list[ParamId] = []
        for param in params:
            self._computing[param] -= 1
            if param in self._opaque:
                self._opaque[param].call_ends()
            if not self._computing[param] and self._states[param] is TensorState.COMPUTE:
                done.append(param)
        self.set_state(done, state)

    def pin(self, chunks: Iterable[ChunkId]) -> None:
        """Keep these chunks until `unpin_all`."""
        self._pinned.update((chunk, None) for chunk in chunks if chunk in self._nbytes)

    def hold(self) -> None:
        """Begin to gather everything, to be kept until `let_go`; where there is no room for all,
        payloads stay as long as there is some."""
        if sum(self._nbytes.values()) > self._room_of_plan():
            self._fills_room = True
            return
        self.holds = True
        missing = [chunk for chunk in self._nbytes if not self._chunks[chunk].gathered]
        if self.asks_first:
            self._ask(missing)
        self.pin(self._nbytes)
        for chunk in missing:
            self._gather(chunk)
        if self.ledger.watched or self.ledger.limited:
            self.ledger.note()

    def let_go(self) -> None:
        """Release what `hold` has gathered."""
        self.holds = self._fills_room = False
        self.release_all()

    def unpin_all(self) -> None:
        """Allow the release of all pinned chunks again."""
        self._pinned.clear()

    def begin_cycle(self, kind: Kind, signature: str = "") -> None:
        """Begin a cycle: a root forward that is not part of the one before."""
        self._payload_room_bytes = self._room_of_plan()
        seen = () if self._ranks_differ else tuple(self._seen)
        # What came under the last cycle's name; the next one's name has what came before it, so
        # that two kinds of iteration that take turns are told apart.
        if seen:
            self._register_cycle(self._cycle, seen)
        self._cycle = (kind, signature, hash(seen))
        planned = self._steps_for(kind, signature)
        registered = self._cycle_steps.get(self._cycle)
        self._steps = planned if registered is None else registered
        if self._ranks_differ:  # and so may what they expect
            self._steps = None
        self._carried = planned.carried if planned and self._steps is planned else frozenset()
        self._seen = []
        self._place = 0
        self._behind = []
        self._overdue.clear()
        self.deviated = self._ranks_differ = False
        if self._steps is not None:  # what an earlier cycle left here has no place in the steps
            self._release_planned([c for c in self._recent if c not in self._steps.carried])

    def ask_before_release(self, before_release: Callable[[Chunk], None]) -> None:
        """Call `before_release` with each gathered chunk that is about to be released."""
        self._before_release = before_release

    def ask_first(self, asks: bool) -> None:
        """Meet the other ranks before all gathers, or only before those that no steps name."""
        self.asks_first = asks

    def ranks_differ(self) -> None:
        """Note that ranks came to the end of this cycle by other calls: they keep nothing of it,
        and the next one follows no steps."""
        self._ranks_differ = True

    def forget_users(self) -> None:
        """Forget open module calls: a backward ended, or one was abandoned."""
        self._users = dict.fromkeys(self._nbytes, 0)
        self._computing = [0] * len(self._computing)
        for one in self._opaque.values():
            one.forget_calls()

    def release_all(self, keep: Container[ChunkId] = ()) -> None:
        """Free every payload that may be freed, but for `keep`."""
        self.unpin_all()
        self.forget_users()
        self._overdue.clear()
        for chunk in self._nbytes:
            if chunk not in keep:
                self._release(chunk)

    def make_room(self) -> None:
        """Free all payloads that no call uses, and follow no steps to the end of this cycle: there
        is less room than they were planned for."""
        self._steps, self._behind, self._carried = None, [], frozenset()
        self._payload_room_bytes = self._room_of_plan()
        for chunk in list(self._recent):
            self._release(chunk)

    def release_for_step(self) -> None:
        """Release payloads before a step, which changes the shards of trainable chunks.

        Frozen payloads stay where the plan carries them from one iteration to the next.
        """
        if self.ledger.storage is not None:
            self.ledger.storage.all_leave()
        # an evaluation before the step, whose weights stay the same, carries trained ones, too
        self.release_all(keep={c for c in self._carried if not self._chunks[c].spec.trainable})

    # -- inside --

    def _next_step(self, chunks: Call, is_other: bool) -> GatherStep | None:
        """Step to follow at this call, or None.

        None: the call repeats one whose step is done, it leaves the steps, or there are none.
        """
        if self._steps is None or self.deviated:
            return None
        steps = self._steps.steps
        if not self._is_next(steps, chunks):
            if not is_other and all(self._chunks[c].gathered for c in chunks if c in self._nbytes):
                return None
            self._end_repeats(steps)
            if not is_other or not self._is_next(steps, chunks):
                self.deviated = True
                was_next = steps[self._place].needs if self._place < len(steps) else ()
                self.left_steps = (was_next, chunks)
                self._behind = []
                return None
        self._place += 1
        return steps[self._place - 1]

    def _is_next(self, steps: Sequence[GatherStep], chunks: Call) -> bool:
        return self._place < len(steps) and steps[self._place].needs == chunks

    def _end_repeats(self, steps: Sequence[GatherStep]) -> None:
        """Carry out the next steps as long as they need the same chunks as the one before."""
        while self._place > 0 and self._is_next(steps, steps[self._place - 1].needs):
            self._place += 1
            self._execute_step(steps[self._place - 1], ())

    def _kept_for_repeats(self, rows: Sequence[ChunkId]) -> tuple[ChunkId, ...]:
        """Chunks of `rows` that are kept, as this rank's next call may repeat its need of them.

        The other ranks may not come to them again, and would not gather with it. Empty on one rank
        alone, and where payloads have no room: then a repeat on several ranks is an error.
        """
        there = sum(self._nbytes[chunk] for chunk in self._recent)
        if self._agree is None or there > self._payload_room_bytes:
            return ()
        return tuple(chunk for chunk in rows if chunk in self._seen[-1])

    def _execute_step(self, step: GatherStep, wanted: Sequence[ChunkId]) -> None:
        # A call that raised has no end; without this its chunks would stay gathered for good.
        for rows in self._behind:  # ends that did not come
            self._release_planned(rows)
        self._behind = list(step.release_at_ends)
        if self._overdue:
            self._release_planned([chunk for chunk in self._overdue if chunk not in wanted])
        if step.release:
            self._release_planned(step.release)
        needed = (*step.gather, *wanted)
        # Ranks that left their steps may be at another call: a gather that only some of them issue
        # would never end.
        if self.asks_first:
            self._ask(needed)
        if self._overdue:  # what could not be freed takes room from what the step gathers
            self._gather_now(wanted)
        for chunk in needed:  # it is there, unless its payload was lost meanwhile
            if chunk in wanted or not self._overdue:
                self._overdue.pop(chunk, None)
                if not self._chunks[chunk].gathered:
                    self._gather(chunk)

    def _ask(self, chunks: Iterable[ChunkId]) -> None:
        """Meet the other ranks, if there are any, before chunks of these are gathered."""
        missing = [chunk for chunk in chunks if not self._chunks[chunk].gathered]
        if missing and self._agree is not None:
            self._agree(missing)

    def _release_planned(self, chunks: Sequence[ChunkId]) -> None:
        for chunk in chunks:
            if self._release(chunk):
                self._overdue.pop(chunk, None)
            else:
                self._overdue[chunk] = None

    def _gather_now(self, wanted: Sequence[ChunkId]) -> None:
        """Gather on demand, after releases that make room."""
        missing: list[ChunkId] = []
        for chunk in wanted:
            if not self._chunks[chunk].gathered:
                missing.append(chunk)
        if missing:
            self._make_room(wanted, missing)
            for chunk in missing:
                self._gather(chunk)

    def _register_cycle(self, cycle: Cycle, seen: tuple[Call, ...]) -> None:
        """Register steps for cycles of this name, which will need what this one needed."""
        known = self._cycle_steps.pop(cycle, None)
        planned = self._steps_for(cycle[0], cycle[1])
        if planned is not None and planned.needs == seen:
            return
        if known is None or known.needs != seen:
            limit = self._limit_bytes()
            room = [max(limit, sum(self._nbytes.get(c, 0) for c in call)) for call in seen]
            schedule = schedule_gathers(seen, room, self._nbytes, self._max_prefetch)
            known = gather_steps(seen, schedule.gathers, schedule.always)
        self._cycle_steps[cycle] = known
        if len(self._cycle_steps) > MAX_CYCLES:
            del self._cycle_steps[next(iter(self._cycle_steps))]

    def _limit_bytes(self) -> int:
        """Bytes for payloads: the largest need and the prefetched chunks, within the room."""
        if self._fills_room:
            return self._payload_room_bytes
        largest = max(self._nbytes.values(), default=0)
        wanted = max(self._largest_need, largest) + self._room_ahead
        return min(wanted, self._payload_room_bytes)

    def _make_room(self, wanted: Sequence[ChunkId], missing: Sequence[ChunkId]) -> None:
        total, limit = 0, self._limit_bytes()
        for chunk in (*self._recent, *missing):
            total += self._nbytes[chunk]
        for chunk in list(self._recent):
            if total <= limit:
                return
            if chunk not in wanted and self._release(chunk):
                total -= self._nbytes[chunk]

    def _gather(self, chunk: ChunkId) -> None:
        """Begin to gather a released chunk."""
        self._overdue.pop(chunk, None)
        self._recent[chunk] = None
        self._chunks[chunk].gather()
        self.gathers_of[chunk] += 1

    def _release(self, chunk: ChunkId) -> bool:
        """Free a payload if nothing uses it; returns False if refused, until room is needed."""
        if not self._chunks[chunk].gathered:  # its gather failed
            self._recent.pop(chunk, None)
            return True
        if self._users[chunk] or chunk in self._pinned:
            return False
        # The user's writes are in the payload alone, and would be lost with it.
        self._before_release(self._chunks[chunk])
        self._chunks[chunk].release()
        self._recent.pop(chunk, None)
        return True
