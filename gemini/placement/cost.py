"""Cost of an iteration: bytes over measured bandwidths, where links, cores and device overlap.
Pure."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from .plan import MoveKind, UpdatePath
from .problem import Homes, PlacementProblem, state_parts
from .sizes import Bandwidths, ChunkBytes
from .tiers import Tier

Seconds = dict[str, float]  # by resource
LINKS = ("host_to_device", "device_to_host", "nvme", "collective")


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
    """Seconds of an update's own memory traffic: state read and written, gradient read, parameter
    written."""
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
    """Transfers of an update as (kind, from, to, bytes): first those to where it runs, then those
    back.

    undo_bytes: written to NVMe with the state where no whole master exists: the parameters of
    before the update, or of after it.
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


def gathered_bytes(chunk: ChunkBytes) -> float:
    """Bytes that each rank receives in a gather."""
    return chunk.payload_bytes * (chunk.num_shards - 1) / chunk.num_shards


def reduced_bytes(chunk: ChunkBytes) -> float:
    """Bytes that each rank receives in a reduction: within a replica, then of a shard across
    replicas."""
    across = chunk.shard_bytes * 2 * (chunk.num_replicas - 1) / chunk.num_replicas
    return gathered_bytes(chunk) + across


def estimate(
    homes: Homes, problem: PlacementProblem, num_uses: Sequence[int], compute_seconds: float
) -> tuple[float, float]:
    """Seconds of an iteration with these homes, and of all its transfers one after the other.

    No schedule is made: everything within forward and backward, and within the step, is taken to
    overlap. The second number decides between homes for which the first is equal.
    num_uses: gathers of every chunk in an iteration.
    """
    bandwidths = problem.bandwidths
    model: Seconds = {"compute": compute_seconds}
    step: Seconds = {}
    for chunk in problem.chunks:
        i = chunk.id
        uses = 0 if homes.never_released[i] else num_uses[i]
        if homes.param[i] is not Tier.DEVICE:
            nbytes = uses * chunk.shard_bytes
            _add(model, link_seconds(homes.param[i], Tier.DEVICE, nbytes, bandwidths,
                                     problem.has_host_tier))  # fmt: skip
        if chunk.trainable and homes.grad[i] is not Tier.DEVICE:
            _add(model, link_seconds(Tier.DEVICE, homes.grad[i], chunk.shard_bytes, bandwidths,
                                     problem.has_host_tier))  # fmt: skip
        wire = gathered_bytes(chunk) * max(uses, 1)
        if chunk.trainable:
            wire += reduced_bytes(chunk)
        _add(model, {"collective": wire / bandwidths.collective})
        _add(step, _update_busy(chunk, homes, problem))
    return (
        max(model.values()) + max(step.values(), default=0.0),
        sum(model.values()) + sum(step.values()),
    )


def _update_busy(chunk: ChunkBytes, homes: Homes, problem: PlacementProblem) -> Seconds:
    """Seconds of every resource for one chunk's update."""
    spent: Seconds = {}
    i = chunk.id
    for home, (state_bytes, param_bytes) in state_parts(chunk, homes.state[i]):
        path = UpdatePath.RESIDENT if home is Tier.DEVICE else problem.off_device
        block = chunk.blocks[0]
        undo_bytes = param_bytes * block.undo_bytes // block.param_bytes
        for _, src, dst, nbytes in update_transfers(
            state_bytes, param_bytes, undo_bytes,
            param=homes.param[i], grad=homes.grad[i], state=home, path=path,
            has_master=block.gives_parameters(home),
        ):  # fmt: skip
            _add(spent, link_seconds(src, dst, nbytes, problem.bandwidths, problem.has_host_tier))
        name = "host_memory" if path is UpdatePath.CPU else "device_memory"
        _add(spent, {name: update_seconds(state_bytes, param_bytes, path, problem.bandwidths)})
    return spent


def _add(total: Seconds, more: Seconds) -> None:
    for name, seconds in more.items():
        total[name] = total.get(name, 0.0) + seconds


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
