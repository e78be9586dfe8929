"""StatefulTensorMgr: what state every parameter is in, and which chunks are gathered.

It follows a `GatherPlan` while the moments are those that were traced. At a moment that differs it
falls back to gathering on demand and releasing the least recently used, within the same limit, and
plans anew from what it saw.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gemini.chunk.layout import ChunkLayout
from gemini.chunk.state import TensorState, check_transition
from gemini.chunk.storage import Chunk
from gemini.placement.gather import GatherPlan, GatherStep, plan_gathers
from gemini.units import ChunkId, ParamId

_ON_DEMAND = GatherStep((), (), ())


class StatefulTensorMgr:
    """States and gathered chunks of one engine."""

    def __init__(
        self,
        layout: ChunkLayout,
        chunks: Sequence[Chunk],
        kept: Iterable[ChunkId],
        max_prefetch: int,
    ) -> None:
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
        self._users: dict[ChunkId, int] = dict.fromkeys(self._nbytes, 0)
        self._pinned: dict[ChunkId, None] = {}  # borrowed, or seen in an output: until the end
        self._recent: dict[ChunkId, None] = {}  # gathered, least recently used first
        self._seen: list[tuple[ChunkId, ...]] = []  # needs of this cycle's moments so far
        self._cycle = ""  # what kind of cycle this is: training, evaluation
        self._plans: dict[str, GatherPlan] = {}
        self._largest_need = 0
        self.deviated = False  # this cycle left its plan
        self.gathers = 0  # payloads made so far

    @property
    def releases_nothing(self) -> bool:
        """Every chunk stays gathered: hooks and on-demand fetches have nothing to do."""
        return not self._nbytes

    def state_of(self, param: ParamId) -> TensorState:
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

    # -- moments --

    def at_moment(self, chunks: tuple[ChunkId, ...]) -> None:
        """Make `chunks` gathered, and release and prefetch what the plan says."""
        step = self._next_step(chunks)
        for chunk in step.release:
            self._release(chunk)
        wanted = [chunk for chunk in chunks if chunk in self._nbytes]
        missing = [chunk for chunk in wanted if not self._chunks[chunk].gathered]
        if missing:
            self._make_room(wanted, missing)
            for chunk in missing:
                self._gather(chunk)
        for chunk in step.prefetch:
            if not self._chunks[chunk].gathered:
                self._gather(chunk)
        for chunk in wanted:
            self._chunks[chunk].wait_gathered()
            self._recent.pop(chunk, None)
            self._recent[chunk] = None

    def hold(self, chunks: Iterable[ChunkId]) -> None:
        """A module call begins to use these chunks: they may not be released."""
        for chunk in chunks:
            if chunk in self._users:
                self._users[chunk] += 1

    def let_go(self, chunks: Iterable[ChunkId]) -> None:
        """That call is done with them."""
        for chunk in chunks:
            if chunk in self._users:
                self._users[chunk] -= 1

    def pin(self, chunks: Iterable[ChunkId]) -> None:
        """Keep these chunks until `unpin_all`."""
        self._pinned.update((chunk, None) for chunk in chunks if chunk in self._nbytes)

    def unpin_all(self) -> None:
        self._pinned.clear()

    def begin_cycle(self, kind: str) -> None:
        """A root forward begins that is not part of the cycle before. Each kind has its plan."""
        self._replan_if_new()
        self._cycle = kind
        self._seen = []
        self.deviated = False

    def forget_users(self) -> None:
        """No module call is open any more: a backward ended, or one was abandoned."""
        self._users = dict.fromkeys(self._nbytes, 0)

    def release_all(self) -> None:
        """Free every payload that may be freed: the shards are about to change."""
        self.unpin_all()
        self.forget_users()
        for chunk in list(self._recent):
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

    def _replan_if_new(self) -> None:
        seen = tuple(self._seen)
        plan = self._plans.get(self._cycle)
        if seen and (plan is None or plan.needs != seen):
            self._plans[self._cycle] = plan_gathers(
                seen, self._nbytes, self._limit_bytes(), self._max_prefetch
            )

    def _limit_bytes(self) -> int:
        """Room for the largest need and for the chunks in flight behind it."""
        largest = max(self._nbytes.values(), default=0)
        return max(self._largest_need, largest) + self._max_prefetch * largest

    def _make_room(self, wanted: Sequence[ChunkId], missing: Sequence[ChunkId]) -> None:
        total = sum(self._nbytes[chunk] for chunk in (*self._recent, *missing))
        for chunk in list(self._recent):
            if total <= self._limit_bytes():
                return
            if chunk not in wanted and self._release(chunk):
                total -= self._nbytes[chunk]

    def _gather(self, chunk: ChunkId) -> None:
        self._chunks[chunk].gather()
        self._recent[chunk] = None
        self.gathers += 1

    def _release(self, chunk: ChunkId) -> bool:
        """Free a payload if nothing uses it. What is refused here goes when room is needed."""
        if not self._chunks[chunk].gathered or self._users[chunk] or chunk in self._pinned:
            return False
        self._chunks[chunk].release()
        self._recent.pop(chunk, None)
        return True
