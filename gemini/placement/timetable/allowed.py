"""Whether updates may overlap a pass: one table of rules, each with its reason. Pure.

A tail goes on during the next forward, early updates are made in backward (ADR 0002). Where a rule
is against one, the other is left, or a step does all.

A rule is there because nothing could be gained, or no memory is left (`RULES`, `EARLY_RULES`), or
because nobody has built it (`NOT_MADE`, `NO_TAIL_MADE`, `NOT_MADE_EARLY`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gemini.placement.plan import Plan
from gemini.placement.sizes import UNLIMITED
from gemini.placement.tiers import Tier
from gemini.units import BUFFERS_AHEAD, WINDOW, ChunkId

from .updates import BOTH, SERIAL, SPECULATE, TAIL, goes_on, is_early

NO_ROOM = "gradients that live into a forward have no room on the device"
NO_BUFFERS = "its budget has no room for blocks of files under way"


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapFacts:
    """Facts of a plan and a run that the rules look at; the same on all ranks."""

    state_homes: frozenset[Tier]
    has_files: bool  # some parameters or gradients live on NVMe
    has_buffers: bool  # for blocks that are updated after their step
    has_room: bool  # on the device, for gradients that live into the next forward
    # of a run: a plan knows none of these
    is_gathered: bool = False
    is_stage: bool = False
    is_split: bool = False
    is_joint: bool = False
    needs_wholes: bool = False
    has_masters: bool = True
    by_kernels: bool = False  # of a device update every element alike


Rule = tuple[str, Callable[[OverlapFacts], bool]]
RULES: tuple[Rule, ...] = (
    ("all state is on the device", lambda f: f.state_homes <= {Tier.DEVICE}),
    (NO_BUFFERS, lambda f: f.has_files and not f.has_buffers),
    (NO_ROOM, lambda f: not f.has_room),
)  # fmt: skip
# where the host updates, an update and a backward have the same cores; a norm over a parameter, or
# a product of matrices, needs gradients that are not there
EARLY_RULES: tuple[Rule, ...] = (
    ("no state is in host memory", lambda f: Tier.HOST not in f.state_homes),
    ("no kernels of a device update every element alike", lambda f: not f.by_kernels),
)
NOT_MADE: tuple[Rule, ...] = (
    ("the module is a part of a pipeline", lambda f: f.is_stage),
    ("torch has split parameters", lambda f: f.is_split),
    ("its optimizer steps several modules", lambda f: f.is_joint),
)
NO_TAIL_MADE: tuple[Rule, ...] = (
    # what is kept gathered over ranks is gathered again by the step itself: a tail would need a
    # group of its own for it
    ("chunks are kept gathered", lambda f: f.is_gathered),
    ("its optimizer updates parameters as a whole", lambda f: f.needs_wholes),
)
NOT_MADE_EARLY: tuple[Rule, ...] = (
    ("its weights have no masters", lambda f: not f.has_masters),
)  # fmt: skip


def _first(rules: Sequence[Rule], facts: OverlapFacts) -> str | None:
    return next((reason for reason, holds in rules if holds(facts)), None)


def against_tail(facts: OverlapFacts) -> str | None:
    """Rule that is against a tail; None: none is."""
    return _first((*RULES, *NOT_MADE, *NO_TAIL_MADE), facts)


def against_early(facts: OverlapFacts) -> str | None:
    """Rule that is against updates in backward; None: none is."""
    return _first((*EARLY_RULES, *NOT_MADE, *NOT_MADE_EARLY), facts)


def against(update: str, facts: OverlapFacts) -> str | None:
    """Rule that is against an `update`, or against a part of it; None: none is."""
    reason = against_tail(facts) if goes_on(update) else None
    return reason or (against_early(facts) if is_early(update) else None)


def allowed(update: str, facts: OverlapFacts) -> str:
    """An `update` as the rules leave it: the parts of it that none is against, or `SERIAL`."""
    tail = goes_on(update) and against_tail(facts) is None
    if is_early(update) and against_early(facts) is None:
        return BOTH if tail else SPECULATE
    return TAIL if tail else SERIAL


def facts_of(
    plan: Plan,
    totals: Sequence[int],
    calls: Sequence[Sequence[ChunkId] | None],
    backward: int,
    *,
    has_buffers: bool,
) -> OverlapFacts:
    """Facts of a plan.

    totals: bytes of the device that its budget is for, at every moment.
    calls: by moment the chunks of the call that begins. backward: its first moment.
    """
    has_room = plan.budgets.device >= UNLIMITED
    if not has_room:
        kept = kept_for_updates(plan, calls, backward)
        most = max((a + b for a, b in zip(kept, totals, strict=False)), default=0)
        has_room = most <= plan.budgets.device
    return OverlapFacts(
        state_homes=frozenset(home for shard in plan.shards for home in shard.state_homes),
        has_files=any(Tier.NVME in (shard.param_home, shard.grad_home) for shard in plan.shards),
        has_buffers=has_buffers,
        has_room=has_room,
    )


def kept_for_updates(
    plan: Plan, calls: Sequence[Sequence[ChunkId] | None], backward: int
) -> list[int]:
    """Bytes on the device, at every moment of forward, of gradients that updates may still need:
    until a call uses their chunk, and so waits for its update."""
    waiting = {
        shard.chunk: plan.chunks[shard.chunk].shard_bytes
        for shard in plan.shards
        if shard.grad_home is Tier.DEVICE
    }
    kept: list[int] = []
    for moment in range(backward):
        kept.append(sum(waiting.values()))
        for chunk in calls[moment] or ():
            waiting.pop(chunk, None)
    return kept


def buffers_ahead(update: str, *, has_masters: bool, has_budgets: bool, streams: bool) -> int:
    """Number of buffers for blocks that are updated after their step: a tail needs them where
    parameters or gradients are in files, as a budget may put them. Where none bounds them, and
    state `streams` to a device and back, they are for blocks that leave it together."""
    if not has_masters:
        return 0
    if has_budgets:
        return BUFFERS_AHEAD if goes_on(update) else 0
    return WINDOW - 1 if streams else 0
