"""Options of `GeminiDDP` in groups: frozen values that a project makes once and gives everywhere.

    bf16 = PrecisionPolicy("bf16", cast_buffers=True)
    model = GeminiDDP(module, precision=bf16, chunks=ChunkSearch(hidden_dim=4096))

Each field is an argument of `GeminiDDP` of the same name, with the same default.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from gemini.optim.rules.loss_scale import LossScale
from gemini.runtime.wrap.keep_fp32 import KeepFp32
from gemini.runtime.wrap.precision import PrecisionSettings, as_loss_scale

P = ParamSpec("P")
T = TypeVar("T")


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


def takes_fields(**groups: Any) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """A function of frozen values that takes their fields too, where each value stands.

    groups: by parameter, the value that is changed where fields are given. A value of its class is
        taken as it is.

    `inspect.signature` shows the fields. Raises ValueError for a field beside a value that has it.
    """

    def decorator(function: Callable[..., T]) -> Callable[..., T]:
        shown = _with_fields(inspect.signature(function), groups)
        places = [p.name for p in shown.parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]

        @wraps(function)
        def with_fields(*args: Any, **kwargs: Any) -> T:
            given = dict(zip(places, args, strict=False))
            if len(args) > len(places) or given.keys() & kwargs.keys():
                shown.bind(*args, **kwargs)  # says what is wrong
            given |= kwargs
            for name, usual in groups.items():
                given[name] = _group(given, name, usual)
            return function(**given)

        with_fields.__signature__ = shown  # type: ignore[attr-defined]
        return with_fields

    return decorator


def _with_fields(signature: inspect.Signature, groups: dict[str, Any]) -> inspect.Signature:
    parameters: list[inspect.Parameter] = []
    for parameter in signature.parameters.values():
        usual = groups.get(parameter.name)
        parameters += (
            [parameter]
            if usual is None
            else [
                inspect.Parameter(
                    one.name, parameter.kind, default=getattr(usual, one.name), annotation=one.type
                )
                for one in fields(usual)
            ]
        )
    return signature.replace(parameters=parameters)


def _group(given: dict[str, Any], name: str, usual: Any) -> Any:
    """The value of one group; its fields are taken out of `given`."""
    names = [one.name for one in fields(usual)]
    value = given.get(name)
    if not isinstance(value, type(usual)):
        if value is not None and name not in names:
            raise TypeError(f"{name}={value!r}; expected a {type(usual).__name__}")
        return replace(usual, **{one: given.pop(one) for one in names if one in given})
    for field in names:
        if field in given and field != name:
            kind = type(usual).__name__
            raise ValueError(
                f"{field}={given[field]!r} beside a {kind}, which has it; expected one of the "
                f"two: {kind}({field}=...)"
            )
    return value
