"""The optimizer state behind an engine's shards: masters, streams of runs, whole planes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gemini.chunk.storage import Chunk
from gemini.placement.plan import Plan
from gemini.placement.sizes import StateBytes
from gemini.placement.tiers import Tier
from gemini.runtime.gradients.waiting import Gradients
from gemini.runtime.memory.user_writes import follow_shard
from gemini.runtime.parts import Parts
from gemini.units import BlockId, ChunkId
from optim.rules.config import StateConfig
from optim.rules.state_layout import MASTER, StateLayout
from optim.state.pieces import Planes
from optim.state.space import Block, Segment, StateSpace
from optim.state.state_stream import (
    Look,
    RunSpec,
    Source,
    StateSnapshot,
    fill_runs,
    inside,
    list_runs,
    visit_runs,
)
from optim.state.tiered_state import TieredState

from .shard_blocks import Shards
from .weights import after_step
from .whole_state import gather_state, scatter_state


@dataclass(frozen=True, slots=True)
class StepCalls:
    """What a step asks of those who see more than it does."""

    begin: Callable[[], None]  # ends what is under way, and masters follow what the user wrote
    agree_on_trace: Callable[[], None]  # collective, behind the vote
    meet: Callable[[str], None]  # before a method that all ranks must call
    detach: Callable[[], None]  # the optimizer was closed
    gradients: Gradients


class ShardState:
    """State of this rank's shards of all trainable chunks; fp32 masters where there are any."""

    def __init__(
        self, parts: Parts, calls: StepCalls, layout: StateLayout, config: StateConfig
    ) -> None:
        """`layout`: the rule's planes."""
        self._parts = parts
        self._calls = calls
        self._chunks = [chunk for chunk in parts.chunks if chunk.spec.trainable]
        self._names = [spec.name for spec in parts.layout.params]
        master_weights = parts.numerics.master_weights
        has_master = master_weights and any(c.dtype != torch.float32 for c in self._chunks)
        if has_master:
            layout = layout.with_master()
        planning = parts.planning
        planning.with_state(
            StateBytes(layout.bytes_per_element, layout.has_master),
            nvme_frac=config.nvme_fraction,
            block_numel=config.nvme.block_numel,
            depth=config.nvme.depth,
        )
        nvme = replace(config.nvme, block_numel=planning.block_numel)
        space = self._space(nvme.block_numel)
        parts.storage.serve(nvme.block_numel, nvme.depth, nvme.meter)
        plan = planning.plan
        if not nvme.folders and planning.nvme_folder is not None:
            nvme = replace(nvme, folders=(planning.nvme_folder,))
        self._tiers = TieredState(
            space,
            layout,
            on_nvme=self._planned_on(Tier.NVME, plan, space),
            on_host=self._planned_on(Tier.HOST, plan, space),
            nvme=nvme,
            memory=parts.backend,
            label=f"rank{parts.comm.rank}-",
        )
        shards = Shards(self._chunks)
        self._unfilled = Counter(block.shard for block in space.blocks)
        try:
            self._tiers.initialise(partial(self._fill_master, shards))
        except BaseException:
            self._tiers.close()
            raise
        shards.end()
        parts.storage.originals.keep([c.spec.id for c in parts.chunks if not c.spec.trainable])

    def raise_state(self, plan: Plan) -> None:
        """Blocks of state rise to where `plan` has them; see `TieredState.rise`."""
        space = self._tiers.space
        self._tiers.rise(
            on_nvme=self._planned_on(Tier.NVME, plan, space),
            on_host=self._planned_on(Tier.HOST, plan, space),
        )

    def extend(self, chunks: Sequence[Chunk]) -> None:
        """Keep state of these chunks too, which were frozen; where the engine's plan has it."""
        parts = self._parts
        rounded = [c for c in chunks if c.dtype != torch.float32]
        if rounded and parts.numerics.master_weights and not self._tiers.layout.has_master:
            raise RuntimeError(
                "the optimizer was made without fp32 masters, as all that was trained was fp32; "
                "what is trained now has 16 bits, so make the optimizer when all of it is trained"
            )
        self._chunks += chunks
        space = self._space(parts.planning.block_numel)
        shards = Shards(self._chunks)
        self._unfilled.update(
            block.shard for block in space.blocks[len(self._tiers.space.blocks) :]
        )
        plan = parts.planning.plan
        try:
            self._tiers.extend(
                space,
                partial(self._fill_master, shards),
                on_nvme=self._planned_on(Tier.NVME, plan, space),
                on_host=self._planned_on(Tier.HOST, plan, space),
            )
        except BaseException:
            del self._chunks[-len(chunks) :]
            raise
        shards.end()

    def _space(self, block_numel: int) -> StateSpace:
        """Of the chunks in the order in which they came to be trained."""
        parts, base = self._parts, 0
        segments: list[Segment] = []
        for chunk in self._chunks:
            for part in parts.layout.shard_parts(chunk.spec, parts.comm.rank):
                segments.append(
                    Segment(part.param, part.param_offset, part.numel, base + part.offset)
                )
            base += chunk.spec.shard_numel
        return StateSpace.build(
            segments, [chunk.spec.shard_numel for chunk in self._chunks], block_numel
        )

    def _planned_on(self, tier: Tier, plan: Plan, space: StateSpace) -> frozenset[BlockId]:
        """Blocks of a space that a plan has there. The plan numbers them in layout order."""
        found, place = [], {chunk.spec.id: i for i, chunk in enumerate(self._chunks)}
        of_shard: dict[int, list[BlockId]] = {}
        for block in space.blocks:
            of_shard.setdefault(block.shard, []).append(block.id)
        for shard in plan.shards:
            if shard.chunk in place:
                blocks = of_shard.get(place[shard.chunk], [])
                homes = zip(blocks, shard.state_homes, strict=True)
                found += [block for block, home in homes if home is tier]
        return frozenset(found)

    @property
    def tiers(self) -> TieredState:
        """Where the state lives."""
        return self._tiers

    @property
    def trained(self) -> Sequence[Chunk]:
        """Chunks in the order of the shards of the state space."""
        return self._chunks

    # -- masters --

    def read_master(self, chunk: Chunk) -> Tensor:
        """[S] fp32: the weights of a trainable chunk's shard as the optimizer has them."""
        values = chunk.load_shard().to("cpu", torch.float32, copy=True)

        def look(block: Block, planes: Planes) -> None:
            if MASTER in planes:
                end = block.shard_offset + block.numel
                values[block.shard_offset : end].copy_(planes[MASTER])

        self._tiers.visit(look, self._blocks_of({chunk.spec.id}))
        return values

    @torch.no_grad()
    def write_master(self, chunk: Chunk, values: Tensor) -> None:
        """The inverse: fp32 [S] to the masters and, rounded, to the shard."""
        chunk.store_shard(values)

        def fill(block: Block, planes: Planes) -> None:
            if MASTER in planes:
                end = block.shard_offset + block.numel
                planes[MASTER].copy_(values[block.shard_offset : end])

        self._tiers.overwrite(fill, self._blocks_of({chunk.spec.id}))

    @torch.no_grad()
    def follow_shards(self, chunks: Set[ChunkId]) -> None:
        """The user wrote to these shards: masters that do not round to them take their values."""

        shards = Shards(self._chunks)

        def fill(block: Block, planes: Planes) -> None:
            if MASTER in planes:
                shard = shards.of(block)
                end = block.shard_offset + block.numel
                follow_shard(
                    planes[MASTER], shard[block.shard_offset : end].to(planes[MASTER].device)
                )

        self._tiers.overwrite(fill, self._blocks_of(chunks))

    def give_masters_back(self) -> None:
        """To where they started from, for what comes after this optimizer."""
        if self._tiers.layout.has_master:
            for chunk in self._chunks:
                self._parts.storage.originals.put(chunk.spec.id, self.read_master(chunk))

    def _blocks_of(self, chunks: Set[ChunkId]) -> list[Block]:
        return [
            block
            for block in self._tiers.space.blocks
            if self._chunks[block.shard].spec.id in chunks
        ]

    @property
    def _uses_disk(self) -> bool:
        """On some rank: shards are equal, blocks may not be."""
        return bool(self._parts.planning.plan.blocks_on(Tier.NVME) or self._parts.storage.params)

    # -- streams and whole planes --

    def visit_state(self, look: Look) -> None:
        """Show this rank's state run by run; see `optim.state.state_stream`. Not collective."""
        visit_runs(self._tiers, self._names, look)

    def state_runs(self) -> Sequence[RunSpec]:
        return list_runs(self._tiers, self._names)

    def snapshot_state(self) -> StateSnapshot:
        return StateSnapshot(self._tiers, self._names)

    @torch.no_grad()
    def fill_state(self, source: Source) -> None:
        """Replace this rank's state run by run. Weights follow the masters. Not collective."""
        self._parts.manager.release_all()
        try:
            shards = Shards(self._chunks)
            fill_runs(self._tiers, self._names, source, shards.follow_master)
            shards.end()
        finally:
            after_step(self._parts)

    def offloaded_state(self) -> Mapping[Tensor, dict[str, Tensor]]:
        """Whole planes on rank 0, nothing elsewhere. Collective."""
        parts = self._parts
        self._calls.meet("optimizer.state_dict()")
        whole = gather_state(self._tiers, self._chunks, parts.layout, parts.comm)
        return {
            param: whole[self._names[i]]
            for i, param in enumerate(parts.params)
            if self._names[i] in whole
        }

    @torch.no_grad()
    def load_state(self, state: Mapping[Tensor, Mapping[str, Any]]) -> None:
        """Rank 0's whole planes to all shards. Collective."""
        parts = self._parts
        self._calls.meet("optimizer.load_state_dict()")
        by_name = {
            name: state[param]
            for param, name in zip(parts.params, self._names, strict=True)
            if param in state
        }
        comm = parts.comm
        shards = scatter_state(by_name, self._tiers, self._chunks, parts.layout, comm)
        given = comm.gather_objects(
            {name: {k for k in planes if k != "step"} for name, planes in by_name.items()}
        )[0]

        followers = Shards(self._chunks)

        def fill(block: Block, planes: Planes) -> None:
            chunk = self._chunks[block.shard].spec.id
            for part in block.parts:
                at = slice(block.shard_offset + part.offset, None)
                for name in given.get(self._names[part.param], ()):
                    if name in planes:
                        planes[name][inside(part)] = shards[chunk, name][at][: part.numel]
            followers.follow_master(block, planes)

        parts.manager.release_all()
        try:
            self._tiers.overwrite(fill)
            followers.end()
        finally:
            after_step(parts)

    def _fill_master(self, shards: Shards, block: Block, planes: Planes) -> None:
        """Masters start as the original fp32 weights, not as the rounded ones."""
        if MASTER not in planes:
            return
        chunk = self._chunks[block.shard]
        original = self._parts.storage.originals.get(chunk.spec.id)
        if original is None:
            original = shards.of(block)
        here = slice(block.shard_offset, block.shard_offset + block.numel)
        planes[MASTER].copy_(original[here])
        self._unfilled[block.shard] -= 1
        if self._unfilled[block.shard] == 0:
            self._parts.storage.originals.drop(chunk.spec.id)  # one chunk's worth twice, at most
