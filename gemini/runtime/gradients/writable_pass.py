"""A writable pass over the gradients of a step: reduced, this rank's parts, in fp32."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gemini.chunk.storage import Chunk
from gemini.runtime.meetings import Meetings
from gemini.runtime.parts import Parts

from .values import reduce_what_is_left
from .waiting import Gradients

ChangeGradient = Callable[[str, Tensor], Tensor | None]  # of (parameter's name, flat fp32 part)


@torch.no_grad()
def map_gradients(
    parts: Parts, meetings: Meetings, gradients: Gradients, change: ChangeGradient
) -> None:
    """Let `change` see and replace each parameter's part on this rank; see `GeminiDDP`."""
    meetings.call("map_gradients()")
    gradients.check_complete()
    if not parts.reducer.synchronise:
        raise RuntimeError("map_gradients() inside no_sync: gradients are not reduced yet")
    if parts.pending_clip is not None:
        raise RuntimeError(
            "map_gradients() after gradients were clipped; change them first, then clip"
        )
    there = reduce_what_is_left(parts)
    gradients.settle()
    for chunk in parts.chunks:
        if chunk.gradient.exists and any(there[slot.param] for slot in chunk.spec.slots):
            chunk.gradient.change(_over(parts, chunk, there, change), wide=True)
    gradients.settle()  # norms that were measured are of other values


def _over(
    parts: Parts, chunk: Chunk, there: Sequence[bool], change: ChangeGradient
) -> Callable[[Tensor], None]:
    scale = parts.control_vector.scale.float()

    def over(shard: Tensor) -> None:
        for part in parts.layout.shard_segments(chunk.spec, chunk.rank):
            if not there[part.param]:
                continue
            run = shard[part.offset : part.offset + part.numel]
            values = run / scale
            changed = change(parts.layout.params[part.param].name, values)
            run.copy_((values if changed is None else changed) * scale)

    return over
