"""When blocks are updated: what `update=` may be, what is against it, and which is best. Pure.

serial     all in `step()`
tail       after the step, during the next forward (ADR 0011)
speculate  in backward, and the rest in `step()` (ADR 0013)
both       in backward, and the rest during the next forward
auto       the best of these for the plan
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gemini.placement.plan import Plan
from gemini.placement.sizes import UNLIMITED
from gemini.placement.tiers import Tier
from gemini.units import ChunkId

UPDATES = ("serial", "tail", "speculate", "both")  # the simplest first
AUTO = "auto"
BEHIND, IN_BACKWARD = ("tail", "both"), ("speculate", "both")
SAME_SECONDS = 0.02  # of an iteration: no prediction tells them apart

NO_ROOM = "gradients that live into a forward have no room on the device"
NO_BUFFERS = "its budget has no room for blocks of files under way"


@dataclass(frozen=True, slots=True)
class OverlapCost:
    """An iteration as predicted, whose updates overlap its pass."""

    seconds: float
    update_seconds: float  # from the call of `step()` until all is updated
    waited_seconds: float  # by so much the pass is longer than without updates
    num_early: int  # blocks on NVMe that are updated in backward
    held_bytes: tuple[int, ...]  # of gradients that blocks still need, at every moment of forward

    @property
    def hidden_seconds(self) -> float:
        """Of the update, during the next pass."""
        return max(0.0, self.update_seconds - self.waited_seconds)

    def __str__(self) -> str:
        return said(self.update_seconds, self.waited_seconds)


def said(update_seconds: float, waited_seconds: float) -> str:
    """In words, what of an update is hidden and what is waited for, as predicted or as measured."""
    hidden = max(0.0, update_seconds - waited_seconds)
    return (
        f"{update_seconds:.3g} s: {hidden:.3g} s hidden during the next forward, "
        f"{waited_seconds:.3g} s waited for"
    )


def blocks_in_words(num_early: int, num_blocks: int) -> str:
    """Blocks that are updated in backward, as predicted or as measured."""
    return f"{num_early} of {num_blocks} blocks on NVMe"


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


def against_tail(
    plan: Plan,
    totals: Sequence[int],
    calls: Sequence[Sequence[ChunkId] | None],
    backward: int,
    *,
    has_buffers: bool,
) -> str | None:
    """What in a plan is against a tail; None: nothing.

    totals: bytes of the device that its budget is for, at every moment. has_buffers: there is room
    for a thread's own, for parameters and gradients in files. calls: by moment the chunks of the
    call that begins. backward: the first moment of it.
    """
    reason = homes_against_tail(plan)
    if reason is None and _has_files(plan) and not has_buffers:
        return NO_BUFFERS
    if reason is not None or plan.budgets.device >= UNLIMITED:
        return reason
    held = held_at_most(plan, calls, backward)
    most = max((a + b for a, b in zip(held, totals, strict=False)), default=0)
    return NO_ROOM if most > plan.budgets.device else None


def held_at_most(plan: Plan, calls: Sequence[Sequence[ChunkId] | None], backward: int) -> list[int]:
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


def best_update(seconds: Mapping[str, float]) -> str:
    """The simplest that takes no longer than any other, as far as a prediction tells them apart."""
    least = min(seconds.values()) * (1 + SAME_SECONDS)
    return next(name for name in UPDATES if name in seconds and seconds[name] <= least)


def priced_in_words(seconds: Mapping[str, float]) -> str:
    """Every price, and the choice."""
    prices = ", ".join(f"{name} {seconds[name]:.3g} s" for name in UPDATES if name in seconds)
    return f'an iteration as predicted: {prices}; best is update="{best_update(seconds)}"'
