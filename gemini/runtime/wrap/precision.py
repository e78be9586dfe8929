"""Precision settings of a wrapped module, as one checked value. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from gemini.chunk.layout import ITEMSIZE
from gemini.optim.rules.clipping import Clip
from gemini.optim.rules.loss_scale import LossScale
from gemini.optim.rules.report import MOST_SKIPPED
from gemini.placement.sizes import Budgets

DTYPE_OF = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_SHORT = {**{name: short for short, name in DTYPE_OF.items()}, "half": "fp16", "float": "fp32"}
MAX_SEED = 2**53  # it travels in an fp64 table


def as_precision(given: object, option: str = "precision") -> str:
    """Key of `DTYPE_OF` for `"bf16"`, `"bfloat16"` or torch.bfloat16. Raises ValueError."""
    name = str(given).removeprefix("torch.").lower()
    name = _SHORT.get(name, name)
    if name not in DTYPE_OF:
        raise ValueError(
            f"{option}={given!r}; expected one of {sorted(DTYPE_OF)}, or a dtype of torch that is "
            "one of them"
        )
    return name


@dataclass(frozen=True, slots=True)
class PrecisionSettings:
    """Precision, clipping and loss scale of every step, as `GeminiDDP` takes them.

    Raises ValueError for settings that do not go together.
    """

    precision: str = "bf16"
    max_norm: float = 0.0
    norm_type: float = 2.0
    loss_scale: LossScale | None = None
    on_nonfinite: int | str = MOST_SKIPPED
    master_weights: bool = True
    rounding_seed: int = 0
    communication_dtype: str | None = None
    fp8_communication: bool = False
    canonical: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "precision", as_precision(self.precision))
        if self.communication_dtype is not None:
            sent = as_precision(self.communication_dtype, "communication_dtype")
            object.__setattr__(self, "communication_dtype", sent)
        if not 0 <= self.max_norm < math.inf:
            raise ValueError(f"max_norm={self.max_norm} is negative; 0 does not clip")
        _ = self.clip  # a norm of no positive order is refused there
        asked = self.on_nonfinite
        if asked not in ("skip", "raise") and (type(asked) is not int or asked < 1):
            raise ValueError(
                f'on_nonfinite={asked!r}; expected "skip", "raise", or how many steps in a row may '
                "be skipped until one raises"
            )
        if self.canonical:
            self._check_canonical()
        if self.loss_scale is not None and self.precision != "fp16":
            raise ValueError(
                f'loss_scale is for precision="fp16"; {self.precision} has the range of fp32 '
                "and needs none, so leave it away"
            )
        if not self.master_weights and self.precision != "bf16":
            raise ValueError(
                f'master_weights=False is for precision="bf16", whose weights are then rounded '
                f"at random; {self.precision} has no use for it"
            )
        if not 0 <= self.rounding_seed < MAX_SEED:
            raise ValueError(f"rounding_seed={self.rounding_seed}; expected 0 to 2**53 - 1")
        if self.rounding_seed and self.master_weights:
            raise ValueError("rounding_seed does nothing but with master_weights=False")

    def _check_canonical(self) -> None:
        """Raise ValueError for what rounds by the number of ranks."""
        if self.precision == "fp16" or self.communication_dtype or self.fp8_communication:
            raise ValueError(
                'canonical=True is for precision="bf16" and "fp32" without communication_dtype and '
                "fp8_communication: others round by the number of ranks; expected one of the two"
            )
        check_order(self.norm_type)

    @property
    def dtype(self) -> str:
        return DTYPE_OF[self.precision]

    @property
    def clip(self) -> Clip:
        """Clip of every step."""
        return Clip(max_norm=self.max_norm, norm_type=self.norm_type)

    @property
    def travels_as(self) -> str | None:
        """dtype of gradients on their way between ranks; None: the one that they have."""
        given = self.communication_dtype
        return None if given is None else DTYPE_OF[given]

    @property
    def scale_options(self) -> LossScale | None:
        """Options of the loss scale, which fp16 always has; None for other precisions."""
        return (self.loss_scale or LossScale()) if self.precision == "fp16" else None

    @property
    def most_skipped(self) -> tuple[float, float]:
        """Skipped steps in a row that raise, and the loss scale down to which they do not."""
        if self.on_nonfinite == "raise":
            return 1, math.inf
        options = self.scale_options
        most = math.inf if isinstance(self.on_nonfinite, str) else self.on_nonfinite
        return most, math.inf if options is None else options.least


def check_order(norm_type: float) -> None:
    """Raise ValueError for a norm that `canonical` has not: a sum of its powers is not exact."""
    if norm_type not in (2.0, math.inf):
        raise ValueError(
            f"canonical=True with norm_type={norm_type}; expected 2 or inf, whose sums have no "
            "order that shows"
        )


def check_travelling(precision_settings: PrecisionSettings, budgets: Budgets) -> None:
    """Raise ValueError where data sent between ranks would take bytes that no budget counts."""
    if precision_settings.fp8_communication and budgets != Budgets():
        raise ValueError(
            "fp8_communication=True gathers float8 beside payloads, and no budget counts what "
            "travels; expected False, or a placement without budgets"
        )
    travels_as = precision_settings.travels_as
    if travels_as is None or budgets == Budgets():
        return
    if ITEMSIZE[travels_as] > ITEMSIZE[precision_settings.dtype]:
        raise ValueError(
            f"communication_dtype={precision_settings.communication_dtype!r} is wider than "
            f"precision={precision_settings.precision!r}, and no budget counts what travels; "
            "expected a narrower one, or a placement without budgets"
        )


def as_loss_scale(given: LossScale | float | None) -> LossScale | None:
    """Options of a loss scale; a number is a scale that never changes. Raises ValueError."""
    if given is None or isinstance(given, LossScale):
        return given
    if isinstance(given, bool) or not isinstance(given, (int, float)):
        raise ValueError(
            f"loss_scale={given!r}; expected optim.LossScale(...), or a number for one that stays"
        )
    scale = float(given)
    return LossScale(
        initial_scale=scale,
        min_scale=min(scale, 1.0),
        max_scale=max(scale, LossScale().max_scale),
        growth_interval=0,
    )
