"""What an iteration costs: bytes over measured bandwidths, with what runs beside what. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from .plan import Move, MoveKind, Plan, UpdatePath
from .problem import Homes, Tiers, state_parts
from .sizes import FP32_BYTES, Bandwidths, ChunkBytes
from .tiers import Tier

Seconds = dict[str, float]  # by resource
LINKS = ("host_to_device", "device_to_host", "nvme", "collective")


@dataclass(frozen=True, slots=True)
class StepCost:
    """One iteration as predicted."""

    seconds: float
    stall_seconds: float  # computing waited for a link
    busy: dict[str, float]  # seconds of every resource: links, `compute`, `update`

    @property
    def bound_by(self) -> str:
        """The resource that is busy the longest: with everything overlapped it sets the time."""
        return max(self.busy, key=lambda name: self.busy[name])


def link_seconds(
    src: Tier, dst: Tier, nbytes: int, bandwidths: Bandwidths, has_host_tier: bool
) -> dict[str, float]:
    """Seconds that a transfer occupies every link on its way."""
    seconds = {}
    if src is Tier.NVME:
        seconds["nvme"] = nbytes / bandwidths.nvme_read
    elif dst is Tier.NVME:
        seconds["nvme"] = nbytes / bandwidths.nvme_write
    if has_host_tier and dst is Tier.DEVICE:
        seconds["host_to_device"] = nbytes / bandwidths.host_to_device
    elif has_host_tier and src is Tier.DEVICE:
        seconds["device_to_host"] = nbytes / bandwidths.device_to_host
    return seconds


def update_seconds(
    state_bytes: int, param_bytes: int, path: UpdatePath, bandwidths: Bandwidths
) -> float:
    """Of an update itself: state read and written, gradient read, parameter written."""
    memory = bandwidths.host_memory if path is UpdatePath.CPU else bandwidths.device_memory
    return (2 * state_bytes + 2 * param_bytes) / memory


def update_transfers(
    state_bytes: int,
    param_bytes: int,
    undo_bytes: int,
    *,
    param: Tier,
    grad: Tier,
    state: Tier,
    path: UpdatePath,
    has_master: bool,
) -> list[tuple[MoveKind, Tier, Tier, int]]:
    """What an update moves: (kind, from, to, bytes), first what must come, then what goes.

    `undo_bytes`: of the undo plane, which goes to NVMe with the state where there is no master.
    """
    site = Tier.HOST if path is UpdatePath.CPU else Tier.DEVICE
    moves = []
    if grad is not site:
        moves.append((MoveKind.GRAD, grad, site, param_bytes))
    if param is not site and not has_master:
        moves.append((MoveKind.PARAM, param, site, param_bytes))
    if state is not site and state_bytes:
        moves.append((MoveKind.STATE, state, site, state_bytes))
        moves.append((MoveKind.STATE, site, state, state_bytes))
    if state is Tier.NVME and not has_master:
        moves.append((MoveKind.UNDO, site, state, undo_bytes))
    if param is not site:
        moves.append((MoveKind.PARAM, site, param, param_bytes))
    return moves


def estimate(
    homes: Homes, tiers: Tiers, num_uses: Sequence[int], compute_seconds: float
) -> tuple[float, float]:
    """Seconds of an iteration with these homes, and of all transfers one after the other.

    Without a schedule, and as if everything within forward and backward, and within the step, ran
    beside everything else. The second is what decides between homes that the first finds equal.
    `num_uses`: how often an iteration gathers every chunk.
    """
    bandwidths, world_size = tiers.bandwidths, tiers.world_size
    model: Seconds = {"compute": compute_seconds}
    step: Seconds = {}
    for chunk in tiers.chunks:
        i = chunk.id
        uses = 0 if homes.kept[i] else num_uses[i]
        if homes.param[i] is not Tier.DEVICE:
            nbytes = uses * chunk.shard_bytes
            _add(model, link_seconds(homes.param[i], Tier.DEVICE, nbytes, bandwidths,
                                     tiers.has_host_tier))  # fmt: skip
        if chunk.trainable and homes.grad[i] is not Tier.DEVICE:
            _add(model, link_seconds(Tier.DEVICE, homes.grad[i], chunk.shard_bytes, bandwidths,
                                     tiers.has_host_tier))  # fmt: skip
        wire = chunk.payload_bytes * (world_size - 1) / world_size / bandwidths.collective
        _add(model, {"collective": wire * (max(uses, 1) + chunk.trainable)})
        _add(step, _update_busy(chunk, homes, tiers))
    return (
        max(model.values()) + max(step.values(), default=0.0),
        sum(model.values()) + sum(step.values()),
    )


def _update_busy(chunk: ChunkBytes, homes: Homes, tiers: Tiers) -> Seconds:
    """Seconds of every resource for one chunk's update."""
    spent: Seconds = {}
    i = chunk.id
    for home, (state_bytes, param_bytes) in state_parts(chunk, homes.state[i]):
        taken = UpdatePath.RESIDENT if home is Tier.DEVICE else tiers.off_device
        block = chunk.blocks[0]
        undo_bytes = param_bytes * block.numel * FP32_BYTES // block.param_bytes
        for _, src, dst, nbytes in update_transfers(
            state_bytes, param_bytes, undo_bytes,
            param=homes.param[i], grad=homes.grad[i], state=home, path=taken,
            has_master=tiers.state.has_master,
        ):  # fmt: skip
            _add(spent, link_seconds(src, dst, nbytes, tiers.bandwidths, tiers.has_host_tier))
        name = "host_memory" if taken is UpdatePath.CPU else "device_memory"
        _add(spent, {name: update_seconds(state_bytes, param_bytes, taken, tiers.bandwidths)})
    return spent


