"""Promotion of homes, once, to what the first measured iteration leaves room for."""

from __future__ import annotations

import weakref

import torch

from gemini.chunk.storage import Chunk
from gemini.placement.planner import PlanResult
from gemini.placement.tiers import Tier
from gemini.runtime.parts import Parts


class Promotion:
    """Promotion of one engine: once gradients were dropped and no graph waits for its backward."""

    def __init__(self, parts: Parts) -> None:
        self._parts = weakref.proxy(parts)
        self._higher: PlanResult | None = None
        self.graph_is_open = False  # a forward was recorded, and no backward has ended since

    def propose(self) -> None:
        """Ask for higher homes, once, when a measured iteration was planned. Collective."""
        self._higher = self._higher or self._parts.planning.higher()

    def gradients_dropped(self) -> None:
        """Raise homes, if some wait for it and no graph is open."""
        parts, planned = self._parts, self._higher
        if planned is None or self.graph_is_open or parts.target is None or _is_parked(parts):
            return
        self._higher = None
        promote_homes(parts, planned)
        if parts.comm.world_size == 1:  # evaluation, and inputs of other signatures
            for trace in parts.sampler.traces():
                parts.planning.follow(trace)


@torch.no_grad()
def promote_homes(parts: Parts, planned: PlanResult) -> None:
    """Bring shards and state nearer, to where `planned` has them, and make it the plan.

    Between iterations, when there are no gradients. On an error of the disk what has risen stays
    in memory, the rest is where it was, and the plan is the old one.
    """
    manager, storage, target = parts.manager, parts.storage, parts.target
    assert target is not None
    target.settle()
    manager.release_all()
    from_files = {chunk.spec.id for chunk in parts.chunks if chunk.files is not None}
    try:
        for chunk, shard in zip(parts.chunks, planned.plan.shards, strict=True):
            if shard.param_home is not _home(chunk):
                chunk.bring_home(shard.param_home is Tier.HOST)
                from_files.discard(chunk.spec.id)
        target.promote_state(planned.plan)
        parts.planning.use_plan(planned)
        storage.place_gradients(planned.plan, parts.chunks)
    # Also after an error of a disk: shards that have risen live in memory from now on.
    finally:
        storage.keep_shards(from_files)
        target.homes_changed()
        manager.homes_changed()
    parts.sampler.look_again()


def _is_parked(parts: Parts) -> bool:
    """Whether shards in memory are parked: their memory is given away for a while.

    See `optim.state.parking`.
    """
    shards = (chunk.shard_memory for chunk in parts.chunks if chunk.files is None)
    return any(shard.untyped_storage().nbytes() < shard.nbytes for shard in shards)


def _home(chunk: Chunk) -> Tier:
    if chunk.files is not None:
        return Tier.NVME
    return Tier.HOST if chunk.shard_on_host else Tier.DEVICE
