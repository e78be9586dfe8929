"""Muon: momentum, of matrices made orthogonal (Jordan et al. 2024; Liu et al. 2025).

    B <- B + (1 - momentum) * (g - B)
    G = g + momentum * (B - g) with Nesterov's momentum, else B          both as torch.optim.Muon
    O = `orthogonal(G)`, of a whole matrix
    p <- p * (1 - lr * weight_decay) - `adjusted_rate(lr, ...)` * O

The first two lines and the last one are elementwise, and are updates of shards; the third needs all
of a matrix at one place (`optim.matrices`). Parameters of other groups are updated by another rule.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from .orthogonal import DTYPES, FORMS, RATES, Gram, adjusted_rate, orthogonal
from .rule import UpdateRule, Works, flag, number, scalar
from .state_layout import Columns, Plane, StateLayout

MOMENTUM = Plane("momentum_buffer", "float32")
_MOST_STEPS = 100  # as torch has it


class MatrixOptions(NamedTuple):
    """Options of a group whose matrices are made orthogonal."""

    lr: float
    weight_decay: float
    momentum: float
    nesterov: bool
    coefficients: tuple[float, ...]
    eps: float
    steps: int
    adjust_lr_fn: str | None
    form: str
    dtype: str
    split: tuple[int, tuple[int, ...]] | None  # a dimension, and sizes along it

    def parts(self, whole: Tensor) -> list[Tensor]:
        """Views of the matrices of a parameter: of a stack one by one, cut as `split` says."""
        stack = [whole] if whole.dim() == 2 else list(whole.flatten(0, -3).unbind())
        if self.split is None:
            return stack
        dim, sizes = self.split
        return [part for matrix in stack for part in matrix.split(list(sizes), dim)]

    def rate(self, rows: int, columns: int) -> float:
        """Rate of a matrix of this shape."""
        return adjusted_rate(self.lr, self.adjust_lr_fn, rows, columns)

    def rate_of(self, shape: Sequence[int]) -> float:
        """Rate of a parameter: that of its first matrix."""
        rows, columns = shape[-2:]
        if self.split is None:
            return self.rate(rows, columns)
        dim, (first, *_) = self.split
        return self.rate(first, columns) if dim == 0 else self.rate(rows, first)


class Intake(NamedTuple):
    """Part of an update that takes gradients into the momentum; directions come out in place of
    parameters."""

    momentum: float
    nesterov: bool


class Outlet(NamedTuple):
    """Part of an update that moves weights along directions, which come in place of gradients."""

    decay: float
    rate: float


class MatrixRule(UpdateRule):
    """Rule that keeps an fp32 momentum for groups with `use_muon`; for the others what `others`
    keeps.

    A parameter has the planes of its group (`columns`).
    """

    name = "muon"
    works = Works.ON_MATRICES
    options: ClassVar = {}

    def __init__(self, others: UpdateRule) -> None:
        self.others = others
        # no plane keeps ties: a block need not have it
        planes = (Plane(plane.name, plane.dtype) for plane in others.layout.planes)
        self.layout = StateLayout((MOMENTUM, *planes))

    def for_groups(self, groups: Sequence[Mapping[str, Any]]) -> MatrixRule:
        return self

    @property
    def elementwise(self) -> UpdateRule:
        return self.others

    def columns(
        self,
        shapes: Sequence[Sequence[int]],
        group_of: Sequence[int | None],
        groups: Sequence[Mapping[str, Any]],
    ) -> Columns:
        own, others = frozenset({MOMENTUM.name}), frozenset(self.others.layout.names)
        planes = [own if group["use_muon"] else others for group in groups]
        return Columns(tuple(None if group is None else planes[group] for group in group_of))

    def hyper(self, group: Mapping[str, Any]) -> Any:
        """`MatrixOptions`, or the hyperparameters of `others`, whose options are named `adamw_...`
        where both rules have them. Raises ValueError naming the first that is out of range."""
        if not group["use_muon"]:
            own = {name: group[name] for name in self.others.options if name in group}
            theirs = {name: group[f"adamw_{name}"] for name in ("lr", "eps")}
            theirs = {name: value for name, value in theirs.items() if value is not None}
            return self.others.hyper({**self.others.options, **own, **theirs})
        for name, known in (("adjust_lr_fn", RATES), ("ns_form", FORMS), ("ns_dtype", [*DTYPES])):
            if group[name] not in known:
                raise ValueError(f"{name}={group[name]!r}; expected one of {list(known)}")
        coefficients = tuple(scalar("ns_coefficients", one) for one in group["ns_coefficients"])
        steps = group["ns_steps"]
        if len(coefficients) != 3:
            raise ValueError(f"ns_coefficients={coefficients}; expected three numbers")
        if steps not in range(_MOST_STEPS):
            raise ValueError(f"ns_steps={steps!r}; expected a whole number below {_MOST_STEPS}")
        split = group["split"]
        return MatrixOptions(
            number(group, "lr", 0.0, open_high=True),
            number(group, "weight_decay", 0.0, open_high=True),
            number(group, "momentum", 0.0, 1.0, open_high=False),
            flag(group, "nesterov"),
            coefficients,
            number(group, "eps", 0.0, open_high=True),
            int(steps),
            group["adjust_lr_fn"],
            group["ns_form"],
            group["ns_dtype"],
            None if split is None else (int(split[0]), tuple(map(int, split[1]))),
        )

    def is_kept(self, hyper: Any, columns: Columns, param: int) -> bool:
        own = [MOMENTUM] if isinstance(hyper, MatrixOptions) else self.layout.planes[1:]
        return all(columns.has(param, plane.name) for plane in own)

    def update(
        self, param: Tensor, grad: Tensor, planes: Sequence[Tensor], hyper: Any, step: int
    ) -> None:
        """Do the part of an update that `hyper` is of, by the operators of torch.optim.Muon."""
        if isinstance(hyper, Intake):
            buffer = planes[0].lerp_(grad, 1 - hyper.momentum)
            if hyper.nesterov:
                torch.lerp(grad, buffer, hyper.momentum, out=param)
            else:
                param.copy_(buffer)
        elif isinstance(hyper, Outlet):
            param.mul_(hyper.decay).add_(grad, alpha=-hyper.rate)
        else:
            own = planes[-len(self.others.layout.planes) :]
            # faster operators are the host's; on a device the formula is computed
            update = UpdateRule.update if param.is_cuda else type(self.others).update
            update(self.others, param, grad, own, hyper, step)


def directed(hyper: MatrixOptions, whole: Tensor, gram: Gram | None = None) -> None:
    """Make the matrices of a parameter orthogonal, in place; where a matrix has another rate than
    the first, it is multiplied with the ratio of both. gram: see `orthogonal`."""
    first = hyper.rate_of(whole.shape)
    for part in hyper.parts(whole):
        found = orthogonal(
            part, hyper.coefficients, hyper.steps, hyper.eps,
            form=hyper.form, dtype=DTYPES[hyper.dtype], gram=gram,
        )  # fmt: skip
        rows, columns = part.shape
        if first and (ratio := hyper.rate(rows, columns) / first) != 1:
            found = found * ratio
        part.copy_(found)
