"""Reduced gradients by name, between backward and step: to read, and to change."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from gemini.chunk.local import full_tensor_of
from gemini.chunk.storage import Chunk, params_in
from gemini.placement.timetable.updates import is_early
from gemini.runtime.meetings import Meetings
from gemini.runtime.parts import Parts
from gemini.runtime.schedule.all_reduce_hook import AllReduceHook, Hook

from .values import reduce_what_is_left
from .waiting import Gradients, clipped_by

ChangeGradient = Callable[[str, Tensor], Tensor | None]  # of (parameter's name, flat fp32 part)


def named_gradients(
    parts: Parts, meetings: Meetings, gradients: Gradients, *, full: bool
) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, gradient) of every parameter that some rank has one of; see `GeminiDDP`."""
    meetings.call("named_gradients()")
    gradients.check_complete()
    if not parts.reducer.synchronise:
        raise RuntimeError("named_gradients() inside no_sync: gradients are not reduced yet")
    there = reduce_what_is_left(parts)
    gradients.resolve()
    factor, limit = clipped_by(parts)
    for chunk in parts.chunks:
        if not chunk.gradient.exists or not any(there[slot.param] for slot in chunk.spec.slots):
            continue
        shard = (
            chunk.gradient.load().to(torch.float32, copy=True).mul_(factor).clamp_(-limit, limit)
        )
        if not full:
            for part in parts.layout.shard_segments(chunk.spec, chunk.rank):
                if there[part.param]:
                    name = parts.layout.params[part.param].name
                    yield name, shard[part.offset : part.offset + part.numel]
            continue
        whole = parts.links[chunk.spec.group].gather_for_all(shard, chunk.spec.id)
        for param, values in params_in(parts.layout, chunk.spec, whole):
            if there[param]:
                yield parts.layout.params[param].name, full_tensor_of(parts.params[param], values)


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


def set_all_reduce_hook(
    parts: Parts, hook: Hook | None, stream: torch.cuda.Stream | None = None
) -> None:
    """Let a hook have all reduced gradients, from now on; see `GeminiDDP`."""
    if is_early(parts.update):
        raise ValueError(
            f'update="{parts.update}" updates with gradients that the all-reduce hook has not had; '
            'expected update="serial" or update="tail"'
        )
    if hook is not None and parts.is_canonical:
        raise ValueError(
            "an all-reduce hook averages over ranks that canonical=True does not know; expected "
            "a module with canonical=False"
        )
    device = parts.backend.device
    if stream is not None and (device.type != "cuda" or parts.scope.replicas):
        raise ValueError(
            "stream= of an all-reduce hook is for a CUDA device and a mesh without replicas; "
            "expected None"
        )
    if any(chunk.gradient.exists or chunk.gradient.num_arrived for chunk in parts.chunks):
        raise RuntimeError(
            "set_all_reduce_hook() beside gradients that another step is to take; call it behind "
            "zero_grad()"
        )
    parts.all_reduce_hook = (
        None if hook is None else AllReduceHook(parts.chunks, parts.comm, hook, stream)
    )
