"""Reduced gradients by name, between backward and step: to read, and to change."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from gemini.chunk.local import full_tensor_of
from gemini.chunk.storage import Chunk, params_in
from gemini.placement.timetable.updates import is_early
from gemini.runtime.overlap import UpdateOverlap
from gemini.runtime.schedule.all_reduce_hook import AllReduceHook, Hook
from gemini.runtime.sharding import Sharding

from .waiting import Gradients

ChangeGradient = Callable[[str, Tensor], Tensor | None]  # of (parameter's name, flat fp32 part)


def named_gradients(gradients: Gradients, *, full: bool) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, gradient) of every parameter that some rank has one of; see `GeminiDDP`."""
    sharding, cycle = gradients.sharding, gradients.cycle
    gradients.meetings.call("named_gradients()")
    gradients.check_complete()
    if not cycle.reducer.synchronise:
        raise RuntimeError("named_gradients() inside no_sync: gradients are not reduced yet")
    there = cycle.reduce_what_is_left()
    gradients.resolve()
    factor, limit = cycle.clipped_by()
    for chunk in sharding.chunks:
        if not chunk.gradient.exists or not any(there[slot.param] for slot in chunk.spec.slots):
            continue
        shard = (
            chunk.gradient.load().to(torch.float32, copy=True).mul_(factor).clamp_(-limit, limit)
        )
        if not full:
            for part in sharding.layout.shard_segments(chunk.spec, chunk.rank):
                if there[part.param]:
                    name = sharding.layout.params[part.param].name
                    yield name, shard[part.offset : part.offset + part.numel]
            continue
        whole = sharding.links[chunk.spec.group].gather_for_all(shard, chunk.spec.id)
        for param, values in params_in(sharding.layout, chunk.spec, whole):
            if there[param]:
                yield (
                    sharding.layout.params[param].name,
                    full_tensor_of(sharding.params[param], values),
                )


@torch.no_grad()
def map_gradients(gradients: Gradients, change: ChangeGradient) -> None:
    """Let `change` see and replace each parameter's part on this rank; see `GeminiDDP`."""
    sharding, cycle = gradients.sharding, gradients.cycle
    gradients.meetings.call("map_gradients()")
    gradients.check_complete()
    if not cycle.reducer.synchronise:
        raise RuntimeError("map_gradients() inside no_sync: gradients are not reduced yet")
    if cycle.pending_clip is not None:
        raise RuntimeError(
            "map_gradients() after gradients were clipped; change them first, then clip"
        )
    there = cycle.reduce_what_is_left()
    gradients.settle()
    for chunk in sharding.chunks:
        if chunk.gradient.exists and any(there[slot.param] for slot in chunk.spec.slots):
            chunk.gradient.change(
                _over(sharding, chunk, there, cycle.control_vector.scale.float(), change), wide=True
            )
    gradients.settle()  # norms that were measured are of other values


def _over(
    sharding: Sharding, chunk: Chunk, there: Sequence[bool], scale: Tensor, change: ChangeGradient
) -> Callable[[Tensor], None]:
    def over(shard: Tensor) -> None:
        for part in sharding.layout.shard_segments(chunk.spec, chunk.rank):
            if not there[part.param]:
                continue
            run = shard[part.offset : part.offset + part.numel]
            values = run / scale
            changed = change(sharding.layout.params[part.param].name, values)
            run.copy_((values if changed is None else changed) * scale)

    return over


def set_all_reduce_hook(
    gradients: Gradients,
    overlap: UpdateOverlap,
    hook: Hook | None,
    stream: torch.cuda.Stream | None = None,
) -> None:
    """Let a hook have all reduced gradients, from now on; see `GeminiDDP`."""
    sharding = gradients.sharding
    if is_early(overlap.asked):
        raise ValueError(
            f'update="{overlap.asked}" updates with gradients that the all-reduce hook has not '
            'had; expected update="serial" or update="tail"'
        )
    if hook is not None and sharding.is_canonical:
        raise ValueError(
            "an all-reduce hook averages over ranks that canonical=True does not know; expected "
            "a module with canonical=False"
        )
    device = sharding.backend.device
    if stream is not None and (device.type != "cuda" or sharding.scope.replicas):
        raise ValueError(
            "stream= of an all-reduce hook is for a CUDA device and a mesh without replicas; "
            "expected None"
        )
    if any(chunk.gradient.exists or chunk.gradient.num_arrived for chunk in sharding.chunks):
        raise RuntimeError(
            "set_all_reduce_hook() beside gradients that another step is to take; call it behind "
            "zero_grad()"
        )
    gradients.cycle.hook_with(
        None if hook is None else AllReduceHook(sharding.chunks, sharding.comm, hook, stream)
    )
