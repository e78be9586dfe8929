"""What an iteration costs whose blocks on disk are updated in backward (ADR 0013). Pure.

    in backward  a block is read, updated and written as soon as its gradient is final
    in the step  the other blocks; of those before, what the step reads of a new version

Every block that was begun in backward is held, as in a run of steps that clip and skip nothing. The
disk works beside the pass, the update takes the time of what computes. Blocks that are read
ahead of the step are left to it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from gemini.placement.cost import Walk, link_seconds, predict_step
from gemini.placement.plan import Move, MoveKind, Plan
from gemini.placement.sizes import FP32_BYTES, Bandwidths, BlockBytes
from gemini.placement.tiers import Tier
from gemini.units import READS_AHEAD, BlockId, Bytes, ChunkId

from .tail import Calls, TailCost, price_tail


@dataclass(frozen=True, slots=True)
class SpeculationCost:
    """An iteration as predicted, with updates in backward."""

    num_blocks: int  # with state on NVMe
    num_ahead: int  # of these, updated in backward
    serial_seconds: float  # of an iteration, with the rest in `step()`
    tail: TailCost | None  # with the rest behind the next forward; None: it may not be there

    def __str__(self) -> str:
        return blocks_in_words(self.num_ahead, self.num_blocks)


def blocks_in_words(num_ahead: int, num_blocks: int) -> str:
    """In words, as predicted or as measured."""
    return f"{num_ahead} of {num_blocks} blocks on NVMe"


def price_speculation(
    plan: Plan,
    bandwidths: Bandwidths,
    compute_seconds: Sequence[float],
    calls: Calls,
    backward: int,
    *,
    has_tail: bool,
) -> SpeculationCost | None:
    """Walk through the pass with what a backward updates beside it, and through what is left.

    has_tail: that may be behind the next forward. The others as of `price_tail`. Weights have
    masters. None in evaluation, where nothing is known of how long a forward takes, and where no
    state is on NVMe beside a CPU.
    """
    on_disk = plan.blocks_on(Tier.NVME)
    is_known = plan.kind == "train" and any(compute_seconds[:backward])
    if plan.has_host_tier or not (is_known and on_disk):
        return None
    ahead = _in_backward(plan, bandwidths, compute_seconds, calls, backward)
    compute = list(compute_seconds)
    compute[-1] += ahead.update_seconds
    rest = replace(plan, forecast=replace(plan.forecast, moves=_moves_left(plan, ahead.blocks)))
    late = ahead.disk_seconds
    serial = predict_step(rest, bandwidths, compute, done=ahead.blocks, disk_busy=late)
    left = None
    if has_tail:
        left = price_tail(
            rest, bandwidths, compute, calls, backward, serial, done=ahead.blocks, disk_busy=late
        )
    return SpeculationCost(len(on_disk), len(ahead.blocks), serial.seconds, left)


@dataclass(frozen=True, slots=True)
class _Ahead:
    """What is updated in backward."""

    blocks: frozenset[BlockId]
    update_seconds: float  # of what computes
    disk_seconds: float  # that the disk still takes when backward has ended


def _in_backward(
    plan: Plan,
    bandwidths: Bandwidths,
    compute_seconds: Sequence[float],
    calls: Calls,
    backward: int,
) -> _Ahead:
    """One thread and one disk, which works in the order of issue: two reads are under way, an
    update waits for the first of them, and its write is followed by the next read."""
    passing = _pass(plan, bandwidths, compute_seconds, calls, backward)
    coming, disk, end = list(passing.final), passing.disk_free, passing.end
    others = deque(passing.transfers)
    updates = Walk(plan, bandwidths)
    reads: list[tuple[BlockBytes, float]] = []  # and when they have ended
    done: list[BlockId] = []
    now = taken = 0.0  # taken: of what computes, by updates
    while reads or coming:
        while coming and len(reads) <= READS_AHEAD and coming[0][1] + taken <= now:
            while others and others[0][0] + taken <= now:
                at, seconds = others.popleft()
                disk = max(disk, at + taken) + seconds
            block, _ = coming.pop(0)
            disk = max(disk, now) + _bytes_in(plan, block) / bandwidths.nvme_read
            reads.append((block, disk))
        if not reads:
            now = coming[0][1] + taken
            continue
        block, arrived = reads.pop(0)
        now = max(now, arrived)
        if now >= end + taken:  # the step comes first, and forgets what was read
            break
        seconds = updates.update_of(block.id)
        now, taken = now + seconds, taken + seconds
        disk = max(disk, now) + _bytes_out(plan, block) / bandwidths.nvme_write
        done.append(block.id)
    return _Ahead(frozenset(done), taken, max(0.0, disk - end - taken))


def _bytes_in(plan: Plan, block: BlockBytes) -> int:
    """From the disk, for an update in backward: a gradient that is there is read again."""
    is_there = plan.shards[block.chunk].grad_home is Tier.NVME
    return block.disk_bytes + (block.param_bytes if is_there else 0)


def _bytes_out(plan: Plan, block: BlockBytes) -> int:
    """To the disk: parameters that live there are written with their state."""
    return block.held_on(Tier.NVME) + (block.param_bytes if _is_whole(plan, block) else 0)


def _is_whole(plan: Plan, block: BlockBytes) -> bool:
    """Whether an update in backward leaves nothing to the step."""
    return plan.shards[block.chunk].param_home is Tier.NVME


@dataclass(frozen=True, slots=True)
class _Pass:
    """Forward and backward, in seconds from their begin."""

    # blocks on disk that no step reads ahead, and when their gradient is final, in this order
    final: tuple[tuple[BlockBytes, float], ...]
    transfers: tuple[tuple[float, float], ...]  # of backward and the disk: when, and how long
    disk_free: float  # when what is read ahead is there
    end: float


def _pass(
    plan: Plan,
    bandwidths: Bandwidths,
    compute_seconds: Sequence[float],
    calls: Calls,
    backward: int,
) -> _Pass:
    total = plan.num_trace_moments
    own = [m for m in plan.forecast.moves if m.begin < total and m.kind is not MoveKind.STATE]
    walk = Walk(replace(plan, forecast=replace(plan.forecast, moves=tuple(own))), bandwidths)
    begins = []  # of every moment
    for moment in range(total):
        walk.exchange(moment, walk.move(moment))
        walk.reach(moment)
        begins.append(walk.now)
        walk.compute(compute_seconds[moment])
    walk.reach(total)
    begins.append(walk.now)
    within = _final_within_calls(plan, calls, begins)
    reads = [m for m in plan.forecast.moves if _is_read(m) and m.begin < total]
    read_ahead = {move.block for move in reads}
    there = begins[backward] + sum(move.nbytes for move in reads) / bandwidths.nvme_read
    found: list[tuple[BlockBytes, float]] = []
    for reduction in plan.forecast.reductions:
        sizes, shard = plan.chunks[reduction.chunk], plan.shards[reduction.chunk]
        final = reduction.end if sizes.reduces else reduction.last
        if final < total:  # else the step's
            at = begins[final] if sizes.reduces else within.get((final, sizes.id), begins[final])
            found += [
                (block, at)
                for block, home in zip(sizes.blocks, shard.state_homes, strict=True)
                if home is Tier.NVME and block.id not in read_ahead
            ]
    transfers = [
        (begins[move.begin], link_seconds(move.src, move.dst, move.nbytes, bandwidths, False))
        for move in own
        if move.begin >= backward
    ]
    return _Pass(
        tuple(sorted(found, key=lambda pair: pair[1])),
        tuple((at, links["nvme"]) for at, links in transfers if "nvme" in links),
        there,
        walk.now,
    )


def _final_within_calls(
    plan: Plan, calls: Calls, begins: Sequence[float]
) -> dict[tuple[int, ChunkId], float]:
    """By the moment behind a call, and chunk. A call of many chunks, as of a whole module, is done
    with them one after the other, and its backward with the last one first."""
    found: dict[tuple[int, ChunkId], float] = {}
    for moment, used in enumerate(calls):
        total = sum(plan.chunks[chunk].payload_bytes for chunk in used or ())
        done = 0
        for chunk in sorted(used or (), reverse=True):
            done += plan.chunks[chunk].payload_bytes
            seconds = begins[moment + 1] - begins[moment]
            found[moment + 1, chunk] = begins[moment] + seconds * done / total
    return found


def _is_read(move: Move) -> bool:
    return move.kind is MoveKind.STATE and move.src is Tier.NVME


def _moves_left(plan: Plan, done: frozenset[BlockId]) -> tuple[Move, ...]:
    """Without what was moved before: of a block that is held a step reads its new weights, or its
    new masters, where those are not written."""
    blocks = {block.id: block for chunk in plan.chunks for block in chunk.blocks}
    left = []
    for move in plan.forecast.moves:
        if move.block not in done:
            left.append(move)
        elif _is_read(move) and not _is_whole(plan, blocks[move.block]):
            block = blocks[move.block]
            again = block.beside_bytes or Bytes(block.numel * FP32_BYTES)
            left.append(replace(move, nbytes=again))
    return tuple(left)
