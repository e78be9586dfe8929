"""Gradients of an engine between backward and step, as its user may look at them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from optim.clipping import Clip

if TYPE_CHECKING:
    from .engine import Engine


def named_gradients(engine: Engine, *, full: bool) -> Iterator[tuple[str, Tensor]]:
    """(name, gradient) of every parameter that has one on some rank; see `GeminiDDP`."""
    engine.end_backward()
    comm, reducer = engine.comm, engine.reducer
    if not reducer.synchronise:
        raise RuntimeError("named_gradients() inside no_sync: gradients are not reduced yet")
    said = torch.tensor([*engine.present, reducer.leftover], dtype=torch.float64)
    said = said.to(comm.device)
    comm.all_reduce(said).wait()
    *there, leftover = (count > 0 for count in said.tolist())
    if leftover:
        reducer.reduce_leftovers()
    factor, limit = _clipped_by(engine)
    for chunk in engine.chunks:
        if not chunk.gradient.exists or not any(there[slot.param] for slot in chunk.spec.slots):
            continue
        shard = (
            chunk.gradient.load().to(torch.float32, copy=True).mul_(factor).clamp_(-limit, limit)
        )
        if not full:
            for part in engine.layout.shard_parts(chunk.spec, comm.rank):
                if there[part.param]:
                    name = engine.layout.params[part.param].name
                    yield name, shard[part.offset : part.offset + part.numel]
            continue
        whole = shard
        if comm.world_size > 1:
            whole = torch.empty(chunk.spec.payload_numel, dtype=torch.float32, device=shard.device)
            comm.all_gather(whole, shard, chunk.spec.id).wait()
        for slot in chunk.spec.slots:
            if there[slot.param]:
                spec = engine.layout.params[slot.param]
                yield spec.name, whole[slot.offset : slot.offset + slot.numel].view(spec.shape)


def _clipped_by(engine: Engine) -> tuple[Tensor, float]:
    """What unscales, and clips where a clip was asked for: a factor, fp64 0-d, and a limit."""
    pending = engine.pending_clip
    clip = pending.clip if pending is not None else Clip()
    factor = 1.0 / engine.scaler.scale
    if pending is not None and pending.norm is not None and clip.max_norm > 0:
        factor = factor * (clip.max_norm / (pending.norm + 1e-6)).clamp(max=1.0)
    return factor, clip.max_value
