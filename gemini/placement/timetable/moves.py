"""Moves of an iteration in given homes: which bytes travel at which moment. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

from gemini.placement.cost import update_transfers
from gemini.placement.plan import Gather, Move, MoveKind, Reduction, UpdatePath
from gemini.placement.problem import Homes, PlanInputs
from gemini.placement.tiers import Tier
from gemini.units import Bytes, ChunkId, Moment

EVICT_MOMENTS = 2  # from the end of a reduction until the gradient has left the device


def moves_of(
    homes: Homes,
    problem: PlanInputs,
    gathers: Sequence[Gather],
    reductions: Mapping[ChunkId, Reduction],
    num_trace_moments: int,
    updates: bool,
) -> tuple[Move, ...]:
    """Moves of one iteration, by the moment at which they begin; with those of `updates`."""
    moves: list[Move] = []
    for gather in gathers:
        home = homes.param[gather.chunk]
        if home is not Tier.DEVICE:
            moves.append(
                Move(MoveKind.PARAM, gather.chunk, None, home, Tier.DEVICE, gather.begin,
                     gather.use, problem.chunks[gather.chunk].shard_bytes)
            )  # fmt: skip
    for chunk, reduction in reductions.items():
        home = homes.grad[chunk]
        if home is not Tier.DEVICE:
            begin, end = evicted_at(problem, reduction, num_trace_moments)
            moves.append(
                Move(MoveKind.GRAD, chunk, None, Tier.DEVICE, home, begin, end,
                     problem.chunks[chunk].shard_bytes)
            )  # fmt: skip
    step = Moment(num_trace_moments)
    for sizes in problem.chunks if updates else ():
        i = sizes.id
        for block, state in zip(sizes.blocks, homes.state[i], strict=True):
            path = UpdatePath.RESIDENT if state is Tier.DEVICE else problem.off_device
            for kind, src, dst, nbytes in update_transfers(
                block, state, param=homes.param[i], grad=homes.grad[i], path=path
            ):
                moves.append(Move(kind, i, block.id, src, dst, step, step, Bytes(nbytes)))
    return tuple(sorted(moves, key=lambda move: move.begin))


def evicted_at(
    problem: PlanInputs, reduction: Reduction, num_trace_moments: int
) -> tuple[Moment, Moment]:
    """Moments at which a gradient begins to leave the device for its home, and has left it."""
    if not problem.chunks[reduction.chunk].reduces:  # the buffer is the gradient
        return reduction.last, reduction.end
    end = min(reduction.end + EVICT_MOMENTS, num_trace_moments)
    return min(reduction.end, Moment(end)), Moment(end)


def leaving_bytes(
    homes: Homes,
    problem: PlanInputs,
    reductions: Mapping[ChunkId, Reduction],
    num_trace_moments: int,
) -> dict[ChunkId, int]:
    """Bytes by chunk of all gradients on their way to host memory when its own begins to leave, its
    own among them, wherever it lives."""
    spans: dict[ChunkId, tuple[int, int]] = {}
    for chunk, reduction in reductions.items():
        leaves, has_left = evicted_at(problem, reduction, num_trace_moments)
        first = min(leaves, num_trace_moments - 1)  # the last leave between trace and step
        spans[chunk] = first, max(has_left, first + 1)
    changes = [0] * (num_trace_moments + 2)
    for chunk, (begin, end) in spans.items():
        if homes.grad[chunk] is Tier.HOST:
            changes[begin] += problem.chunks[chunk].shard_bytes
            changes[end] -= problem.chunks[chunk].shard_bytes
    totals = list(accumulate(changes))
    return {
        chunk: totals[begin]
        + (0 if homes.grad[chunk] is Tier.HOST else problem.chunks[chunk].shard_bytes)
        for chunk, (begin, _) in spans.items()
    }
