"""Chunks made from parameters, filled with the values of rank 0 on every rank."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from gemini.chunk.layout import ChunkLayout, ChunkSpec
from gemini.chunk.local import is_dtensor, local_of, rebind
from gemini.chunk.opaque import Opaque, OpaqueChunk
from gemini.chunk.storage import Chunk
from gemini.comm.links import Links
from gemini.dtypes import BYTES, DTYPES
from gemini.placement.plan import Plan
from gemini.placement.tiers import Tier
from gemini.runtime.memory.backend import Backend
from gemini.runtime.memory.originals import Originals, has_same_values
from gemini.runtime.memory.shard_storage import ShardStorage
from gemini.units import ChunkId, ParamId

from .materialise import Materialiser


def build_chunks(
    layout: ChunkLayout,
    params: Sequence[nn.Parameter],
    opaque: Mapping[ParamId, Opaque],
    values: Materialiser,
    backend: Backend,
    links: Mapping[str, Links],
    plan: Plan,
    storage: ShardStorage,
    *,
    never_released: Collection[ChunkId],
    with_originals: Collection[ChunkId],
    gradients_travel_as: str | None,
    in_micro_batches: bool,
    in_float8: str | None,
) -> list[Chunk]:
    """Build one chunk after the other; the parameters become views of the payloads.

    A payload whose shard lives elsewhere is freed when it is full, except of chunks in
    `never_released`. A module's values are made together and go to their chunks at once.
    with_originals: chunks whose fp32 values `storage` takes, if they are trained or round any. Of
        other frozen ones it is told whether they round any.
    in_micro_batches: gradients are summed in the order of micro-batches.
    in_float8: the dtype whose chunks are gathered in fp8; None: no chunk is.
    """
    place_of = {
        id(params[slot.param]): (spec, i)
        for spec in layout.chunks
        for i, slot in enumerate(spec.slots)
    }
    filling: dict[ChunkId, _ChunkBuilder] = {}
    done: dict[ChunkId, Chunk] = {}
    placed: set[int] = set()

    def place(param: nn.Parameter) -> None:
        value = values.take(param)
        if id(param) in placed:  # a tied one, made again with its other module
            return
        placed.add(id(param))
        spec, slot = place_of[id(param)]
        if spec.id not in filling:
            shard = plan.shards[spec.id]
            chunk = _kind_of(spec, in_float8, links[spec.group], spec.id in storage.rows)(
                spec,
                backend,
                links[spec.group],
                never_released=spec.id in never_released,
                shard_on_host=shard.param_home is Tier.HOST,
                files=storage if shard.param_home is Tier.NVME else None,
                gradients_travel_as=DTYPES[gradients_travel_as] if gradients_travel_as else None,
            )
            builder = _ChunkBuilder
            if isinstance(chunk, OpaqueChunk):
                chunk.opaque = [opaque[slot.param] for slot in spec.slots]
                builder = _OpaqueBuilder
            keeps = spec.id in with_originals
            filling[spec.id] = builder(
                chunk, params, backend, links[spec.group], storage.originals, keeps
            )
        is_full = filling[spec.id].put(slot, value)
        del value  # it may be as large as all of the chunk
        if is_full and links[spec.group].is_given_nothing:
            finish(spec.id)

    def finish(chunk: ChunkId) -> None:
        full = filling.pop(chunk)
        full.finish()
        if not full.chunk.is_unsharded and chunk not in never_released:
            full.chunk.release()
        done[chunk] = full.chunk

    for spec in layout.chunks:
        for slot in spec.slots:
            if id(params[slot.param]) not in placed:
                place(params[slot.param])
            for made in values.waiting():
                place(made)
        if spec.id not in done:  # ranks broadcast in this order, whatever each of them has to make
            finish(spec.id)
    storage.originals.complete()
    if in_micro_batches:
        _sum_in_order(done.values())
    return [done[spec.id] for spec in layout.chunks]


def _sum_in_order(chunks: Iterable[Chunk]) -> None:
    from gemini.runtime.canonical.order import CanonicalGradient

    for chunk in chunks:
        chunk.sum_by(CanonicalGradient)


def _kind_of(spec: ChunkSpec, in_float8: str | None, links: Links, in_rows: bool) -> type[Chunk]:
    if spec.dtype == BYTES:
        return OpaqueChunk
    if spec.dtype != in_float8 or links.world_size == 1:
        return _stack_chunk() if in_rows else Chunk
    from gemini.chunk.float8 import Float8Chunk

    return Float8Chunk


def _stack_chunk() -> type[Chunk]:
    from gemini.chunk.stack import StackChunk

    return StackChunk


class _ChunkBuilder:
    """Builder of a chunk: takes its values, then binds its parameters.

    keeps: `originals` take its fp32 values, if it is trained or rounds any.
    """

    def __init__(
        self,
        chunk: Chunk,
        params: Sequence[nn.Parameter],
        backend: Backend,
        links: Links,
        originals: Originals,
        keeps: bool,
    ) -> None:
        self.chunk, self._links, self._originals = chunk, links, originals
        spec = chunk.spec
        self._params = [params[slot.param] for slot in spec.slots]
        self._missing = set(range(len(spec.slots)))
        self._looks = not (keeps or spec.trainable)
        self._blocks: WideBlocks | None = None
        in_blocks = keeps and links.is_given_nothing and originals.goes_to_file(spec.id)
        if in_blocks:
            from .wide_blocks import WideBlocks

            self._blocks = WideBlocks(chunk, originals)
        self._source = chunk.payload
        if keeps and not in_blocks:
            self._source = backend.allocate(spec.payload_numel, torch.float32)
        for start, end in spec.gaps():
            self._source[start:end].zero_()

    @torch.no_grad()
    def put(self, slot: int, values: Tensor) -> bool:
        """Take one parameter's values; returns whether the chunk is full."""
        flat = local_of(values).reshape(-1)
        there = self.chunk.view(self._source, slot)
        there.copy_(flat)
        if self._looks and not has_same_values(there, flat):
            self._originals.lost.add(self.chunk.spec.id)
        if self._blocks is not None:
            self._blocks.put(self.chunk.spec.slots[slot].offset, flat)
            param = self._params[slot]
            if not (is_dtensor(param) or param.is_meta):  # what is left of its values goes
                param.data = self.chunk.view(self._source, slot).view(param.shape)
        self._missing.discard(slot)
        return not self._missing

    @torch.no_grad()
    def finish(self) -> None:
        """Give rank 0's values to all and rebind the parameters."""
        chunk, source, links = self.chunk, self._source, self._links
        links.broadcast(source)
        if self._blocks is not None:
            self._blocks.finish()
        elif source is not chunk.payload:
            chunk.payload.copy_(source)
            if chunk.spec.trainable or not has_same_values(chunk.payload, source):
                is_all = links.world_size == 1
                self._originals.put(
                    chunk.spec.id, source if is_all else chunk.own_part(source).clone()
                )
        chunk.keep_shard()
        for slot, param in enumerate(self._params):
            view = chunk.view(chunk.payload, slot).view(local_of(param).shape)
            if is_dtensor(param):
                rebind(param, view.data)
            elif param.is_meta:
                # `.data` has a version of its own, so a gather is no change to autograd
                made = nn.Parameter(view.data, requires_grad=param.requires_grad)
                torch.utils.swap_tensors(param, made)
            else:
                param.data = view


class _OpaqueBuilder(_ChunkBuilder):
    """Builder of a chunk of opaque parameters, which are packed and bound one by one."""

    chunk: OpaqueChunk

    def put(self, slot: int, values: Tensor) -> bool:
        self.chunk.opaque[slot].pack(self.chunk.view(self._source, slot), values)
        self._missing.discard(slot)
        return not self._missing

    def finish(self) -> None:
        self._links.broadcast(self._source)
        self.chunk.keep_shard()
        for slot, one in enumerate(self.chunk.opaque):
            one.bind(self.chunk.view(self.chunk.payload, slot))
