"""GeminiOptimizer and GeminiAdamOptimizer: an optimizer with its wrapped module's loss scale."""

from __future__ import annotations

from dataclasses import fields, make_dataclass
from typing import Any

from gemini.arguments import passes_on
from gemini.optim.adam import HybridAdam
from gemini.optim.base import TieredOptimizer
from gemini.optim.rules.loss_scale import LossScale

from .ddp import GeminiDDP
from .options import takes_fields

# the fields of `LossScale`; None leaves one as it is
_ScaleOptions = make_dataclass(
    "_ScaleOptions", [(one.name, f"{one.type} | None", None) for one in fields(LossScale)]
)


class GeminiOptimizer(TieredOptimizer):
    """Optimizer `optim` over the parameters of `module`, with loss scale and clipping set here.

    It shares everything with `optim`, and keeps it alive: groups, state, hooks and schedulers of
    one are those of the other.

    optim: an optimizer of this project over `module.parameters()`.
    module: a `GeminiDDP`.
    max_norm: as in `GeminiDDP(max_norm=...)`; None leaves the module's value.
    scale_options: fields of `optim.LossScale` (`initial_scale`, ...), for `precision="fp16"`;
        another precision takes only the defaults, which change nothing.

    Raises ValueError for a module that is not wrapped, for scale options other than the defaults
    with a module that computes without a loss scale, for another optimizer, and for options out of
    range.
    """

    __slots__ = ("optim",)  # beside the shared `__dict__`

    @passes_on(LossScale)
    def __init__(
        self,
        optim: TieredOptimizer,
        module: GeminiDDP,
        *,
        max_norm: float | None = None,
        **scale_options: Any,
    ) -> None:
        if not isinstance(optim, TieredOptimizer):
            raise ValueError(
                f"optim is a {type(optim).__name__}; expected one of this project's (HybridAdam, "
                "HybridSGD and all of gemini.optim), which can update shards"
            )
        _check_wrapped(module)
        optim.bind_to(module.parameters())
        _configure(module, max_norm, scale_options)
        self.optim = optim
        self.__dict__ = optim.__dict__
        self._patch_step_function()


class GeminiAdamOptimizer(HybridAdam):
    """`HybridAdam` over the parameters of `module`, with loss scale and clipping set here.

    `adam_options` are arguments of `HybridAdam`; the others are as in `GeminiOptimizer`.
    """

    @takes_fields(scale=_ScaleOptions())
    @passes_on(HybridAdam)
    def __init__(
        self,
        module: GeminiDDP,
        *,
        max_norm: float | None = None,
        scale: Any,
        **adam_options: Any,
    ) -> None:
        given = {name: value for name, value in vars(scale).items() if value is not None}
        _check_wrapped(module)
        super().__init__(module.parameters(), **adam_options)
        _configure(module, max_norm, given)


def _check_wrapped(module: GeminiDDP) -> None:
    if not isinstance(module, GeminiDDP):
        raise ValueError(
            f"module is a {type(module).__name__}; expected a GeminiDDP (wrap it first)"
        )


def _configure(module: GeminiDDP, max_norm: float | None, scale_options: dict[str, Any]) -> None:
    options = LossScale(**scale_options) if scale_options else None
    if options == LossScale() and not module.engine.control_vector.active:
        options = None
    module.engine.reconfigure(max_norm=max_norm, loss_scale=options)
