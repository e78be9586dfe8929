"""Schedule of gathers and reductions in given homes: when each begins and its memory is freed.
Pure."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from gemini.memtracer.trace import Trace
from gemini.placement.plan import Gather, Reduction
from gemini.units import ChunkId, Moment, ParamId

from .belady import CacheProblem, best_schedule
from .room import Vector

MAX_UNDER_WAY = 2  # reductions over ranks: the next one waits for the first of them


@dataclass(frozen=True, slots=True)
class GatherSchedule:
    """Lives of all payloads, in the order in which they are issued."""

    gathers: tuple[Gather, ...]
    always: tuple[ChunkId, ...]  # stay gathered, from the first use on
    gap: float


def reductions_of(
    trace: Trace,
    chunk_of: Mapping[ParamId, ChunkId],
    trainable: Iterable[ChunkId],
    *,
    over_ranks: Container[ChunkId],
) -> dict[ChunkId, Reduction]:
    """Reductions: each chunk's buffer lives from the first to the last moment of backward at which
    a module with a part in the chunk begins or ends; one that no other rank has a part in from
    where a gradient in it may arrive.

    Chunks that no backward touches, or whose modules never end it, are reduced at its end.
    over_ranks: chunks whose reduction other ranks have a part in. Of the others a buffer is the
    gradient, which is taken at the next begin of a call, and has as long to leave as that call's
    first period.
    """
    first: dict[ChunkId, int] = {}
    for param, i in _arrivals(trace).items():
        if chunk_of[param] not in over_ranks:
            first[chunk_of[param]] = min(i, first.get(chunk_of[param], i))
    last: dict[ChunkId, int] = {}
    users: dict[ChunkId, int] = {}
    end = len(trace.moments) - 1
    for i, moment in enumerate(trace.moments):
        if moment.phase != "backward":
            continue
        for chunk in sorted({chunk_of[param] for param in moment.params}):
            first.setdefault(chunk, i)
            # a chunk of several modules is final when the last open one has ended
            users[chunk] = users.get(chunk, 0) + (1 if moment.edge == "enter" else -1)
            last[chunk] = i if users[chunk] <= 0 else end
    next_begins, following = [end] * (len(trace.moments) + 1), end  # by moment
    for i in range(end, -1, -1):
        next_begins[i] = following
        following = i if trace.moments[i].edge == "enter" else following
    order = sorted(trainable, key=lambda chunk: (last.get(chunk, end), chunk))
    reductions = {}
    for place, chunk in enumerate(order):
        reduced = last.get(chunk, end)
        waiting = place + MAX_UNDER_WAY  # its beginning waits for this one
        free = next_begins[reduced] + 1
        if chunk in over_ranks:
            free = 1 + (last.get(order[waiting], end) if waiting < len(order) else end)
        reductions[chunk] = Reduction(
            chunk, Moment(first.get(chunk, end)), Moment(reduced), Moment(min(free, end + 1))
        )
    return reductions


def _arrivals(trace: Trace) -> dict[ParamId, int]:
    """Moment of backward from which on the gradient of each parameter may arrive.

    Autograd adds up what the calls of a parameter give, and hands it on as the last of them ends:
    so with one weight in two modules the last begin counts. What is checkpointed and reentrant has
    a backward of its own, whose sum arrives for itself: its modules begin more than once, and the
    first begin counts.
    """
    begins: dict[ParamId, list[int]] = {}
    times: Counter[tuple[ParamId, str]] = Counter()
    for i, moment in enumerate(trace.moments):
        for param in moment.params if moment.phase == "backward" else ():
            at = begins.setdefault(param, [])
            if moment.edge == "enter" or not at:
                at.append(i)
                times[param, moment.module] += 1
    again = {param for (param, _), count in times.items() if count > 1}
    return {param: at[0 if param in again else -1] for param, at in begins.items()}


def room_ahead(payloads: Collection[int], max_prefetch: int) -> int:
    """Bytes for payloads that are prefetched, of chunks of the usual size.

    The median: one large chunk, as of an embedding, does not reserve its like.
    """
    return max_prefetch * statistics.median_high(payloads) if payloads else 0


def prefetched_at(
    needs: Sequence[tuple[ChunkId, ...]], max_prefetch: int
) -> tuple[tuple[ChunkId, ...], ...]:
    """The next `max_prefetch` chunks that a moment does not use yet, for every moment."""
    prefetched: list[tuple[ChunkId, ...]] = []
    following: list[ChunkId] = []  # chunks used later, the next first
    for chunks in reversed(needs):
        if not chunks:
            prefetched.append(tuple(following[:max_prefetch]))
            continue
        prefetched.append(tuple([c for c in following if c not in chunks][:max_prefetch]))
        if chunks == tuple(following[: len(chunks)]):
            continue
        following = [*chunks, *(c for c in following if c not in chunks)]
        del following[max_prefetch + 8 :]  # no moment uses more than some chunks
    return tuple(reversed(prefetched))


def num_uses(needs: Sequence[tuple[ChunkId, ...]], num_chunks: int) -> list[int]:
    """Number of gathers of each chunk where nothing is kept between uses."""
    counts = [0] * num_chunks
    before: tuple[ChunkId, ...] = ()
    for chunks in needs:
        for chunk in chunks:
            counts[chunk] += chunk not in before
        before = chunks
    return counts


def schedule_gathers(
    needs: Sequence[tuple[ChunkId, ...]],
    room: Sequence[int] | Vector,
    nbytes: Mapping[ChunkId, int],
    max_prefetch: int,
    stale: Container[ChunkId] = (),
    may_begin: Sequence[bool] | None = None,
) -> GatherSchedule:
    """Keep payloads between uses as `room` allows, and begin each gather as early as it allows.

    room: bytes for payloads at every moment. nbytes: of the chunks that are gathered and freed.
    max_prefetch: payloads begun before the one that is used next, at most. stale: chunks whose
    payloads are worthless after the iteration, because it ends with a step. may_begin: moments at
    which gathers are issued, by default all. Raises ValueError where the needs of a moment do not
    fit its room.
    """
    total = len(needs)
    used = tuple(tuple(c for c in chunks if c in nbytes) for chunks in needs)
    last_use = {chunk: moment for moment, chunks in enumerate(used) for chunk in chunks}
    ends: list[list[ChunkId]] = [[] for _ in used]
    for chunk, moment in last_use.items():
        if chunk in stale:
            ends[moment].append(chunk)
    sizes = tuple(nbytes.get(ChunkId(c), 0) for c in range(max(nbytes, default=-1) + 1))
    rooms = np.array(room, np.int64)[:total]
    problem = CacheProblem(used, sizes, tuple(int(r) for r in rooms), tuple(tuple(e) for e in ends))
    schedule = best_schedule(problem)

    stays = {(i.item, i.start): i.end for i in schedule.cached}
    fetches = [(moment, ChunkId(c)) for moment, items in enumerate(schedule.fetches) for c in items]
    left = rooms.copy()
    lives: list[tuple[int, int, ChunkId]] = []  # use, release
    for use, chunk in fetches:
        moment = use
        # a life is a run of cached intervals; it may go round into the next iteration
        while (chunk, moment % total) in stays:
            end = stays[chunk, moment % total]
            moment += end - moment % total
        lives.append((use, moment + 1, chunk))
    fetched = {chunk for _, chunk in fetches}
    always = tuple(c for c in sorted(last_use) if c not in fetched)
    for chunk in always:
        left -= sizes[chunk]
    for use, release, chunk in lives:
        left[use : min(release, total)] -= sizes[chunk]
        if release > total:
            left[: release - total] -= sizes[chunk]

    gathers: list[Gather] = []
    freed = {chunk: release - total for _, release, chunk in lives if release > total}
    for i, (use, release, chunk) in enumerate(lives):
        # At most `max_prefetch` payloads are begun before an earlier one is used, the chunk's last
        # life is freed first, and the order of issue is kept. Then the last moment without room
        # decides.
        begin = use
        if max_prefetch:
            earliest = max(lives[i - max_prefetch][0] if i >= max_prefetch else 0,
                           freed.get(chunk, 0), gathers[-1].begin if gathers else 0)  # fmt: skip
            short = np.flatnonzero(left[earliest:use] < sizes[chunk])
            begin = int(earliest + short[-1] + 1) if len(short) else earliest
            while begin < use and may_begin is not None and not may_begin[begin]:
                begin += 1
            left[begin:use] -= sizes[chunk]
        gathers.append(Gather(chunk, Moment(begin), Moment(use), Moment(release)))
        freed[chunk] = release
    return GatherSchedule(tuple(gathers), always, schedule.gap)
