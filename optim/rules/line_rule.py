"""Rules whose state of a matrix is a number for every row and every column."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .lines import Factors, Stack, has_lines
from .rule import NormRule
from .state_layout import Columns


class LineRule(NormRule):
    """Rule with one plane, a variance: of a matrix it is computed where it is needed, from the
    `Factors` of a step, and is no state. Hyperparameters have fields `factored` and `factors`, and
    a `floor` of the mean of rows."""

    def columns(self, shapes: Sequence[Sequence[int]]) -> Columns:
        """Planes of every parameter: those without lines have the plane."""
        own = frozenset(self.layout.names)
        return Columns(tuple(frozenset() if has_lines(shape) else own for shape in shapes))

    def given(
        self, planes: Sequence[Tensor], hyper: Any, first: int, param: Tensor
    ) -> Sequence[Tensor]:
        """Inputs in place of `planes`, in an update of elements from `first` of a parameter, [n]
        `param`."""
        if hyper.factors is None:
            return planes
        return (hyper.factors.variance(first, param.numel(), param.device),)

    def share(self, hyper: Any, step: int) -> float:
        """Share of a step's squares in their averages."""
        raise NotImplementedError

    def begun(self, hyper: Any, dtype: torch.dtype) -> Any:
        """Hyperparameters of a parameter in a step that is computed in `dtype`."""
        return hyper

    def factored(self, hyper: Any, stack: Stack, rows: Tensor, columns: Tensor) -> Any:
        """Hyperparameters of a parameter with these lines: averages of squares [matrices, rows] and
        [matrices, columns]."""
        wide = rows.double()
        means = wide.mean(1, keepdim=True).clamp_(min=hyper.floor)
        factors = Factors(stack, (wide / means).to(rows.dtype), columns)
        return hyper._replace(factored=True, factors=factors)
