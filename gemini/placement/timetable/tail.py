"""What an iteration costs whose update goes on behind the next forward (ADR 0011). Pure.

    serial  forward, backward, update
    tail    max(forward, update) + backward, and more where the forward begins with what is updated
            late

The update of a tail takes the disk, or the link to host memory, beside a forward that does not.
What computes is one processor for both, so a forward takes as much longer as the updates themselves
do, where the link leaves it no time for them; but for updates by the host beside a device.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from gemini.placement.cost import StepCost, Walk
from gemini.placement.plan import Move, MoveKind, Plan, UpdatePath
from gemini.placement.sizes import UNLIMITED, Bandwidths
from gemini.placement.tiers import Tier
from gemini.units import BlockId, ChunkId

Calls = Sequence[Sequence[ChunkId] | None]  # by moment the chunks of the call that begins


@dataclass(frozen=True, slots=True)
class TailCost:
    """Seconds of an iteration as predicted: with a step that has ended when it returns, and with
    one that has a tail."""

    serial_seconds: float
    seconds: float
    update_seconds: float  # the tail: from the first block on disk to the last in memory
    waited_seconds: float  # of these forward and backward wait for so many
    held_bytes: tuple[int, ...]  # of gradients that blocks still need, at every moment of forward

    @property
    def hidden_seconds(self) -> float:
        """Of the tail, behind the pass."""
        return max(0.0, self.update_seconds - self.waited_seconds)

    def __str__(self) -> str:
        return said(self.update_seconds, self.waited_seconds)

    @property
    def saved_seconds(self) -> float:
        """Of an iteration, by a tail; below zero where it would take longer."""
        return self.serial_seconds - self.seconds


def said(update_seconds: float, waited_seconds: float) -> str:
    """In words, what of an update is hidden and what is waited for, as predicted or as measured."""
    hidden = max(0.0, update_seconds - waited_seconds)
    return (
        f"{update_seconds:.3g} s: {hidden:.3g} s hidden during the next forward, "
        f"{waited_seconds:.3g} s waited for"
    )


def homes_against_tail(plan: Plan) -> str | None:
    """What in a plan's homes is against a tail; None: they let a step have one."""
    on_host = plan.blocks_on(Tier.HOST)
    found = {
        "all state is on the device": not (on_host or plan.blocks_on(Tier.NVME)),
        "the device has memory of its own, and parameters or gradients are on NVMe": (
            plan.has_host_tier and _has_files(plan)
        ),
        "the device has memory of its own, and state is only on NVMe": (
            plan.has_host_tier and not on_host
        ),
    }
    return next((reason for reason, holds in found.items() if holds), None)


def _has_files(plan: Plan) -> bool:
    """Whether some parameters or gradients live there."""
    return any(Tier.NVME in (shard.param_home, shard.grad_home) for shard in plan.shards)


NO_ROOM = "gradients that live into a forward have no room on the device"
NO_BUFFERS = "its budget has no room for blocks of files under way"


def against_tail(
    plan: Plan, totals: Sequence[int], calls: Calls, backward: int, *, has_buffers: bool
) -> str | None:
    """What in a plan is against a tail; None: nothing.

    totals: bytes of the device that its budget is for, at every moment. has_buffers: there is room
    for a thread's own, for parameters and gradients in files. The rest as of `price_tail`.
    """
    reason = homes_against_tail(plan)
    if reason is None and _has_files(plan) and not has_buffers:
        return NO_BUFFERS
    if reason is not None or plan.budgets.device >= UNLIMITED:
        return reason
    held = held_at_most(plan, calls, backward)
    most = max((a + b for a, b in zip(held, totals, strict=False)), default=0)
    return NO_ROOM if most > plan.budgets.device else None


def held_at_most(plan: Plan, calls: Calls, backward: int) -> list[int]:
    """Bytes of the device at every moment of forward, of gradients that updates may still need:
    until a call uses their chunk, which waits for them. Where the device has memory of its own,
    those in host memory; else all, as a thread updates them."""
    held = {
        shard.chunk: plan.chunks[shard.chunk].shard_bytes
        for shard in plan.shards
        if shard.grad_home is Tier.DEVICE
        and (Tier.HOST in shard.state_homes or not plan.has_host_tier)
    }
    found: list[int] = []
    for moment in range(backward):
        found.append(sum(held.values()))
        for chunk in calls[moment] or ():
            held.pop(chunk, None)
    return found


def price_tail(
    plan: Plan,
    bandwidths: Bandwidths,
    compute_seconds: Sequence[float],
    calls: Calls,
    backward: int,
    serial: StepCost,
    *,
    done: Collection[BlockId] = frozenset(),
    disk_busy: float = 0.0,
) -> TailCost | None:
    """Walk through the pass beside the tail of the step before it.

    compute_seconds, calls: of every moment of the trace. backward: the first moment of it. serial:
    of the same plan. done, disk_busy: as of `predict_step`. None where homes are against a tail, in
    evaluation, and where nothing is known of how long a forward takes.
    """
    is_known = any(compute_seconds[:backward])
    if plan.kind != "train" or not is_known or homes_against_tail(plan) is not None:
        return None
    bare = Walk(_of_pass(plan), bandwidths)
    begins = 0.0
    for moment in range(plan.num_trace_moments):
        if moment == backward:
            begins = bare.now
        bare.exchange(moment, bare.move(moment))
        bare.reach(moment)
        bare.compute(compute_seconds[moment])
    bare.reach(plan.num_trace_moments)
    of_step = _with_moves(plan, lambda move: not _is_of_pass(plan, move))
    update = _update(plan, Walk(of_step, bandwidths, begins - bare.now, done), disk_busy)
    seconds, held = _beside(plan, bandwidths, compute_seconds, calls, backward, update)
    return TailCost(serial.seconds, seconds, update.walk.now, seconds - bare.end, held)


