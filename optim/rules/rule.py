"""Update rule: its planes, its options, and two pure functions.

A rule is written once (docs/extending.md). Of its two functions follow the eager update, the
compiled loop (`optim.update.kernel_specs`) and the kernels (`optim.update.triton_source`).
"""

from __future__ import annotations

import functools
import math
from collections import namedtuple
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from enum import Enum
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from .state_layout import ALL_COLUMNS, Columns, Plane, StateLayout, kind_of

if TYPE_CHECKING:
    from .measures import Measure

STRIP_NUMEL = 1 << 16  # of an eager update: what operators make on their way stays in cache


class Works(Enum):
    """What an update of an element needs to know. Compiled loops and kernels are for the first;
    the others work by torch's operators."""

    ON_ELEMENTS = 1  # of this parameter, gradient and state
    ON_PLACES = 2  # where it is in its parameter, whose elements come row by row; see `given`
    ON_MATRICES = 3  # all of its parameter; see `matrix_rule.py`


class UpdateRule:
    """Rule by which one optimizer updates a run of elements, every element alike.

    A subclass says what it is called, its `layout` (planes without master and undo), its `options`
    and two static functions:

        coefficients(h, t) -> {name: number}
            in fp64, of the options by name (`betas` as `beta1` and `beta2`) and the step count,
            from 1; by operators, and functions of `optim.rules.scalars`
        formula(param, grad, c, *, PLANE, ...) -> new param, {PLANE: new values}
            in fp32, of [n] each; `c.NAME` is a coefficient, []. Operators that are exact or
            correctly rounded (`optim.update.tracing.KNOWN`), no branch on values.

    wanted: options whose planes of `optional` the state has, with those of `layout`; the formula
        gets None for the others.
    state: in what planes are kept between updates; see `optim.rules.quantised`.

    A target asks a rule, and not its class, for what is measured before an update (`measures`,
    `begun`) and carried of it to the next step (`carried`: shapes of small tensors by name, of a
    parameter's shape; every rank has them whole); for a parameter's planes (`columns`, `is_kept`);
    and for how it `works`.

    Raises ValueError for an option that has no such plane, or that cannot be kept so.
    """

    name: str
    layout: StateLayout
    options: ClassVar[Mapping[str, Any]]  # with the defaults of the class; flags are bools
    ranges: ClassVar[Mapping[str, tuple[float, float]]] = {}  # of options; others are [0, inf)
    optional: ClassVar[Mapping[str, Plane]] = {}  # by option
    measures: ClassVar[Sequence[type[Measure]]] = ()  # asked of whole parameters, in order
    carried: ClassVar[Mapping[str, Callable[[Sequence[int]], Sequence[int] | None]]] = {}
    works: ClassVar[Works] = Works.ON_ELEMENTS
    coefficients: Callable[[Any, Any], Mapping[str, Any]]
    formula: Callable[..., tuple[Tensor, Mapping[str, Tensor]]]

    def __init__(self, *wanted: str, state: str = "fp32") -> None:
        if unknown := set(wanted) - set(self.optional):
            raise ValueError(f"{sorted(unknown)} of {self.name}; it has {list(self.optional)}")
        self.wanted = frozenset(wanted)
        if wanted:
            planes = [plane for name, plane in self.optional.items() if name in self.wanted]
            self.name = "-".join([self.name, *sorted(self.wanted)])
            self.layout = StateLayout((*self.layout.planes, *planes))
        kind_of(state)
        if state != "fp32":
            self.layout = replace(self.layout, kind=state)
            if wanted:
                raise ValueError(
                    f"state={state!r} has no form of {self.optional[wanted[0]].name}; expected "
                    f'state="fp32", or no group with {wanted[0]}'
                )
            self.name = f"{self.name}-{state}-state"
        self.coefficient_names = tuple(self.coefficients(self.hyper(self.options), 1))

    def for_groups(self, groups: Sequence[Mapping[str, Any]]) -> UpdateRule:
        """Rule whose state these groups need."""
        wanted = (name for name in self.optional if any(group[name] for group in groups))
        return type(self)(*wanted, state=self.layout.kind)

    def hyper(self, group: Mapping[str, Any]) -> Any:
        """Options of a group as a frozen, hashable value of numbers.

        Raises ValueError naming the first one that is out of range, has no plane, or asks for
        another kind of state, and TypeError for a value of another type.
        """
        values: dict[str, float] = {}
        for name, default in self.options.items():
            if name == "betas":
                values["beta1"], values["beta2"] = betas(group)
            elif isinstance(default, bool):
                values[name] = flag(group, name)
            else:
                low, high = self.ranges.get(name, (0.0, math.inf))
                values[name] = number(group, name, low, high, open_high=True)
        if (state := group.get("state", self.layout.kind)) != self.layout.kind:
            raise ValueError(
                f"a group has state={state!r}; expected it of the whole optimizer, which has "
                f"{self.layout.kind!r}"
            )
        for name, plane in self.optional.items():
            if values[name] and name not in self.wanted:
                raise ValueError(
                    f"a group has {name}={group[name]}, and the state of its parameters was made "
                    f"without {plane.name}; make the optimizer with {name}={group[name]}"
                )
        return hyper_type(tuple(values))(**values)

    def columns(
        self,
        shapes: Sequence[Sequence[int]],
        group_of: Sequence[int | None],
        groups: Sequence[Mapping[str, Any]],
    ) -> Columns:
        """Planes of every parameter; one in no group may come into any."""
        return ALL_COLUMNS

    def is_kept(self, hyper: Any, columns: Columns, param: int) -> bool:
        """Whether a parameter has the state that its group's update needs."""
        return True

    @property
    def elementwise(self) -> UpdateRule:
        """Rule of parameters whose elements are updated alike."""
        return self

    @property
    def by_operators(self) -> bool:
        """Whether an update is `update`, for which neither a loop nor a kernel is made."""
        return self.works is not Works.ON_ELEMENTS

    @property
    def needs_wholes(self) -> bool:
        """Whether an update needs more than one rank's part of a parameter."""
        return bool(self.measures) or self.works is Works.ON_MATRICES

    def begun(self, hyper: Any, dtype: torch.dtype) -> Any:
        """Hyperparameters of a parameter in a step that is computed in `dtype`."""
        return hyper

    def given(
        self, planes: Sequence[Tensor], hyper: Any, first: int, param: Tensor
    ) -> Sequence[Tensor]:
        """Inputs of an update of elements from `first` of a parameter, [n] `param`, in place of its
        planes."""
        return planes

    def hyper_row(self, hyper: Any) -> tuple[float, ...]:
        """Row of the kernels' hyperparameter table."""
        return tuple(map(float, hyper))

    def values(self, hyper: Any, step: int) -> tuple[float, ...]:
        """Coefficients in their order, in fp64; `step` counts from 1."""
        return tuple(map(float, self.coefficients(hyper, step).values()))

    def named(self, values: Tensor) -> SimpleNamespace:
        """Coefficients [k] by name."""
        return SimpleNamespace(**dict(zip(self.coefficient_names, values.unbind(), strict=True)))

    def updated(
        self, param: Tensor, grad: Tensor, planes: Sequence[Tensor], values: Tensor
    ) -> list[Tensor]:
        """New [param, *planes] [n] by the formula, in the dtype of `param`, from all coefficients
        [k]."""
        c = self.named(values)
        names = [plane.name for plane in self.optional.values()]
        given = dict.fromkeys(names) | dict(zip(self.layout.names, planes, strict=True))
        param, new = self.formula(param, grad, c, **given)
        return [param, *(new[name] for name in self.layout.names)]

    def update(
        self, param: Tensor, grad: Tensor, planes: Sequence[Tensor], hyper: Any, step: int
    ) -> None:
        """Update fp32 [n] `param` and `planes` in place, by torch's operators; [n] `grad` is read.

        `step` counts from 1. Cutting a run at multiples of 16 elements changes no bit.
        """
        values = values_of(self, hyper, step, param.dtype)
        strips = [tensor.split(STRIP_NUMEL) for tensor in (param, grad, *planes)]
        for one, its_grad, *its_planes in zip(*strips, strict=True):
            new = self.updated(one, its_grad, its_planes, values)
            for old, value in zip((one, *its_planes), new, strict=True):
                old.copy_(value)


