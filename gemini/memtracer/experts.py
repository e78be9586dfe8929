"""Experts of transformers that are stacked [E, n, m], and those that a call's tokens are routed to.

Such a module always runs, whatever its tokens are: only which rows of the stack it uses depends on
data. So it calls for itself, after its router has run, and needs not be gathered with it.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .module_calls import has_experts, is_compiled

_ROUTES = "top_k_index"  # [tokens, k]: argument with the experts of each token
# by which a stack is used at its rows alone; others may take it whole
_BY_ROWS = ("eager", "batched_mm", "grouped_mm")
_OWN_HOOKS = 2  # before a forward, and after it, of an engine


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

    It may under another implementation, where its backward may follow, and where hooks of others
    see the weights or change the routes. The host waits for the routes.
    """
    config = getattr(module, "config", None)
    routes = kwargs.get(_ROUTES, args[1] if len(args) > 1 else None)
    if (
        not isinstance(routes, Tensor)
        or torch.is_grad_enabled()
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