def _add(total: Seconds, more: Seconds) -> None:
    for name, seconds in more.items():
        total[name] = total.get(name, 0.0) + seconds


def predict_step(plan: Plan, bandwidths: Bandwidths, compute_seconds: Sequence[float]) -> StepCost:
    """Walk through the plan: links work in the order of issue, computing waits for what it needs.

    `compute_seconds`: of every moment of the trace.
    """
    free_at = dict.fromkeys(LINKS, 0.0)
    busy: Seconds = dict.fromkeys((*LINKS, "compute", "update"), 0.0)
    due: dict[int, float] = {}  # when what must have ended at a moment has
    blocks = {block.id: block for chunk in plan.chunks for block in chunk.blocks}
    forecast = plan.forecast
    paths = {
        block.id: plan.path_of(home)
        for chunk, shard in zip(plan.chunks, plan.shards, strict=True)
        for block, home in zip(chunk.blocks, shard.state_homes, strict=True)
    }
    moves_at: dict[int, list[Move]] = {}
    for move in forecast.moves:
        moves_at.setdefault(move.begin, []).append(move)
    wires_at: dict[int, list[tuple[int, int]]] = {}
    share = (plan.world_size - 1) / plan.world_size
    if plan.world_size > 1:
        for gather in plan.gathers:
            wires_at.setdefault(gather.begin, []).append((gather.chunk, gather.use))
        for reduction in forecast.reductions:
            wires_at.setdefault(reduction.last, []).append((reduction.chunk, reduction.end))
    now = 0.0
    for moment in range(plan.num_moments + 1):
        arrived: dict[int, float] = {}
        for move in moves_at.get(moment, ()):
            start = now
            spent = link_seconds(move.src, move.dst, move.nbytes, bandwidths, plan.has_host_tier)
            for link in spent:
                start = max(start, free_at[link])
            done = start + max(spent.values(), default=0.0)
            for link, seconds in spent.items():
                free_at[link] = start + seconds
                busy[link] += seconds
            due[move.end] = max(due.get(move.end, 0.0), done)
            arrived[move.chunk] = done
        for chunk, end in wires_at.get(moment, ()):
            seconds = plan.chunks[chunk].payload_bytes * share / bandwidths.collective
            done = max(now, free_at["collective"], arrived.get(chunk, 0.0)) + seconds
            free_at["collective"] = done
            busy["collective"] += seconds
            due[end] = max(due.get(end, 0.0), done)
        now = max(now, due.pop(moment, 0.0))
        if moment < plan.num_trace_moments:
            now += compute_seconds[moment]
            busy["compute"] += compute_seconds[moment]
            continue
        position = moment - plan.num_trace_moments
        if position < len(forecast.step_order):
            ids = [forecast.step_order[position]]
        elif moment == plan.resident_moment:
            ids = [b for b, path in paths.items() if path is UpdatePath.RESIDENT]
        else:
            ids = []
        seconds = sum(
            update_seconds(blocks[b].state_bytes, blocks[b].param_bytes, paths[b], bandwidths)
            for b in ids
        )
        now += seconds
        busy["update"] += seconds
    total = max(now, *free_at.values())
    return StepCost(total, total - busy["compute"] - busy["update"], dict(busy))


def compute_seconds_of(
    seconds: Sequence[float], weights: Sequence[int], total_flops: float, flops: float
) -> list[float]:
    """Seconds of every moment: as timed, else `total_flops` spread in proportion to `weights`."""
    if any(seconds):
        return list(seconds)
    all_weights = sum(weights)
    if not all_weights or flops == inf:
        return [0.0] * len(weights)
    return [total_flops / flops * weight / all_weights for weight in weights]
