"""From parameters to chunks: filled from the parameters' values, rank 0's on every rank."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor, nn

from gemini.chunk.layout import ChunkLayout, ChunkSpec
from gemini.chunk.storage import Chunk
from gemini.placement.plan import Plan
from gemini.placement.tiers import Tier
from gemini.units import ChunkId

from .backend import Backend
from .comm import Communicator
from .materialise import Materialiser
from .shard_storage import ShardStorage


def build_chunks(
    layout: ChunkLayout,
    params: Sequence[nn.Parameter],
    values: Materialiser,
    backend: Backend,
    comm: Communicator,
    plan: Plan,
    storage: ShardStorage,
    *,
    kept: Collection[ChunkId],
    keep_originals: bool,
) -> list[Chunk]:
    """One chunk after the other; the parameters become views of the payloads.

    A payload whose shard lives elsewhere is released before the next is made, but for those `kept`.
    keep_originals: in `storage`, for fp32 masters to start from.
    """
    chunks: list[Chunk] = []
    for spec in layout.chunks:
        shard = plan.shards[spec.id]
        chunk = Chunk(
            spec,
            backend,
            comm,
            shard_on_host=shard.param_home is Tier.HOST,
            files=storage if shard.param_home is Tier.NVME else None,
            whole_gradient=plan.whole_grads,
        )
        original = _fill(chunk, spec, params, values, backend, comm, keep_originals)
        if original is not None:
            storage.originals.put(spec.id, original)
        if not chunk.is_whole and spec.id not in kept:
            chunk.release()
        chunks.append(chunk)
    return chunks


@torch.no_grad()
def _fill(
    chunk: Chunk,
    spec: ChunkSpec,
    params: Sequence[nn.Parameter],
    values: Materialiser,
    backend: Backend,
    comm: Communicator,
    keep_originals: bool,
) -> Tensor | None:
    """Fill one chunk and rebind its parameters; its fp32 original [S], if it is rounded."""
    wider = any(params[slot.param].dtype.itemsize > chunk.dtype.itemsize for slot in spec.slots)
    keeps_original = keep_originals and spec.trainable and wider  # else the payload is the original
    source = chunk.payload
    if keeps_original:
        source = backend.allocate(spec.payload_numel, torch.float32)
    for start, end in spec.gaps():
        source[start:end].zero_()
    for slot, place in enumerate(spec.slots):
        chunk.view(source, slot).copy_(values.take(params[place.param]).reshape(-1))
    comm.broadcast(source)
    original = None
    if keeps_original:
        chunk.payload.copy_(source)
        original = source if comm.world_size == 1 else chunk.own_part(source).clone()
    chunk.keep_shard()
    for slot, place in enumerate(spec.slots):
        param = params[place.param]
        view = chunk.view(chunk.payload, slot).view(param.shape)
        if param.is_meta:
            # `.data` has a version of its own: a gather is no change of the parameter to autograd
            made = nn.Parameter(view.data, requires_grad=param.requires_grad)
            torch.utils.swap_tensors(param, made)
        else:
            param.data = view
    return original
