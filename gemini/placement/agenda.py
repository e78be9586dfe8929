"""What a plan asks of its executor at every moment, in the order in which it is done. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from gemini.units import ChunkId

from .plan import Gather, Move, Plan


@dataclass(slots=True)
class _Lists:
    wait: list[Move] = field(default_factory=list)
    release: list[ChunkId] = field(default_factory=list)
    reduced: list[ChunkId] = field(default_factory=list)
    reduce: list[ChunkId] = field(default_factory=list)
    begin: list[Move] = field(default_factory=list)
    gather: list[Gather] = field(default_factory=list)
    wait_now: list[Move] = field(default_factory=list)
    use: list[ChunkId] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Agenda:
    """One moment. First what gives memory back, then what takes it, then what must be there."""

    wait: tuple[Move, ...]  # begun before: they have ended when this is passed
    release: tuple[ChunkId, ...]  # payloads to free
    reduced: tuple[ChunkId, ...]  # gradient buffers to free, their reductions awaited
    reduce: tuple[ChunkId, ...]  # no more gradients come: reductions to issue
    begin: tuple[Move, ...]
    gather: tuple[Gather, ...]  # to issue, each behind the move that brings its shard
    wait_now: tuple[Move, ...]  # begun and needed at this moment
    use: tuple[ChunkId, ...]  # payloads to wait for


def agenda(plan: Plan) -> tuple[Agenda, ...]:
    """By moment; the last is the end of the iteration. Collectives are in their canonical order:
    moment by moment, reductions before gathers, each in the plan's order."""
    rows = [_Lists() for _ in range(plan.num_moments + 1)]
    for move in plan.moves:
        rows[move.begin].begin.append(move)
        (rows[move.end].wait_now if move.begin == move.end else rows[move.end].wait).append(move)
    total = plan.num_trace_moments
    for gather in plan.gathers:
        rows[gather.begin].gather.append(gather)
        rows[gather.use].use.append(gather.chunk)
        wraps = gather.release > total
        rows[gather.release - total if wraps else gather.release].release.append(gather.chunk)
    for reduction in plan.reductions:
        rows[reduction.last].reduce.append(reduction.chunk)
        rows[reduction.end].reduced.append(reduction.chunk)
    return tuple(Agenda(*(tuple(getattr(row, name)) for name in Agenda.__slots__)) for row in rows)
