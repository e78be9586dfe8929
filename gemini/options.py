"""Options of `GeminiDDP` in groups: frozen values that a project makes once and gives everywhere.

    bf16 = PrecisionPolicy("bf16", cast_buffers=True)
    model = GeminiDDP(module, precision=bf16, chunks=ChunkSearch(hidden_dim=4096))

Each field is an argument of `GeminiDDP` of the same name, with the same default.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import wraps
from typing import Any, ParamSpec

from gemini.optim.rules.loss_scale import LossScale
from gemini.runtime.wrap.keep_fp32 import KeepFp32
from gemini.runtime.wrap.precision import PrecisionSettings, as_loss_scale

P = ParamSpec("P")


@dataclass(frozen=True, slots=True)
class PrecisionPolicy:
    """What computes, travels and is kept in which dtype, and what happens when it overflows.

    Raises ValueError for what does not go together.
    """

    precision: str = "bf16"
    keep_fp32: KeepFp32 | None = None
    cast_buffers: bool = False
    cast_inputs: bool = True
    force_outputs_fp32: bool = False
    master_weights: bool = True
    rounding_seed: int = 0
    communication_dtype: str | None = None
    loss_scale: LossScale | float | None = None
    on_nonfinite: str = "skip"

    def __post_init__(self) -> None:
        PrecisionSettings(
            precision=self.precision,
            loss_scale=as_loss_scale(self.loss_scale),
            on_nonfinite=self.on_nonfinite,
            master_weights=self.master_weights,
            rounding_seed=self.rounding_seed,
            communication_dtype=self.communication_dtype,
        )


@dataclass(frozen=True, slots=True)
class ChunkSearch:
    """Bounds of the search for chunk capacities, in 2**20 elements but for `hidden_dim`."""

    search_range_m: float | None = None
    hidden_dim: int | None = None
    min_chunk_size_m: float = 32


_GROUPS: dict[str, type[PrecisionPolicy | ChunkSearch]] = {
    "precision": PrecisionPolicy,
    "chunks": ChunkSearch,
}


def takes_groups(init: Callable[P, None]) -> Callable[P, None]:
    """A constructor that takes a group where it takes `precision` and `chunks`."""

    @wraps(init)
    def with_groups(*args: P.args, **kwargs: P.kwargs) -> None:
        init(*args, **ungrouped(kwargs))  # type: ignore[arg-type]

    return with_groups


def ungrouped(given: dict[str, Any]) -> dict[str, Any]:
    """The arguments that groups among `given` stand for, beside the others.

    Raises ValueError for one that is given in a group and beside it.
    """
    options = dict(given)
    for name, kind in _GROUPS.items():
        group = given.get(name)
        if not isinstance(group, kind):
            continue
        del options[name]
        for field in fields(group):
            if field.name in options:
                raise ValueError(
                    f"{field.name}={options[field.name]!r} beside a {kind.__name__}, which has it; "
                    f"expected one of the two: {kind.__name__}({field.name}=...)"
                )
            options[field.name] = getattr(group, field.name)
    return options