def _of_pass(plan: Plan) -> Plan:
    """With nothing but what forward and backward move between a CPU's memory and its files."""
    return _with_moves(plan, lambda move: _is_of_pass(plan, move))


def _is_of_pass(plan: Plan, move: Move) -> bool:
    in_files = not plan.has_host_tier and move.kind in (MoveKind.PARAM, MoveKind.GRAD)
    return in_files and move.begin < plan.num_trace_moments


def _with_moves(plan: Plan, keep: Callable[[Move], bool]) -> Plan:
    moves = tuple(move for move in plan.forecast.moves if keep(move))
    return replace(plan, forecast=replace(plan.forecast, moves=moves))


@dataclass(frozen=True, slots=True)
class _Update:
    """A tail from 0 on."""

    walk: Walk  # at its end
    ready: dict[ChunkId, float]  # when every chunk's weights are those of the step
    returned: float  # when `step()` has: where a device's kernels update, the disk comes before


def _update(plan: Plan, update: Walk, disk_busy: float) -> _Update:
    """Walk on from the begin of the backward before it, in which the first blocks are read. What is
    in memory comes behind the disk: first what is on the device, as one, and then what is beside
    it, block by block."""
    total = plan.num_trace_moments
    for moment in range(total):
        update.move(moment)
    update.wait(0.0)
    update.hold_disk(disk_busy)
    updated: dict[BlockId, float] = {}
    on_disk = plan.blocks_on(Tier.NVME)
    returned = 0.0
    for moment, block in enumerate(plan.forecast.step_order, total):
        update.move(moment)  # what the last block on disk has begun, too
        if len(updated) == len(on_disk):
            returned = _update_resident(plan, update, updated)
        update.reach(moment)
        update.update(moment)
        updated[block] = update.now
    for moment in (plan.resident_moment, plan.num_moments):
        update.move(moment)
    if len(updated) == len(on_disk):
        returned = _update_resident(plan, update, updated)
    if plan.has_host_tier:
        update.wait(update.end)
    ready = {
        chunk.id: max(updated[block.id] for block in chunk.blocks)
        for chunk in plan.chunks
        if chunk.blocks
    }
    waits = on_disk and plan.has_host_tier and plan.off_device is UpdatePath.STREAM
    return _Update(update, ready, returned if waits else 0.0)


def _update_resident(plan: Plan, update: Walk, updated: dict[BlockId, float]) -> float:
    """Behind the disk, whose blocks count by then. When that was."""
    update.wait(update.end if updated else update.now)
    begun = update.now
    update.update(plan.resident_moment)
    for block in plan.blocks_on(Tier.DEVICE):
        updated[block] = update.now
    return begun


def _beside(
    plan: Plan,
    bandwidths: Bandwidths,
    compute_seconds: Sequence[float],
    calls: Calls,
    backward: int,
    update: _Update,
) -> tuple[float, tuple[int, ...]]:
    """Seconds of a pass whose calls wait for their chunks, as gathers do but for those of files
    alone, and whose backward waits for all; and gradients that live into it. A call of many chunks,
    as of a whole module, uses them one after the other."""
    ready, held = update.ready, []
    read = {
        shard.chunk
        for shard in plan.shards
        if shard.param_home is Tier.NVME and plan.chunks[shard.chunk].num_shards == 1
    }
    on_device = {shard.chunk for shard in plan.shards if shard.grad_home is Tier.DEVICE}
    walk = Walk(_of_pass(plan), bandwidths)
    walk.wait(update.returned)
    shared = 0.0 if plan.off_device is UpdatePath.CPU else update.walk.busy["update"]
    gathers: dict[int, list[ChunkId]] = {}
    for gather in plan.gathers:
        gathers.setdefault(gather.begin, []).append(gather.chunk)
    for moment in range(plan.num_trace_moments):
        if moment == backward:
            disk = walk.busy["nvme"]
            if disk:  # the one that the update has, but for what was read in the backward before
                disk += min(update.walk.now, update.walk.busy["nvme"])
            walk.wait(max(update.walk.now, walk.busy["compute"] + shared, disk))
        for chunk in gathers.get(moment, ()):
            if chunk not in read:
                walk.wait(ready.get(chunk, 0.0))
        walk.exchange(moment, walk.move(moment, ready))
        walk.reach(moment)
        if moment < backward:
            late = [chunk for chunk, at in ready.items() if at > walk.now and chunk in on_device]
            held.append(sum(plan.chunks[chunk].shard_bytes for chunk in late))
        used = calls[moment] or ()
        nbytes = sum(plan.chunks[chunk].payload_bytes for chunk in used)
        for chunk in used:
            walk.wait(ready.get(chunk, 0.0))
            walk.compute(compute_seconds[moment] * plan.chunks[chunk].payload_bytes / nbytes)
        if not used:
            walk.compute(compute_seconds[moment])
    walk.reach(plan.num_trace_moments)
    return walk.end, tuple(held)
