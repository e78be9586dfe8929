"""Demand of the device at every moment, and the room that it leaves. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from gemini.placement.plan import Reduction
from gemini.placement.problem import PlanInputs
from gemini.placement.sizes import ChunkBytes
from gemini.placement.tiers import Tier
from gemini.units import ChunkId

Vector = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Demand:
    """Demand of an iteration for the device, whatever lives there. Vectors are over its moments:
    those of the trace, and one for the step."""

    non_model: Vector  # bytes
    needs: tuple[tuple[ChunkId, ...], ...]  # by moment of the trace
    reductions: dict[ChunkId, Reduction]  # of trainable chunks
    prefetched: tuple[tuple[ChunkId, ...], ...]  # at every moment, if there is room
    _rooms: dict[bool, tuple[PlanInputs, DeviceRoom]] = field(default_factory=dict, compare=False)

    def room(self, problem: PlanInputs, *, prefetch: bool) -> DeviceRoom:
        """Room of the device with nothing placed yet, to be filled. Computed once."""
        known = self._rooms.get(prefetch)
        if known is None or known[0] is not problem:
            known = self._rooms[prefetch] = problem, DeviceRoom(problem, self, prefetch=prefetch)
        return known[1].copy()


class DeviceRoom:
    """Free bytes of the device while homes are chosen; below 0 it lacks some.

    At some moments homes cost the same, because the same payloads are gathered and the same
    gradients wait: of these the one with the least room stands for all. `moments` has their places
    in the iteration. So filling takes as long as there are chunks, not calls.
    """

    left: Vector  # at `moments`

    def __init__(self, problem: PlanInputs, demand: Demand, *, prefetch: bool) -> None:
        self._chunks = problem.chunks
        always = problem.kept_bytes(Tier.DEVICE)
        left: Vector = problem.budgets.device - demand.non_model - always
        gathered_at = [
            tuple(dict.fromkeys((*chunks, *(demand.prefetched[moment] if prefetch else ()))))
            for moment, chunks in enumerate(demand.needs)
        ]
        gathered_at.append(())  # the step
        gathered = _places_of(gathered_at)
        for chunk, moments in gathered.items():
            left[moments] -= problem.chunks[chunk].payload_bytes
        waits = np.zeros(len(left) + 1, np.int64)  # how many gradients begin to wait, by moment
        for chunk, reduction in demand.reductions.items():
            sizes = problem.chunks[chunk]
            left[reduction.first : reduction.end] -= sizes.payload_bytes
            # the shard is made while its buffer lives, and two moments more until it has left
            if sizes.num_shards > 1:
                left[reduction.last : reduction.end + 2] -= sizes.shard_bytes
            waits[min(self._waits_from(reduction), len(left))] += 1
        self.moments = _least_of_equals(left, gathered_at, np.cumsum(waits[:-1]))
        self._set(left[self.moments])
        self._gathered = _places_of([gathered_at[moment] for moment in self.moments])
        self._first_wait = {
            chunk: int(np.searchsorted(self.moments, self._waits_from(reduction)))
            for chunk, reduction in demand.reductions.items()
        }

    def _waits_from(self, reduction: Reduction) -> int:
        """Moment from which a reduced gradient that stays on the device takes room of its own."""
        return reduction.end + (2 if self._chunks[reduction.chunk].num_shards > 1 else 0)

    def copy(self) -> DeviceRoom:
        """Copy for another filling."""
        return copy(self)  # vectors are replaced, and not changed

    def reserve(self, nbytes: int) -> None:
        """Take `nbytes` at all moments, also where they are not free; a negative number gives them
        back."""
        self._set(self.left - nbytes)

    def take_param(self, chunk: ChunkBytes, *, forced: bool = False) -> bool:
        """Take room for a parameter shard on the device; one that is alone is its own payload."""
        gathered = self._gathered.get(chunk.id, ()) if chunk.num_shards == 1 else ()
        saved = chunk.payload_bytes if self._least in gathered else 0
        if not forced and chunk.shard_bytes - saved > self.left[self._least]:
            return False
        cost = np.full(len(self.left), chunk.shard_bytes, np.int64)
        cost[list(gathered)] -= chunk.payload_bytes
        return self._take(cost, forced)

    def take_grad(self, chunk: ChunkBytes, *, forced: bool = False) -> bool:
        """Take room for a reduced gradient that stays on the device until the step is over."""
        first = self._first_wait.get(chunk.id)
        if first is None:  # an evaluation has no gradients
            return True
        waits = self._least >= first
        if not forced and waits and chunk.shard_bytes > self.left[self._least]:
            return False
        cost = np.zeros(len(self.left), np.int64)
        cost[first:] = chunk.shard_bytes
        return self._take(cost, forced)

    def _take(self, cost: Vector, forced: bool) -> bool:
        left = self.left - cost
        if not forced and left.min() < 0:
            return False
        self._set(left)
        return True

    def _set(self, left: Vector) -> None:
        self.left = left
        self._least = int(left.argmin())  # what does not fit there does not fit: asked first

    def take_run(self, sizes: Sequence[int]) -> int:
        """Take room at all moments for as many of the last `sizes` as fit. Returns how many did
        not."""
        room, left_out = int(self.left.min()), len(sizes)
        taken = 0
        for nbytes in reversed(sizes):
            if taken + nbytes > room:
                break
            taken += nbytes
            left_out -= 1
        self.reserve(taken)
        return left_out


def _places_of(rows: Sequence[tuple[ChunkId, ...]]) -> dict[ChunkId, list[int]]:
    places: dict[ChunkId, list[int]] = {}
    for place, chunks in enumerate(rows):
        for chunk in chunks:
            places.setdefault(chunk, []).append(place)
    return places


def _least_of_equals(
    left: Vector, gathered_at: Sequence[tuple[ChunkId, ...]], waits: Vector
) -> Vector:
    """Moment with the least room of all that have the same payloads and as many waiting
    gradients."""
    numbers: dict[tuple[ChunkId, ...], int] = {}
    payloads = np.array(
        [numbers.setdefault(chunks, len(numbers)) for chunks in gathered_at], np.int64
    )
    kind = payloads * (len(left) + 1) + waits
    order = np.lexsort((np.arange(len(left)), left, kind))  # the first of the least comes first
    is_first = np.append(True, np.diff(kind[order]) != 0)
    return np.sort(order[is_first])
