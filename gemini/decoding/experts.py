"""Experts of transformers that are stacked [E, n, m], and those that a call's tokens are routed to.

Such a module always runs, whatever its tokens are: only which rows of the stack it uses depends on
data. So it calls for itself, after its router has run, and needs not be gathered with it. Routes
are known as its call begins, so nothing is read ahead. All else that uses a stack (operators
outside its module, backwards, saves) waits for the whole of it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch._compile import _disable_dynamo  # torch.compiler.disable imports the compiler at once

from gemini.chunk.parameter import handle_of
from gemini.chunk.stack import StackChunk
from gemini.memtracer.module_calls import has_experts, is_compiled
from gemini.runtime.passes import Passes
from gemini.runtime.sharding import Sharding

_ROUTES = "top_k_index"  # [tokens, k]: argument with the experts of each token
# by which a stack is used at its rows alone; others may take it whole
_BY_ROWS = ("eager", "batched_mm", "grouped_mm")
_OWN_HOOKS = 1  # of an engine, before a forward and after it


def is_stack(module: nn.Module) -> bool:
    """Whether a module is transformers' own code for stacked experts, which is given routes."""
    forward = type(module).forward
    if "forward" in vars(module) or not forward.__module__.startswith("transformers.models."):
        return False
    stacked = any(param.ndim == 3 for param in module.parameters(recurse=False))
    return stacked and _ROUTES in inspect.signature(forward).parameters and not is_compiled(module)


def has_other_experts(module: nn.Module) -> bool:
    """Whether a module's children run or not by its data, and are no stack, which always runs."""
    return has_experts(module) and not is_stack(module.experts)  # type: ignore[arg-type]


def routed_experts(
    module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[int] | None:
    """Rows that a call of a stack uses, in order; None where it may use any of them.

    It may under another implementation, and where hooks of others see the weights or change the
    routes. The host waits for the routes. A backward waits for the whole stack anyway.
    """
    config = getattr(module, "config", None)
    routes = kwargs.get(_ROUTES, args[1] if len(args) > 1 else None)
    if (
        not isinstance(routes, Tensor)
        or "forward" in vars(module)
        or getattr(config, "_experts_implementation", None) not in _BY_ROWS
        or len(module._forward_pre_hooks) > _OWN_HOOKS
        or len(module._forward_hooks) > _OWN_HOOKS
    ):
        return None
    rows: list[int] = routes.unique().tolist()
    stacks = (param for param in module.parameters(recurse=False) if param.ndim == 3)
    num_experts = min(param.shape[0] for param in stacks)
    # an index beyond the stack is code's for a token without an expert: each has its own
    within = all(0 <= row < num_experts for row in rows)
    return rows if within else None


def hook_stacks(
    sharding: Sharding, passes: Passes, handles: Sequence[Any], module: nn.Module
) -> None:
    """Let calls of the stacks in a wrapped module wait for the rows that they use, as they begin.

    handles: of the engine's hooks, whose work is done within ours, whatever hooks others have.
    """
    own = {handle.id for handle in handles if hasattr(handle, "id")}
    for inner in module.modules():
        hooks = [key for key in inner._forward_pre_hooks if key in own]
        if hooks and is_stack(inner):
            (key,) = hooks
            found_here = [handle_of(param) for param in inner.parameters(recurse=False)]
            ids = {sharding.chunk_of[handle.param] for handle in found_here if handle is not None}
            found = [sharding.chunks[chunk] for chunk in sorted(ids)]
            stacks = [chunk for chunk in found if isinstance(chunk, StackChunk)]
            begin = inner._forward_pre_hooks[key]
            inner._forward_pre_hooks[key] = partial(_begin, passes, stacks, begin)


@_disable_dynamo
def _begin(
    passes: Passes,
    stacks: Sequence[StackChunk],
    begin: Callable[..., None],
    module: nn.Module,
    args: Any,
    kwargs: Any,
) -> None:
    """Begin a call, which waits for the rows that it uses; for all, where it may use any."""
    with passes.lock:  # nobody else waits meanwhile
        in_files = any(chunk.files is not None for chunk in stacks)
        rows = routed_experts(module, args, kwargs) if in_files else None
        try:
            for chunk in stacks:
                chunk.use(rows)
            begin(module, args, kwargs)
        finally:  # Ctrl-C runs no hook after this one
            for chunk in stacks:
                chunk.use(None)
