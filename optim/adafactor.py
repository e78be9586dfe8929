"""Adafactor: the update rule, and HybridAdafactor."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from gemini.optim.rules import formulas
from gemini.optim.rules.lines import AddSquares, Factors, LineSums, has_lines, stack_of
from gemini.optim.rules.measures import Measure, MeasuredParam, NormRule, Norms, Tile
from gemini.optim.rules.rule import Works, flag, number, pair
from gemini.optim.rules.state_layout import Columns, Plane, StateLayout

from .elementwise import ElementwiseOptimizer


class Lengths(NamedTuple):
    """Options of a group that say what norms of a parameter and of its direction are used for."""

    scale_parameter: bool
    least_rms: float
    d: float


class Factored(NamedTuple):
    """Options of a group, and the numbers that a step adds to them for a parameter.

    floor: eps[0]; -1 means the machine epsilon of the update dtype.
    """

    lr: float
    beta2_decay: float
    floor: float
    weight_decay: float
    maximize: bool
    relative_step: bool
    lengths: Lengths
    trust: float = 1.0
    factored: bool = False
    factors: Factors | None = None


class Lines(Measure):
    """Squares of the gradient of a matrix along its rows and columns.

    Averages of them are carried on, rows [..., r, 1] and columns [..., 1, c]; of both its variances
    are computed where they are needed.
    """

    def __init__(self, asked: MeasuredParam) -> None:
        super().__init__(asked)
        self._lines = LineSums(stack_of(asked.shape), asked.largest())
        self.sums = [self._lines.values]

    @classmethod
    def is_of(cls, shape: Sequence[int]) -> bool:
        return has_lines(shape)

    def add(self, tile: Tile) -> None:
        by: AddSquares | None = None
        if tile.grad.is_cuda:
            from gemini.kernels_triton.lines import add_line_squares

            by = add_line_squares
        self._lines.add(tile.grad, tile.first, by)
        self.sums = [self._lines.values]

    def found(self) -> Tensor:
        return self.sums[0]

    def told(self, found: Tensor) -> Any:
        asked, sums = self.asked, self._lines
        sums.values = found
        share = asked.step**asked.hyper.beta2_decay  # of this step's squares in the averages
        lines = []
        for (name, line), mean in zip(list(asked.carried.items()), sums.means(), strict=True):
            old = line.double().view(mean.shape)
            lines.append(((mean - old) * share + old).to(line.dtype))
            asked.carried[name] = lines[-1].view(line.shape)
        rows, columns = lines
        wide = rows.double()
        means = wide.mean(1, keepdim=True).clamp_(min=asked.hyper.floor)
        factors = Factors(sums.stack, (wide / means).to(rows.dtype), columns)
        return asked.hyper._replace(factored=True, factors=factors)


class AdafactorRule(NormRule):
    """Adafactor: fp32 averages of a matrix's rows and columns, a variance of any other parameter.

    The formulas are `formulas.adafactor` and `formulas.adafactor_direction`.
    """

    name = "adafactor"
    layout = StateLayout((Plane("variance", "float32"),))  # of a parameter that has no lines
    works = Works.ON_PLACES
    measures = (Lines, Norms)
    carried: ClassVar = {  # as torch.optim.Adafactor calls them
        "row_var": lambda shape: (*shape[:-1], 1) if has_lines(shape) else None,
        "col_var": lambda shape: (*shape[:-2], 1, shape[-1]) if has_lines(shape) else None,
    }
    options: ClassVar = {
        "lr": 1e-2, "beta2_decay": -0.8, "eps": (None, 1e-3), "d": 1.0, "weight_decay": 0.0,
        "maximize": False, "scale_parameter": True, "relative_step": True,
    }  # fmt: skip
    coefficients = staticmethod(formulas.adafactor_coefficients)
    formula = staticmethod(formulas.adafactor)
    direction = staticmethod(formulas.adafactor_direction)

    def hyper(self, group: Mapping[str, Any]) -> Factored:
        given = pair(group, "eps", "a number or None, and a number")
        eps = {f"eps[{i}]": value for i, value in enumerate(given)}
        return Factored(
            number(group, "lr", 0.0, open_high=True),
            number(group, "beta2_decay", -math.inf, 0.0, open_high=False),
            -1.0 if given[0] is None else number(eps, "eps[0]", 0.0, open_high=True),
            number(group, "weight_decay", 0.0, open_high=True),
            flag(group, "maximize"),
            flag(group, "relative_step"),
            Lengths(
                flag(group, "scale_parameter"),
                number(eps, "eps[1]", 0.0, open_high=True),
                number(group, "d", 1.0, open_high=True),
            ),
        )

    def hyper_row(self, hyper: Any) -> tuple[float, ...]:
        return super().hyper_row(hyper._replace(lengths=0.0, factors=0.0))

    def columns(
        self,
        shapes: Sequence[Sequence[int]],
        group_of: Sequence[int | None],
        groups: Sequence[Mapping[str, Any]],
    ) -> Columns:
        own = frozenset(self.layout.names)
        return Columns(tuple(frozenset() if has_lines(shape) else own for shape in shapes))

    def given(
        self, planes: Sequence[Tensor], hyper: Any, first: int, param: Tensor
    ) -> Sequence[Tensor]:
        if hyper.factors is None:
            return planes
        return (hyper.factors.variance(first, param.numel(), param.device),)

    def begun(self, hyper: Any, dtype: torch.dtype) -> Any:
        return hyper._replace(floor=torch.finfo(dtype).eps) if hyper.floor < 0 else hyper

    def trusting(self, hyper: Any, weight_norm: float, direction_norm: float, numel: int) -> Any:
        """Options with a rate by root mean squares: the weights', over how far the direction's is
        above d."""
        root, asked = math.sqrt(numel), hyper.lengths
        too_long = max(1.0, direction_norm / root / asked.d)
        scale = max(asked.least_rms, weight_norm / root) if asked.scale_parameter else 1.0
        return hyper._replace(trust=scale / too_long)


class HybridAdafactor(ElementwiseOptimizer):
    """Adafactor (Shazeer & Stern 2018) with the arguments of torch.optim.Adafactor; see
    `HybridAdam`.

    The state of a parameter of two dimensions or more is a number for every row and every column of
    its matrices (its last two dimensions), in host memory and the same on every rank; other
    parameters have a variance for every element. Matrices have no other state than fp32 masters. A
    step adds up squares of rows and columns over ranks, exactly, in one all-reduce, and norms in
    another; before an update it reads all state once more.

    lr: the largest rate relative to the root mean square of a parameter, of which the step count
        has a smaller one: min(lr, step^-0.5). eps: a floor of the root of a variance, None for the
        resolution of fp32, in which updates are computed, whatever the parameter's dtype; and the
        least root mean square. d: that of an update at most.
    scale_parameter, relative_step: as in transformers' Adafactor; without the first a rate is not
        relative to a parameter, without the second it is lr; weight decays by lr * weight_decay
        with any. With neither, and eps=(1e-30, 1e-3), these are the numbers of Trainer's
        "adafactor".

    Updates are by torch's operators on every device: there is no `cpu_path`. Raises ValueError for
    a parameter that torch has split; else as `HybridAdam`. Formula:
    `optim.rules.formulas.adafactor`.
    """

    rule = AdafactorRule
    without: ClassVar = frozenset({"cpu_path"})
