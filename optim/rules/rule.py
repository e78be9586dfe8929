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
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor

from .state_layout import Plane, StateLayout

STRIP_NUMEL = 1 << 16  # of an eager update: what operators make on their way stays in cache


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
    Raises ValueError for an option that has no such plane, or that cannot be kept so.
    """

    name: str
    layout: StateLayout
    options: ClassVar[Mapping[str, Any]]  # with the defaults of the class; flags are bools
    ranges: ClassVar[Mapping[str, tuple[float, float]]] = {}  # of options; others are [0, inf)
    optional: ClassVar[Mapping[str, Plane]] = {}  # by option
    over_norms = False  # an update needs norms of whole parameters; see `NormRule`
    over_matrices = False  # an update needs all of some parameters; see `matrix_rule.py`
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
        return _hyper_type(tuple(values))(**values)

    def hyper_row(self, hyper: Any) -> tuple[float, ...]:
        """Row of the kernels' hyperparameter table."""
        return tuple(map(float, hyper))

    def values(self, hyper: Any, step: int) -> tuple[float, ...]:
        """Coefficients in their order, in fp64; `step` counts from 1."""
        return tuple(map(float, self.coefficients(hyper, step).values()))

    def updated(
        self, param: Tensor, grad: Tensor, planes: Sequence[Tensor], values: Tensor
    ) -> list[Tensor]:
        """New [param, *planes] [n] by the formula, in the dtype of `param`, from all coefficients
        [k]."""
        c = SimpleNamespace(**dict(zip(self.coefficient_names, values.unbind(), strict=True)))
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
        values = _values(self, hyper, step, param.dtype)
        strips = [tensor.split(STRIP_NUMEL) for tensor in (param, grad, *planes)]
        for one, its_grad, *its_planes in zip(*strips, strict=True):
            new = self.updated(one, its_grad, its_planes, values)
            for old, value in zip((one, *its_planes), new, strict=True):
                old.copy_(value)


class NormRule(UpdateRule):
    """Rule whose step of a parameter is as long as its norm says.

    `direction` is a second function as `formula`: what a parameter moves along, [n]. `trust`, a
    field of the hyperparameters that is no option, is the ratio of both norms.
    """

    over_norms = True
    direction: Callable[..., tuple[Tensor, Mapping[str, Tensor]]]

    def hyper(self, group: Mapping[str, Any]) -> Any:
        """Hyperparameters as of `UpdateRule`, with a `trust` of 1."""
        hyper = super().hyper(group)
        return _hyper_type((*hyper._fields, "trust"))(*hyper, 1.0)

    def moved_along(
        self, param: Tensor, grad: Tensor, planes: Sequence[Tensor], hyper: Any, step: int
    ) -> Tensor:
        """Direction [n] of an update that is not made: nothing is changed."""
        values = _values(self, hyper, step, param.dtype).to(param.device)
        c = SimpleNamespace(**dict(zip(self.coefficient_names, values.unbind(), strict=True)))
        given = dict(zip(self.layout.names, planes, strict=True))
        found: Tensor = self.direction(param, grad, c, **given)[0]
        return found

    def given(
        self, planes: Sequence[Tensor], hyper: Any, first: int, param: Tensor
    ) -> Sequence[Tensor]:
        """Inputs of an update of elements from `first` of a parameter, in place of its planes."""
        return planes

    def trusting(self, hyper: Any, weight_norm: float, direction_norm: float, numel: int) -> Any:
        """Hyperparameters of one parameter, whose norms these are; of zeros the trust is 1."""
        if weight_norm == 0 or direction_norm == 0:
            return hyper
        return hyper._replace(trust=weight_norm / direction_norm)


@functools.lru_cache(maxsize=64)
def _values(rule: UpdateRule, hyper: Any, step: int, dtype: torch.dtype) -> Tensor:
    return torch.tensor(rule.values(hyper, step), dtype=dtype)


@functools.cache
def _hyper_type(names: tuple[str, ...]) -> Any:
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
