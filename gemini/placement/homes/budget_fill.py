"""Filling the tiers under their budgets. Pure.

The device is filled under the room of every moment: the budget less activations, gathered payloads
and gradient buffers. A gradient needs room only from its reduction to the step, when activations
are gone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gemini.placement.plan import Staging, UpdatePath
from gemini.placement.problem import Homes, PlanInputs
from gemini.placement.sizes import SMALLER_CHUNKS, BudgetError, ChunkBytes
from gemini.placement.tiers import Tier
from gemini.placement.timetable.room import Demand, DeviceRoom
from gemini.units import MIN_BLOCK_NUMEL, ChunkId


def fill(problem: PlanInputs, demand: Demand, order: str) -> Homes:
    """Fill the device in `order` (a word of `p`, `g` and `s`), then the host, then NVMe.

    Raises BudgetError with the bytes that are missing.
    """
    try:
        return _fill(problem, demand, order)
    except BudgetError as error:
        if (
            problem.has_host_tier
            or problem.fixed_params is not None
            or error.tier is not Tier.DEVICE
        ):
            raise
    # A parameter in memory whose state is on NVMe needs a buffer to undo a step, one on NVMe does
    # not: without parameters on the device, staging is smaller and may fit.
    return _fill(problem, demand, order.replace("p", ""))


def _fill(problem: PlanInputs, demand: Demand, order: str) -> Homes:
    below = problem.below()
    lowest = problem.lowest(below)
    if problem.has_host_tier and host_overflows(problem, lowest):
        lowest = problem.lowest(Tier.NVME)
    _force_onto_nvme(problem, lowest)
    device_staging, _ = problem.staging(lowest)
    if not problem.has_host_tier and problem.fixed_params is None and "p" in order:
        device_staging, _ = problem.staging(problem.lowest(Tier.NVME), params_may_promote=True)
    # Staging comes first: the lowest homes ask for the largest buffers, and what is promoted from
    # them needs no more. Prefetched payloads are given up before a plan fails.
    room = demand.room(problem, prefetch=True)
    room.reserve(device_staging.nbytes)
    if room.left.min() < 0:
        room = demand.room(problem, prefetch=False)
        room.reserve(device_staging.nbytes)
        _check_floor(problem, demand, room, device_staging)
    homes = problem.lowest(below)
    _force_onto_nvme(problem, homes)
    _take_what_is_there(problem, homes, room)
    forced = _forced_blocks(problem)
    for kind in order:
        for chunk in _in_order(problem):
            i = chunk.id
            may_promote = problem.fixed_params is None and homes.param[i] is not Tier.DEVICE
            if (
                kind == "p"
                and may_promote
                and problem.may_be_here("param", i)
                and room.take_param(chunk)
            ):
                homes.param[i] = Tier.DEVICE
            if kind == "s" and chunk.trainable:
                free = [
                    b
                    for b, home in enumerate(homes.state[i])
                    if home is below and problem.may_be_here("state", i, b)
                ]
                if not problem.has_host_tier:
                    free = free[forced[i] :]
                out = room.take_run([chunk.blocks[b].state_bytes for b in free])
                for b in free[out:]:
                    homes.state[i][b] = Tier.DEVICE
            if kind == "g" and chunk.trainable and homes.grad[i] is not Tier.DEVICE:
                on_cpu = problem.off_device is UpdatePath.CPU
                on_cpu = on_cpu and any(home is below for home in homes.state[i])
                if not on_cpu and room.take_grad(chunk):
                    homes.grad[i] = Tier.DEVICE
    if problem.has_host_tier:
        _spill_host(problem, homes)
    may_move = problem.fixed_params is None and problem.ceiling is None
    _join_on_nvme(problem, homes, room, "p" in order and may_move)
    homes.device_staging, homes.host_staging = problem.staging(homes)
    check_nvme(problem, homes)
    return homes


def _in_order(problem: PlanInputs) -> Sequence[ChunkBytes]:
    """Chunks in the order in which they take room.

    Where nothing is trained, each is read once an iteration, so that what rises saves its own bytes
    and no more; but what stays below passes through buffers as large as the largest of it: large
    ones come first.
    """
    if any(chunk.trainable for chunk in problem.chunks):
        return problem.chunks
    return sorted(problem.chunks, key=lambda chunk: (-chunk.payload_bytes, chunk.id))


def check_nvme(problem: PlanInputs, homes: Homes) -> None:
    """Raises BudgetError where files would take more than there is for them."""
    used = problem.nvme_bytes(homes)
    if used > problem.budgets.nvme:
        raise BudgetError.missing(
            Tier.NVME, used - problem.budgets.nvme, problem.budgets.nvme, "what must be on disk",
            "raise nvme_budget, host_budget or device_budget by as much, or use more ranks"
            + problem.fewer_originals(Tier.NVME),
        )  # fmt: skip


def _take_what_is_there(problem: PlanInputs, homes: Homes, room: DeviceRoom) -> None:
    """Take the room of what is on the device already. Raises BudgetError."""
    if problem.fixed_params is None and problem.floor is None:
        return
    for chunk in problem.chunks:
        i = chunk.id
        if homes.param[i] is Tier.DEVICE:
            room.take_param(chunk, forced=True)
        room.reserve(
            sum(
                block.state_bytes
                for block, home in zip(chunk.blocks, homes.state[i], strict=True)
                if home is Tier.DEVICE
            )
        )
        if chunk.trainable and homes.grad[i] is Tier.DEVICE:
            room.take_grad(chunk, forced=True)
    missing = -int(room.left.min())
    if missing > 0:
        raise BudgetError.missing(
            Tier.DEVICE, missing, problem.budgets.device, "the model data that is there already",
            "raise device_budget by as much",
        )  # fmt: skip


def _join_on_nvme(
    problem: PlanInputs, homes: Homes, room: DeviceRoom, params_may_move: bool
) -> None:
    """A chunk with parameters or gradients on NVMe has its state there too.

    Files count before memory changes (ADR 0002), so what is updated in memory may neither be read
    from a file nor written to one. Device room that this gives back goes to what else is on NVMe.
    """

    def split(i: ChunkId) -> bool:
        return Tier.NVME in (homes.param[i], homes.grad[i]) and any(
            tier is not Tier.NVME for tier in homes.state[i]
        )

    torn = [chunk for chunk in problem.chunks if chunk.trainable and split(chunk.id)]
    tried = False  # what did not fit once fits only after room was given back
    # from the last chunk on: homes are filled in order, so the first chunks have the higher ones
    for chunk in reversed(torn):
        i = chunk.id
        if not split(i):
            continue
        given = sum(
            block.state_bytes
            for block, home in zip(chunk.blocks, homes.state[i], strict=True)
            if home is Tier.DEVICE
        )
        room.reserve(-given)
        homes.state[i] = [Tier.NVME for _ in chunk.blocks]
        for other in torn if given or not tried else ():
            j = other.id
            if not split(j):
                continue
            on_nvme = homes.param[j] is Tier.NVME
            if on_nvme and params_may_move and room.take_param(other):
                homes.param[j] = Tier.DEVICE
            if homes.grad[j] is Tier.NVME and room.take_grad(other):
                homes.grad[j] = Tier.DEVICE
        tried = True


def _forced_blocks(problem: PlanInputs) -> list[int]:
    """Number of leading blocks of every chunk that `nvme_state_frac` puts on NVMe."""
    wanted = problem.nvme_state_frac * sum(b.numel for c in problem.chunks for b in c.blocks)
    counts, taken = [0] * len(problem.chunks), 0.0
    for chunk in problem.chunks if wanted else ():
        for block in chunk.blocks:
            if taken + block.numel / 2 > wanted:
                return counts
            taken += block.numel
            counts[chunk.id] += 1
    return counts


def _force_onto_nvme(problem: PlanInputs, homes: Homes) -> None:
    """Put the share of state on NVMe that `nvme_state_frac` asks for."""
    for i, count in enumerate(_forced_blocks(problem)):
        homes.state[i][:count] = [Tier.NVME] * count


def missing_for_everything(problem: PlanInputs, demand: Demand) -> int | None:
    """Bytes that the device lacks to hold all model data; None where some must be on NVMe."""
    if any(_forced_blocks(problem)):
        return None
    room = demand.room(problem, prefetch=False)
    for chunk in problem.chunks:
        room.take_param(chunk, forced=True)
        room.reserve(chunk.state_bytes)
        if chunk.trainable:
            room.take_grad(chunk, forced=True)
    return max(0, -int(room.left.min()))


def host_bytes(problem: PlanInputs, homes: Homes) -> int:
    """Bytes that these homes take of the host, without staging."""
    total = problem.kept_bytes(Tier.HOST)
    for chunk in problem.chunks:
        i = chunk.id
        total += chunk.shard_bytes * (homes.param[i] is Tier.HOST)
        total += chunk.shard_bytes * (chunk.trainable and homes.grad[i] is Tier.HOST)
        for block, home in zip(chunk.blocks, homes.state[i], strict=True):
            total += block.state_bytes * (home is Tier.HOST)
    return total


def host_overflows(problem: PlanInputs, homes: Homes) -> bool:
    """Whether these homes take more of the host than its budget, without staging."""
    return host_bytes(problem, homes) > problem.budgets.host


def _spill_host(problem: PlanInputs, homes: Homes) -> None:
    """Move to NVMe what the host has no room for: state first, then gradients, then parameters.

    A byte of a parameter is read twice an iteration and written once, a byte of the others once
    each. Each of the three kinds on NVMe asks for staging buffers of its own in host memory.
    """
    over = host_bytes(problem, homes) - problem.budgets.host
    uses_nvme = any(Tier.NVME in (homes.param[c.id], homes.grad[c.id], *homes.state[c.id])
                    for c in problem.chunks)  # fmt: skip
    if over <= 0 and not uses_nvme:
        return
    spilled = homes.copy()
    for kind in ("state", "grad", "param"):
        # Staging depends on whether any of a kind is on NVMe, not on how much: it is counted as if
        # all of this kind had moved, and then as few move as do.
        for row, index, _ in _rows_on_host(problem, spilled, kind):
            row[index] = Tier.NVME
        for chunk in problem.chunks:  # as `_join_on_nvme` will have it
            if Tier.NVME in (spilled.param[chunk.id], spilled.grad[chunk.id]):
                spilled.state[chunk.id] = [Tier.NVME for _ in chunk.blocks]
        staging = problem.staging(spilled, params_may_promote=True)[1].nbytes
        over = host_bytes(problem, homes) + staging - problem.budgets.host
        for row, index, nbytes in _rows_on_host(problem, homes, kind):
            if over > 0:
                row[index] = Tier.NVME
                over -= nbytes
        if over <= 0:
            return
    raise BudgetError.missing(
        Tier.HOST, over, problem.budgets.host, "the staging buffers of NVMe",
        "raise host_budget by as much, or lower NvmeConfig.depth"
        + problem.fewer_originals(Tier.HOST),
    )  # fmt: skip


def _rows_on_host(
    problem: PlanInputs, homes: Homes, kind: str
) -> Iterator[tuple[list[Tier], int, int]]:
    """(row, index into it, bytes) of what the host holds of a kind and may give up, in order."""
    for chunk in problem.chunks:
        i = chunk.id
        if kind == "state":
            for b, block in enumerate(chunk.blocks):
                if homes.state[i][b] is Tier.HOST and problem.may_be_lower(kind, i, b):
                    yield homes.state[i], b, block.state_bytes
        elif kind == "param" or chunk.trainable:
            row = homes.param if kind == "param" else homes.grad
            if row[i] is Tier.HOST and problem.may_be_lower(kind, i):
                yield row, i, chunk.shard_bytes


def _check_floor(problem: PlanInputs, demand: Demand, room: DeviceRoom, staging: Staging) -> None:
    """Raises BudgetError where the device cannot hold what must be there at some moment."""
    least = int(room.left.argmin())
    moment, missing = int(room.moments[least]), -int(room.left[least])
    if missing <= 0:
        return
    non_model = int(demand.non_model[moment])
    needs = demand.needs[moment] if moment < len(demand.needs) else ()
    payloads = sum(problem.chunks[chunk].payload_bytes for chunk in needs)
    originals, kept = problem.original_bytes(Tier.DEVICE), problem.kept_bytes(Tier.DEVICE)
    buffers = problem.budgets.device - non_model - payloads - kept - staging.nbytes + missing
    parts = {
        "activations and temporaries": non_model,
        "the chunks in use": payloads,
        "gradient buffers": max(0, buffers),
        "staging": staging.nbytes,
    }
    if originals:
        parts["fp32 originals"] = originals
    average = dict(problem.average).get(Tier.DEVICE, 0)
    if average:
        parts["an average of weights"] = average
    knobs = {
        "activations and temporaries": "use a smaller batch or activation checkpointing",
        "the chunks in use": SMALLER_CHUNKS,
        "gradient buffers": SMALLER_CHUNKS,
        "staging": "lower block_numel, of AutoPlacement or NvmeConfig",
    }
    if all(b.numel <= MIN_BLOCK_NUMEL for chunk in problem.chunks for b in chunk.blocks[:1]):
        del knobs["staging"]  # which is the least already
    largest = max(knobs, key=lambda name: parts[name])
    listed = ", ".join(f"{name} {nbytes}" for name, nbytes in parts.items())
    raise BudgetError.missing(
        Tier.DEVICE, missing, problem.budgets.device, f"moment {moment} (bytes: {listed})",
        f"raise device_budget by as much, or {knobs[largest]}"
        + problem.fewer_originals(Tier.DEVICE),
    )  # fmt: skip
