"""Stacks of experts: calls of one engine that read the rows to which their tokens are routed.

A row is read in a call that has begun, when its routes are known: nothing is read ahead. All else
that uses such a stack (operators outside its module, backwards, saves) waits for the whole of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import nn
from torch._compile import _disable_dynamo  # torch.compiler.disable imports the compiler at once

from gemini.memtracer.experts import is_stack, routed_experts
from gemini.memtracer.module_calls import Caller
from gemini.runtime.parts import Parts, saying_what_is_left
from gemini.units import ChunkId


class Stacks:
    """Callers of one engine that are stacks of experts, and their hooks."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._callers: set[Caller] = set()

    def __contains__(self, caller: Caller) -> bool:
        return caller in self._callers

    def hook(self, callers: Sequence[tuple[nn.Module, Caller]]) -> list[Any]:
        """Listen to those that are stacks. Hooks of their calls, which follow, are around these."""
        handles: list[Any] = []
        for module, caller in callers:
            if not caller.whole and is_stack(module):
                self._callers.add(caller)
                read = partial(self._read, caller.chunks)
                handles.append(
                    module.register_forward_pre_hook(read, prepend=True, with_kwargs=True)
                )
        return handles

    def wait_whole(self, chunks: Sequence[ChunkId]) -> None:
        """Wait for all rows of gathered chunks."""
        for chunk in chunks:
            if self._parts.chunks[chunk].rows is not None:
                self._parts.chunks[chunk].wait_gathered()

    @_disable_dynamo
    def _read(self, chunks: Sequence[ChunkId], module: nn.Module, args: Any, kwargs: Any) -> None:
        """Read the rows of these chunks that a call uses; all, where it may use any."""
        with self._parts.lock, saying_what_is_left(self._parts):
            filled = [self._parts.chunks[chunk] for chunk in chunks]
            if all(chunk.rows is None for chunk in filled):
                return
            experts = routed_experts(module, args, kwargs)
            if experts is None:
                self.wait_whole(chunks)
                return
            for chunk in filled:
                if chunk.rows is not None:
                    chunk.rows.fill(experts)
