"""Unfreezing of parameters that were frozen at wrapping, and are trained from now on."""

from __future__ import annotations

import torch

from gemini.chunk.storage import Chunk
from gemini.runtime.schedule.planning import PlanInUse
from gemini.units import ParamId

from .meetings import Meetings
from .weights import Weights


@torch.no_grad()
def unfreeze(
    in_use: PlanInUse,
    weights: Weights,
    meetings: Meetings,
    params: list[ParamId],
) -> list[Chunk]:
    """Give the chunks of these parameters gradients and state; originals become fp32 masters, or
    the rounded weights do, which a warning says.

    Between iterations, on all ranks in the same forward. Another parameter of such a chunk is
    trained, too, as soon as it requires a gradient. Returns chunks that are trained now, which were
    frozen. Raises BudgetError where their state fits nowhere.
    """
    sharding, storage = weights.sharding, in_use.storage
    for param in params:
        if param in sharding.opaque:
            name, kind = sharding.layout.params[param].name, sharding.opaque[param].form.kind
            raise ValueError(
                f"parameter {name} is a {kind}, whose bytes no step updates, and requires a "
                "gradient now; expected requires_grad_(False), with adapters that are trained"
            )
    names = ", ".join(sharding.layout.params[param].name for param in params)
    meetings.call(f"forward with {names} trained")
    frozen = {sharding.chunk_of[param] for param in params}
    frozen = {chunk for chunk in frozen if not sharding.layout.chunks[chunk].trainable}
    if not frozen:
        return []
    if sharding.precision_settings.master_weights:
        weights.warn_rounded(frozen, "fp32 masters begin with")
    layout = sharding.layout.with_trainable(frozen)
    chunks = [sharding.chunks[chunk] for chunk in sorted(frozen)]
    with in_use.planning.growing(frozen), sharding.following(layout):
        for chunk in chunks:
            chunk.wait_gathered()  # its rows are in files that go
        if weights.target is not None:
            weights.target.settle()
        storage.unfreeze(frozen)
        if weights.target is not None:
            weights.target.extend(chunks)
    storage.layout_changed(layout)
    if weights.target is not None:
        in_use.place_gradients(sharding.chunks)
        weights.target.homes_changed()
    in_use.manager.homes_changed()
    in_use.sampler.specs_changed(in_use.planning.inputs.layout.params)
    return chunks
