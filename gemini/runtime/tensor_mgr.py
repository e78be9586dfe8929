"""StatefulTensorMgr: what state every parameter is in, and which chunks are gathered.

It follows a `GatherPlan` while the moments are those that were traced. At a moment that differs it
falls back to gathering on demand and releasing the least recently used, within the same limit, and
plans anew from what it saw.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from gemini.chunk.layout import ChunkLayout
from gemini.chunk.state import TensorState, check_transition
from gemini.chunk.storage import Chunk
from gemini.placement.gather import GatherPlan, GatherStep, plan_gathers
from gemini.placement.sizes import UNLIMITED
from gemini.placement.tiers import Tier
from gemini.units import ChunkId, ParamId

from .ledger import Ledger

_ON_DEMAND = GatherStep((), (), ())
MAX_PLANS = 16

# What is expected of a cycle: its kind, and what the cycle before it needed. So two forwards before
# one backward, or evaluations between steps, have plans of their own.
Cycle = tuple[str, int]


class StatefulTensorMgr:
    """States and gathered chunks of one engine."""

    def __init__(
        self,
        layout: ChunkLayout,
        chunks: Sequence[Chunk],
        kept: Iterable[ChunkId],
        max_prefetch: int,
        ledger: Ledger | None = None,
        payload_room_bytes: int = UNLIMITED,
    ) -> None:
        self.ledger = ledger or Ledger(chunks)
        self._names = [spec.name for spec in layout.params]
        self._chunks = chunks
        self._chunk_of = layout.chunk_of()
        self._states = [TensorState.HOLD for _ in layout.params]
        kept = set(kept)
        self._nbytes = {
            chunk.spec.id: chunk.spec.payload_bytes
            for chunk in chunks
            if not chunk.is_whole and chunk.spec.id not in kept
        }
        self._max_prefetch = max_prefetch
        self.payload_room_bytes = payload_room_bytes
        self._users: dict[ChunkId, int] = dict.fromkeys(self._nbytes, 0)
        self._computing = [0] * len(layout.params)  # calls that use a parameter now
        self._pinned: dict[ChunkId, None] = {}  # borrowed, or seen in an output: until the end
        self._recent: dict[ChunkId, None] = {}  # gathered, least recently used first
        self._seen: list[tuple[ChunkId, ...]] = []  # needs of this cycle's moments so far
        self._cycle: Cycle = ("", 0)
        self._plans: dict[Cycle, GatherPlan] = {}  # most recently used last
        self._largest_need = 0
        self.deviated = False  # this cycle left its plan
        self.gathers = 0  # payloads made so far
        self.before_release: Callable[[Chunk], None] = lambda chunk: None

    @property
    def releases_nothing(self) -> bool:
        """Every chunk stays gathered: hooks and on-demand fetches have nothing to do."""
        return not self._nbytes

    def state_of(self, param: ParamId) -> TensorState:
        """Where a parameter is in its cycle."""
        return self._states[param]

    def set_state(self, params: Iterable[ParamId], state: TensorState) -> None:
        """Move parameters to a state; an illegal transition raises with the parameter's name."""
        for param in params:
            old = self._states[param]
            self._states[param] = check_transition(self._names[param], old, state)

    def hold_everything(self) -> None:
        """No parameter is in use and no gradient waits: a backward has ended."""
        for param, state in enumerate(self._states):
            if state is not TensorState.HOLD:
                self.set_state((ParamId(param),), TensorState.HOLD)

    # -- bytes --

    def bytes_in_use(self) -> dict[tuple[Tier, str], int]:
        """Bytes of model data by tier and kind, now; what has none is left out."""
        return self.ledger.bytes_in_use()

    # -- moments --

    def at_moment(self, chunks: tuple[ChunkId, ...], planned: bool = True) -> None:
        """Make `chunks` gathered, and release and prefetch what the plan says.

        `planned`: this is a moment of a cycle, and not of a module that was called by itself.
        """
        step = self._next_step(chunks) if planned else _ON_DEMAND
        for chunk in step.release:
            self._release(chunk)
        wanted = [chunk for chunk in chunks if chunk in self._nbytes]
        missing = [chunk for chunk in wanted if not self._chunks[chunk].gathered]
        if missing:
            self._make_room(wanted, missing)
            for chunk in missing:
                self._gather(chunk)
        for chunk in step.prefetch:
            if not self._chunks[chunk].gathered and self._has_room_for(chunk):
                self._gather(chunk)
        for chunk in wanted:
            self._chunks[chunk].wait_gathered()
            self._recent.pop(chunk, None)
            self._recent[chunk] = None
        self.ledger.note()

    def begin_use(self, chunks: Iterable[ChunkId], params: Iterable[ParamId]) -> None:
        """A call begins to use these: its chunks may not be released."""
        for chunk in chunks:
            if chunk in self._users:
                self._users[chunk] += 1
        for param in params:
            self._computing[param] += 1
            self.set_state((param,), TensorState.COMPUTE)

    def end_use(
        self, chunks: Iterable[ChunkId], params: Iterable[ParamId], state: TensorState
    ) -> None:
        """That call is done with them; parameters that no other call uses take `state`.

        One whose gradient has arrived meanwhile keeps the state that says so.
        """
        for chunk in chunks:
            if chunk in self._users:
                self._users[chunk] -= 1
        for param in params:
            self._computing[param] -= 1
            if not self._computing[param] and self._states[param] is TensorState.COMPUTE:
                self.set_state((param,), state)

    def pin(self, chunks: Iterable[ChunkId]) -> None:
        """Keep these chunks until `unpin_all`."""
        self._pinned.update((chunk, None) for chunk in chunks if chunk in self._nbytes)

    def unpin_all(self) -> None:
        """What was pinned may be released again."""
        self._pinned.clear()

    def begin_cycle(self, kind: str) -> None:
        """A root forward begins that is not part of the cycle before."""
        seen = tuple(self._seen)
        if seen:
            self._plan_for(self._cycle, seen)
        self._cycle = (kind, hash(seen))
        self._seen = []
        self.deviated = False

    def forget_users(self) -> None:
        """No module call is open any more: a backward ended, or one was abandoned."""
        self._users = dict.fromkeys(self._nbytes, 0)
        self._computing = [0] * len(self._computing)

    def release_all(self) -> None:
        """Free every payload that may be freed: the shards are about to change."""
        self.unpin_all()
        self.forget_users()
        for chunk in self._nbytes:
            self._release(chunk)

    # -- inside --

    def _next_step(self, chunks: tuple[ChunkId, ...]) -> GatherStep:
        position = len(self._seen)
        self._seen.append(chunks)
        needed = sum(self._nbytes.get(chunk, 0) for chunk in chunks)
        self._largest_need = max(self._largest_need, needed)
        plan = self._plans.get(self._cycle)
        if plan is None or self.deviated:
            return _ON_DEMAND
        if position >= len(plan.needs) or plan.needs[position] != chunks:
            self.deviated = True
            return _ON_DEMAND
        return plan.steps[position]

    def _plan_for(self, cycle: Cycle, seen: tuple[tuple[ChunkId, ...], ...]) -> None:
        plan = self._plans.pop(cycle, None)
        if plan is None or plan.needs != seen:
            plan = plan_gathers(seen, self._nbytes, self._limit_bytes(), self._max_prefetch)
        self._plans[cycle] = plan
        if len(self._plans) > MAX_PLANS:
            del self._plans[next(iter(self._plans))]

    def _limit_bytes(self) -> int:
        """Room for the largest need and for the chunks in flight behind it, if there is as much."""
        largest = max(self._nbytes.values(), default=0)
        wanted = max(self._largest_need, largest) + self._max_prefetch * largest
        return min(wanted, self.payload_room_bytes)

    def _make_room(self, wanted: Sequence[ChunkId], missing: Sequence[ChunkId]) -> None:
        total = sum(self._nbytes[chunk] for chunk in (*self._recent, *missing))
        for chunk in list(self._recent):
            if total <= self._limit_bytes():
                return
            if chunk not in wanted and self._release(chunk):
                total -= self._nbytes[chunk]

    def _has_room_for(self, chunk: ChunkId) -> bool:
        """Chunks that an earlier cycle left here are not in the plan."""
        there = sum(self._nbytes[other] for other in self._recent)
        return there + self._nbytes[chunk] <= self._limit_bytes()

    def _gather(self, chunk: ChunkId) -> None:
        self._chunks[chunk].gather()
        self._recent[chunk] = None
        self.gathers += 1

    def _release(self, chunk: ChunkId) -> bool:
        """Free a payload if nothing uses it. What is refused here goes when room is needed."""
        if not self._chunks[chunk].gathered:  # its gather failed
            self._recent.pop(chunk, None)
            return True
        if self._users[chunk] or chunk in self._pinned:
            return False
        self.before_release(self._chunks[chunk])
        self._chunks[chunk].release()
        self._recent.pop(chunk, None)
        return True