@functools.lru_cache(maxsize=64)
def values_of(rule: UpdateRule, hyper: Any, step: int, dtype: torch.dtype) -> Tensor:
    return torch.tensor(rule.values(hyper, step), dtype=dtype)


@functools.cache
def hyper_type(names: tuple[str, ...]) -> Any:
    return namedtuple("Hyper", names)


def number(
    group: Mapping[str, Any], name: str, low: float, high: float = math.inf, *, open_high: bool
) -> float:
    """`group[name]` as a float in [low, high] or [low, high). Raises ValueError, and TypeError for
    what is no number."""
    value = scalar(name, group[name])
    inside = low <= value and (value < high if open_high else value <= high)
    if math.isnan(value) or math.isinf(value) or not inside:
        bracket = ")" if open_high else "]"
        raise ValueError(f"{name}={group[name]!r} is outside [{low:g}, {high:g}{bracket}")
    return value


def flag(group: Mapping[str, Any], name: str) -> bool:
    """`group[name]` as a bool. Raises TypeError for a value whose truth is its length, and for a
    fraction."""
    value = group[name]
    if isinstance(value, float) or not hasattr(value, "__bool__"):
        is_pair = isinstance(value, (tuple, list)) and "betas" in group
        also = f" (decay rates are betas={value!r})" if is_pair else ""
        raise TypeError(f"{name}={value!r}; expected True or False{also}")
    return bool(value)


