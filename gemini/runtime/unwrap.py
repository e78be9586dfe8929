"""The way back: a wrapped module's parameters become plain ones with their fp32 values."""

from __future__ import annotations

import torch
from torch import Tensor

from gemini.chunk.parameter import unwrap_in_place
from gemini.chunk.storage import Chunk
from gemini.runtime.gradients.waiting import Gradients
from gemini.runtime.inspect.full_parameters import master_of
from gemini.runtime.step.weights import adopt_changes

from .parts import Parts


@torch.no_grad()
def unwrap(parts: Parts, gradients: Gradients, device: torch.device) -> None:
    """Give every rank all parameters on `device`, in the dtypes they had, and end the engine.

    Chunk by chunk: a rank holds what is done, and two copies of one chunk. Gradients, the
    optimizer's state and all files are gone afterwards. Collective.
    """
    adopt_changes(parts)
    gradients.drop()
    parts.manager.release_all()
    for chunk in parts.chunks:
        values = whole_chunk(parts, chunk)
        for slot, place in enumerate(chunk.spec.slots):
            spec, param = parts.layout.params[place.param], parts.params[place.param]
            value = chunk.view(values, slot).view(spec.shape)
            unwrap_in_place(param)
            param.data = value.to(device, parts.original_dtypes[place.param], copy=True)
        chunk.payload.untyped_storage().resize_(0)
    for handle in parts.hook_handles:
        handle.remove()
    parts.is_unwrapped = True
    if parts.target is not None:
        parts.target.close(keep_masters=False)
    parts.storage.originals.clear()
    parts.storage.close()


def whole_chunk(parts: Parts, chunk: Chunk) -> Tensor:
    """[S * W] fp32: every rank's masters of one chunk, where collectives are."""
    mine = master_of(parts, chunk).to(parts.comm.device)
    if parts.comm.world_size == 1:
        return mine
    values = torch.empty(chunk.spec.payload_numel, dtype=torch.float32, device=mine.device)
    parts.comm.all_gather(values, mine, chunk.spec.id).wait()
    return values
