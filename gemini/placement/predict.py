"""Profile of a plan: how many bytes of which kind are on every tier at every moment. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from gemini.units import Bytes, Moment

from .plan import MoveKind, Plan
from .problem import files_of, store_overhead
from .tiers import Tier

KINDS = ("parameters", "gradients", "state", "originals", "average", "staging", "non-model")
TIERS = (Tier.DEVICE, Tier.HOST, Tier.NVME)


@dataclass(frozen=True, slots=True)
class Profile:
    """Bytes by tier and kind at every moment; the last moment is the end of the iteration."""

    rows: dict[tuple[Tier, str], tuple[int, ...]]

    @property
    def num_moments(self) -> int:
        return len(next(iter(self.rows.values())))

    def total(self, tier: Tier) -> list[int]:
        """Bytes on one tier at every moment."""
        rows = [self.rows[tier, kind] for kind in KINDS]
        return list(map(sum, zip(*rows, strict=True)))

    def peak(self, tier: Tier) -> Bytes:
        return Bytes(max(self.total(tier)))

    def peak_moment(self, tier: Tier) -> Moment:
        totals = self.total(tier)
        return Moment(totals.index(max(totals)))

    def at(self, tier: Tier, moment: int) -> dict[str, int]:
        """Bytes of every kind at one moment."""
        return {kind: self.rows[tier, kind][moment] for kind in KINDS}

    def peaks(self) -> dict[str, dict[str, int]]:
        """Peak of every tier, and its kinds of bytes at that moment."""
        return {
            tier.value: {"total": self.peak(tier), **self.at(tier, self.peak_moment(tier))}
            for tier in TIERS
        }


class _ProfileBuilder:
    """Sums of bytes over runs of moments."""

    def __init__(self, num_moments: int) -> None:
        self._num_moments = num_moments
        self._changes = {(tier, kind): [0] * (num_moments + 1) for tier in TIERS for kind in KINDS}

    def add(
        self, tier: Tier, kind: str, nbytes: int, start: int = 0, end: int | None = None
    ) -> None:
        """Add `nbytes` at moments [start, end); to the end of the iteration where `end` is None."""
        end = self._num_moments if end is None else min(end, self._num_moments)
        if start < end:
            self._changes[tier, kind][start] += nbytes
            self._changes[tier, kind][end] -= nbytes

    def add_series(self, tier: Tier, kind: str, nbytes: Sequence[int]) -> None:
        """Add `nbytes` of every moment; the last of them stays to the end of the iteration."""
        changes = self._changes[tier, kind]
        for moment, (before, now) in enumerate(pairwise((0, *nbytes))):
            changes[moment] += now - before

    def profile(self) -> Profile:
        return Profile(
            {key: tuple(accumulate(changes[:-1])) for key, changes in self._changes.items()}
        )


def predict(plan: Plan, non_model_bytes: Sequence[int]) -> Profile:
    """Bytes on every tier at every moment. `non_model_bytes`: of every moment of the trace, on the
    device.

    The step is taken to need as many non-model bytes as the last period of the trace.
    """
    total = plan.num_trace_moments
    builder = _ProfileBuilder(plan.num_moments + 1)
    builder.add_series(Tier.DEVICE, "non-model", non_model_bytes)
    builder.add(Tier.DEVICE, "staging", plan.device_staging.nbytes)
    host = Tier.HOST if plan.has_host_tier else Tier.DEVICE
    builder.add(host, "staging", plan.host_staging.nbytes)
    if plan.saved is not None:
        builder.add(Tier.HOST, "non-model", plan.saved.host_bytes)
        builder.add(Tier.NVME, "non-model", plan.saved.file_bytes)
        builder.add(host, "staging", plan.saved.staging_bytes)
    for tier, nbytes in plan.average:
        builder.add(tier, "average", nbytes)

    files, num_blocks = files_of(
        plan.chunks,
        [shard.param_home for shard in plan.shards],
        [shard.grad_home for shard in plan.shards],
        [shard.state_homes for shard in plan.shards],
        plan.original_home,
    )
    for kind, nbytes in files.items():
        builder.add(Tier.NVME, kind, nbytes)
    for sizes, shard in zip(plan.chunks, plan.shards, strict=True):
        if shard.in_payload:
            builder.add(Tier.DEVICE, "parameters", sizes.payload_bytes)
        elif shard.param_home is not Tier.NVME:
            builder.add(shard.param_home, "parameters", sizes.shard_bytes)
        if shard.grad_home is Tier.HOST:
            builder.add(Tier.HOST, "gradients", sizes.shard_bytes)
        if plan.original_home is not Tier.NVME:
            builder.add(plan.original_home, "originals", sizes.original_bytes)
        for block, home in zip(sizes.blocks, shard.state_homes, strict=True):
            if home is not Tier.NVME:
                builder.add(home, "state", block.state_bytes)
        if shard.never_released and not shard.in_payload:
            builder.add(Tier.DEVICE, "parameters", sizes.payload_bytes)
    for gather in plan.gathers:
        nbytes = plan.chunks[gather.chunk].payload_bytes
        builder.add(Tier.DEVICE, "parameters", nbytes, gather.begin, min(gather.release, total))
        if gather.release > total:  # into the next iteration, and through the step
            builder.add(Tier.DEVICE, "parameters", nbytes, total)
            builder.add(Tier.DEVICE, "parameters", nbytes, 0, gather.release - total)
    # A reduced gradient stays until its move away has ended; one without a move, to the end.
    leaves = {
        move.chunk: move.end
        for move in plan.forecast.moves
        if move.kind is MoveKind.GRAD and move.block is None and move.src is Tier.DEVICE
    }
    for reduction in plan.forecast.reductions:
        sizes = plan.chunks[reduction.chunk]
        builder.add(Tier.DEVICE, "gradients", sizes.payload_bytes, reduction.first, reduction.end)
        # over ranks the shard is made while its buffer lives; else the buffer becomes the shard
        overlaps = sizes.num_shards > 1 and not plan.unsharded_grads
        start = reduction.last if overlaps else reduction.end
        builder.add(Tier.DEVICE, "gradients", sizes.shard_bytes, start, leaves.get(reduction.chunk))
    builder.add(Tier.NVME, "staging", store_overhead(num_blocks))
    return builder.profile()