def pair(group: Mapping[str, Any], name: str, expected: str) -> Sequence[Any]:
    """`group[name]` of two values. Raises ValueError, and TypeError for what is no sequence."""
    value: Sequence[Any] = group[name]
    if isinstance(value, str) or not hasattr(value, "__len__"):
        raise TypeError(f"{name}={value!r}; expected {expected}")
    if len(value) != 2:
        raise ValueError(f"{name}={value!r}; expected {expected}")
    return value


def betas(group: Mapping[str, Any]) -> tuple[float, float]:
    """Two decay rates in [0, 1), as in torch both numbers or both tensors. Raises ValueError and
    TypeError."""
    expected = "two numbers in [0, 1), or two tensors"
    given = pair(group, "betas", expected)
    if len({isinstance(beta, Tensor) for beta in given}) != 1:
        raise ValueError(f"betas={given!r}; expected {expected}")
    first, second = (scalar(f"betas[{i}]", beta) for i, beta in enumerate(given))
    for i, beta in enumerate((first, second)):
        if not 0 <= beta < 1:
            raise ValueError(f"betas[{i}]={given[i]!r} is outside [0, 1)")
    return first, second


def scalar(name: str, value: Any) -> float:
    """Number as a float. Raises TypeError for what is none, ValueError for a larger tensor."""
    if isinstance(value, Tensor) and value.numel() != 1:
        raise ValueError(f"{name} is a tensor of shape {tuple(value.shape)}; expected one element")
    is_bool = isinstance(value, bool) or (isinstance(value, Tensor) and value.dtype == torch.bool)
    if is_bool or not hasattr(value, "__float__"):
        # as in torch; a text would be read as a number here, and stay a text for a schedule
        raise TypeError(f"{name}={value!r:.80} is a {type(value).__name__}; expected a number")
    try:
        return float(value)
    except (OverflowError, RuntimeError, TypeError):  # 10**400, a complex tensor
        raise ValueError(f"{name}={value!r:.80} is no number; expected a float") from None
