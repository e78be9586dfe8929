"""Hooks on parameters, and the refusals of backwards that these cannot serve.

A hook refers weakly to what it calls: autograd keeps it on the parameter, out of the garbage
collector's sight.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import NoReturn

from torch import Tensor

from gemini.chunk.layout import ChunkLayout
from gemini.chunk.local import local_gradient
from gemini.chunk.parameter import take_gradient
from gemini.placement.plan import Plan
from gemini.placement.tiers import Tier
from gemini.units import ParamId


def gradient_hook(
    arrived: Callable[[ParamId, Tensor], None], param: ParamId
) -> Callable[[Tensor], None]:
    """Hook that hands the gradient of `param` over. arrived: a method, held weakly."""
    reference = weakref.WeakMethod(arrived)

    def hook(tensor: Tensor) -> None:
        grad = take_gradient(tensor)
        taker = reference()
        if taker is not None and grad is not None:
            taker(param, grad if type(grad) is Tensor else local_gradient(tensor, grad))

    return hook


def unscaling_hook(
    taken_out: Callable[[ParamId, Tensor], Tensor | None], param: ParamId
) -> Callable[[Tensor], Tensor | None]:
    """Hook that changes the gradient of a tensor which autograd was asked for. taken_out: a
    method, held weakly."""
    reference = weakref.WeakMethod(taken_out)

    def hook(grad: Tensor) -> Tensor | None:
        taker = reference()
        return None if taker is None else taker(param, grad)

    return hook


def refuse_double_backward() -> NoReturn:
    """Raise RuntimeError for a backward that records a graph."""
    raise RuntimeError(
        "a backward with create_graph=True cannot go through a wrapped module: gradients "
        "are packed into chunks as they arrive, and have no graph"
    )


def refuse_transforms(plan: Plan) -> None:
    """Raise RuntimeError where a transform of torch.func is around a forward that gathers from a
    lower tier: what is allocated meanwhile would be the transform's, and have no memory."""
    if any(shard.param_home is not Tier.DEVICE for shard in plan.shards):
        raise RuntimeError(
            "a transform of torch.func is around a forward whose parameters are in RAM or files: "
            "raise device_budget, or take a plain module (unwrap() gives one)"
        )


def refuse_unscaled(layout: ChunkLayout, param: ParamId) -> NoReturn:
    """Raise RuntimeError for a gradient that carries no loss scale."""
    raise RuntimeError(
        f"a loss reaches {layout.params[param].name}, or a parameter beside it, without "
        "passing through the outputs of the GeminiDDP; in fp16 its gradient would carry no "
        "loss scale. Compute that part inside the module's forward (or under torch.no_grad)"
    )
