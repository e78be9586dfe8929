"""The way back: a wrapped module's parameters become plain ones with their fp32 values."""

from __future__ import annotations

import torch
from torch import Tensor

from gemini.chunk.parameter import unwrap_in_place
from gemini.chunk.storage import Chunk
from gemini.runtime.inspect.full_parameters import master_of

from .engine import Engine


@torch.no_grad()
def unwrap(engine: Engine, device: torch.device) -> None:
    """Give every rank all parameters on `device`, in the dtypes they had, and end the engine.

    Chunk by chunk: a rank holds what is done, and two copies of one chunk. Gradients, the
    optimizer's state and all files are gone afterwards. Collective.
    """
    engine.adopt_changes()
    engine.drop_gradients()
    engine.manager.release_all()
    for chunk in engine.chunks:
        values = whole_chunk(engine, chunk)
        for slot, place in enumerate(chunk.spec.slots):
            spec, param = engine.layout.params[place.param], engine.params[place.param]
            value = chunk.view(values, slot).view(spec.shape)
            unwrap_in_place(param)
            param.data = value.to(device, engine.original_dtypes[place.param], copy=True)
        chunk.payload.untyped_storage().resize_(0)
    for handle in engine.hook_handles:
        handle.remove()
    engine.is_unwrapped = True
    if engine.target is not None:
        engine.target.close(keep_masters=False)
    engine.originals.clear()
    engine.storage.close()


def whole_chunk(engine: Engine, chunk: Chunk) -> Tensor:
    """[S * W] fp32: every rank's masters of one chunk, where collectives are."""
    mine = master_of(engine, chunk).to(engine.comm.device)
    if engine.comm.world_size == 1:
        return mine
    values = torch.empty(chunk.spec.payload_numel, dtype=torch.float32, device=mine.device)
    engine.comm.all_gather(values, mine, chunk.spec.id).wait()
    return values
