"""Stacks of experts of one engine: their calls say which rows they use.

Routes are known as a call begins, so nothing is read ahead. All else that uses such a stack
(operators outside its module, backwards, saves) waits for the whole of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import nn
from torch._compile import _disable_dynamo  # torch.compiler.disable imports the compiler at once

from gemini.chunk.stack import StackChunk
from gemini.memtracer.experts import is_stack, routed_experts
from gemini.memtracer.module_calls import Caller, around_forward
from gemini.runtime.parts import Parts


def hook_stacks(parts: Parts, callers: Sequence[tuple[nn.Module, Caller]]) -> list[Any]:
    """Listen to the stacks among callers, which are hooked already: these hooks come before, so
    the call that begins next gathers what was said. Returns hooks, which `remove()` undoes."""
    handles: list[Any] = []
    for module, caller in callers:
        found = [parts.chunks[chunk] for chunk in caller.chunks]
        chunks = [chunk for chunk in found if isinstance(chunk, StackChunk)]
        if chunks and not caller.whole and is_stack(module):
            begins, ends = partial(_begins, parts, chunks), partial(_ends, parts, chunks)
            handles += around_forward(module, begins, ends)
    return handles


@_disable_dynamo
def _begins(
    parts: Parts, chunks: Sequence[StackChunk], module: nn.Module, args: Any, kwargs: Any
) -> None:
    """Say which rows a call uses; all, where it may use any."""
    with parts.lock:
        if any(chunk.files is not None for chunk in chunks):
            rows = routed_experts(module, args, kwargs)
            for chunk in chunks:
                chunk.use(rows)


@_disable_dynamo
def _ends(
    parts: Parts, chunks: Sequence[StackChunk], module: nn.Module, args: Any, kwargs: Any, _: Any
) -> None:
    with parts.lock:
        for chunk in chunks:
            chunk.use(None)
