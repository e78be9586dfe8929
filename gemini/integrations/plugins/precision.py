"""Mixed precision for plugins without one of their own: torch's autocast, and a loss scale."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from gemini import LossScale
from gemini.api import by_name, map_tensors
from gemini.integrations.options import SCALE_NAMES, TORCH_SCALE, ZERO_SCALE, check_options, option


@dataclass(frozen=True)
class MixedPrecision:
    """Precision that a module computes in, while its parameters stay in fp32.

    usual_scale: the loss scale before this object's own options are applied; None has no scale.
    says_overflows: whether every skipped step is logged.
    """

    dtype: ClassVar[torch.dtype] = torch.float16
    usual_scale: ClassVar[LossScale | None] = None

    @property
    def loss_scale(self) -> LossScale | None:
        if self.usual_scale is None:
            return None
        own = {name: getattr(self, name) for name in SCALE_NAMES if hasattr(self, name)}
        return replace(self.usual_scale, **own)

    @property
    def says_overflows(self) -> bool:
        return bool(getattr(self, "verbose", False))


@by_name
@dataclass(frozen=True)
class BF16MixedPrecision(MixedPrecision):
    """bf16 by torch's autocast."""

    dtype = torch.bfloat16


@by_name
@dataclass(frozen=True)
class FP8MixedPrecision(BF16MixedPrecision):
    """Linear layers in float8, by torchao; all else in bf16 by torch's autocast."""


@by_name
@dataclass(frozen=True)
class FP16TorchMixedPrecision(MixedPrecision):
    """fp16 by torch's autocast, with the schedule of `torch.amp.GradScaler`."""

    init_scale: float = TORCH_SCALE.initial_scale
    growth_factor: float = TORCH_SCALE.growth_factor
    backoff_factor: float = TORCH_SCALE.backoff_factor
    growth_interval: int = TORCH_SCALE.growth_interval

    usual_scale = TORCH_SCALE

    @property
    def initial_scale(self) -> float:
        return self.init_scale


@by_name
@dataclass(frozen=True)
class FP16NaiveMixedPrecision(MixedPrecision):
    """fp16 by torch's autocast, with the loss scale of `optim.LossScale`.

    `verbose` logs every step that is skipped. `log_num_zeros_in_grad` is refused.
    """

    log_num_zeros_in_grad: bool = option(
        False, valid=lambda logs: not logs,
        expected="False: count them with (p.grad == 0).sum() before the step",
    )  # fmt: skip
    initial_scale: float = ZERO_SCALE.initial_scale
    growth_factor: float = ZERO_SCALE.growth_factor
    backoff_factor: float = ZERO_SCALE.backoff_factor
    growth_interval: int = ZERO_SCALE.growth_interval
    hysteresis: int = ZERO_SCALE.hysteresis
    max_scale: float = ZERO_SCALE.max_scale
    verbose: bool = False

    usual_scale = ZERO_SCALE

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True)
class ScaledFP16(MixedPrecision):
    """fp16 by torch's autocast, with any `LossScale`. verbose: log every skipped step."""

    options: LossScale
    verbose: bool = False

    @property
    def loss_scale(self) -> LossScale:
        return self.options


_NAMED: dict[str, type[MixedPrecision]] = {
    "bf16": BF16MixedPrecision,
    "fp16": FP16TorchMixedPrecision,
    "fp16_naive": FP16NaiveMixedPrecision,
    "fp8": FP8MixedPrecision,
}


def parse_precision(asked: str | MixedPrecision | None) -> MixedPrecision | None:
    """Precision by its name; an object or None is returned as it is. Raises ValueError."""
    if asked is None or isinstance(asked, MixedPrecision):
        return asked
    if asked == "fp16_apex":
        raise ValueError("mixed_precision='fp16_apex'; expected 'fp16': apex is not needed")
    if asked not in _NAMED:
        raise ValueError(
            f"mixed_precision={asked!r}; expected one of {sorted(_NAMED)}, or an object of "
            "gemini.integrations.plugins.precision"
        )
    return _NAMED[asked]()


def check_is_own(asked: str | MixedPrecision | None, own: str, plugin: str) -> None:
    """Raise ValueError if a plugin with a precision of its own is asked for another one."""
    if asked is not None and asked != own:
        raise ValueError(
            f"mixed_precision={asked!r} with {plugin}, which computes in {own!r}; expected none: "
            "set precision= on the plugin, and its options of the loss scale"
        )


def compute_in(module: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
    """Run the module's forward in torch's autocast from now on; what floats comes out in fp32."""
    forward = module.forward

    @functools.wraps(forward)
    def in_dtype(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(device.type, dtype):
            outputs = forward(*args, **kwargs)
        return map_tensors(outputs, _widened)

    module.forward = in_dtype


def _widened(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor
