"""Cost of an iteration: bytes over measured bandwidths, where links, cores and device overlap.
Pure."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import replace
from itertools import islice

from gemini.units import ChunkId

from .plan import MoveKind, SavedHomes, UpdatePath
from .problem import Homes, PlanInputs, step_order
from .sizes import Bandwidths, BlockBytes, ChunkBytes
from .tiers import Tier

Seconds = dict[str, float]  # by resource
LINKS = ("host_to_device", "device_to_host", "nvme", "collective")
_SUMMED = ("numel", "param_bytes", "state_bytes", "disk_bytes", "undo_bytes")


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
    state_bytes: float, param_bytes: float, path: UpdatePath, bandwidths: Bandwidths
) -> float:
    """Seconds of an update's own memory traffic: state read and written, gradient read, parameter
    written."""
    memory = bandwidths.host_memory if path is UpdatePath.CPU else bandwidths.device_memory
    return (2 * state_bytes + 2 * param_bytes) / memory


def update_transfers(
    block: BlockBytes, state: Tier, *, param: Tier, grad: Tier, path: UpdatePath
) -> list[tuple[MoveKind, Tier, Tier, int]]:
    """Transfers of a block's update as (kind, from, to, bytes): first those to where it runs, then
    those back. state, param, grad: homes."""
    site = Tier.HOST if path is UpdatePath.CPU else Tier.DEVICE
    param_bytes, state_bytes = block.param_bytes, block.state_on(state)
    has_master = block.gives_parameters(state)
    moves: list[tuple[MoveKind, Tier, Tier, int]] = []
    if grad is not site:
        moves.append((MoveKind.GRAD, grad, site, param_bytes))
    if param is not site and not has_master:
        moves.append((MoveKind.PARAM, param, site, param_bytes))
    if state is not site and state_bytes:
        moves.append((MoveKind.STATE, state, site, state_bytes))
        moves.append((MoveKind.STATE, site, state, state_bytes))
    if state is Tier.NVME and not has_master:
        moves.append((MoveKind.UNDO, site, state, block.undo_bytes))
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


def bounds(
    homes: Homes,
    problem: PlanInputs,
    num_uses: Sequence[int],
    compute_seconds: float,
    trained: Container[ChunkId],
    forward_seconds: float = 0.0,
) -> tuple[float, float]:
    """Bounds of the seconds of a serial iteration in these homes: none is shorter, none longer.

    No schedule is made. At least: within a pass, and within a step, everything overlaps, and a
    chunk that the step changes is gathered once. At most: one transfer goes on at a time, and no
    payload is kept between its uses.
    num_uses: gathers of every chunk, where none is kept. trained: chunks that the step changes.
    forward_seconds: of those that a pass computes.
    """
    links, has_host_tier = problem.bandwidths, problem.has_host_tier
    in_pass: Seconds = {"compute": compute_seconds}
    in_step: Seconds = {"update": 0.0}
    most = compute_seconds
    for chunk in problem.chunks:
        param, grad, states = homes.param[chunk.id], homes.grad[chunk.id], homes.state[chunk.id]
        gather = {"collective": gathered_bytes(chunk) / links.collective}
        if param is not Tier.DEVICE:
            gather |= link_seconds(param, Tier.DEVICE, chunk.shard_bytes, links, has_host_tier)
        uses = num_uses[chunk.id]
        most += uses * sum(gather.values())
        if chunk.id not in trained:
            continue
        _add(in_pass, gather, min(uses, 1))
        reduction = {"collective": reduced_bytes(chunk) / links.collective}
        if grad is not Tier.DEVICE:
            reduction |= link_seconds(Tier.DEVICE, grad, chunk.shard_bytes, links, has_host_tier)
        _add(in_pass, reduction)
        most += sum(reduction.values())
        if problem.streams:
            _add(in_step, {"update": chunk.shard_bytes / links.device_memory})  # for their norm
        for home, block in _parts(chunk, states):
            path = UpdatePath.RESIDENT if home is Tier.DEVICE else problem.off_device
            for _, src, dst, n in update_transfers(block, home, param=param, grad=grad, path=path):
                _add(in_step, link_seconds(src, dst, n, links, has_host_tier))
            seconds = update_seconds(block.state_on(home), block.param_bytes, path, links)
            _add(in_step, {"update": seconds})
    most += sum(in_step.values())
    ahead = islice(step_order(problem.chunks, homes.state), problem.depth if trained else 0)
    for block, home in ahead:  # their state is there when the step begins
        if home is Tier.NVME or problem.off_device is UpdatePath.STREAM:
            there = Tier.HOST if problem.off_device is UpdatePath.CPU else Tier.DEVICE
            nbytes = block.state_on(home)
            _add(in_step, link_seconds(home, there, nbytes, links, has_host_tier), -1)
    least = max(in_pass.values())
    if homes.saved is not None:
        out, back = _saved_seconds(homes.saved, links, has_host_tier)
        _add(in_pass, out)
        _add(in_pass, back)
        forward = max([forward_seconds, *out.values()])
        backward = max([compute_seconds - forward_seconds, *back.values()])
        least = max([*in_pass.values(), forward + backward])
        most += sum(out.values()) + sum(back.values())
    return least + max(in_step.values()), most


def _saved_seconds(
    saved: SavedHomes, links: Bandwidths, has_host_tier: bool
) -> tuple[Seconds, Seconds]:
    """Seconds of the links in forward, as saved bytes leave the device, and in backward."""
    out, back = Seconds(), Seconds()
    for tier, nbytes in ((Tier.HOST, saved.host_bytes), (Tier.NVME, saved.nvme_bytes)):
        if nbytes:
            _add(out, link_seconds(Tier.DEVICE, tier, nbytes, links, has_host_tier))
            _add(back, link_seconds(tier, Tier.DEVICE, nbytes, links, has_host_tier))
    return out, back


def _parts(chunk: ChunkBytes, states: Sequence[Tier]) -> Iterator[tuple[Tier, BlockBytes]]:
    """Blocks of a chunk joined by home; those that give parameters and those that do not are
    apart."""
    parts: dict[tuple[Tier, bool], list[BlockBytes]] = {}
    for block, home in zip(chunk.blocks, states, strict=True):
        parts.setdefault((home, block.gives_parameters(home)), []).append(block)
    for (home, _), blocks in parts.items():
        sums = {name: sum(getattr(block, name) for block in blocks) for name in _SUMMED}
        yield home, replace(blocks[0], **sums)


def _add(total: Seconds, more: Seconds, times: int = 1) -> None:
    for name, seconds in more.items():
        total[name] = total.get(name, 0.0) + times * seconds
