"""Measures: what a rule asks of whole parameters before it updates an element of them. Pure.

Blocks and ranks cut a parameter anywhere. So a measure is shown tile after tile of this rank's part
of a parameter, what it found is added to what the other ranks found, and the sum says with which
hyperparameters the parameter is updated (`optim.step.measuring`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from .rule import UpdateRule, hyper_type, values_of


class Tile(NamedTuple):
    """Elements of a parameter from `first`, in the dtype of updates, [n] each; to read."""

    grad: Tensor
    first: int
    param: Tensor | None = None  # None, and no planes, for a measure that is not `of_state`
    planes: Sequence[Tensor] = ()


class MeasuredParam(NamedTuple):
    """A parameter in a step, of which something is asked."""

    rule: Any
    hyper: Any
    step: int  # counts from 1
    shape: Sequence[int]
    largest: Callable[[], float]  # at least half of the largest magnitude in its gradient
    carried: dict[str, Tensor]  # its tensors of `UpdateRule.carried`, for `told` to replace


class Measure:
    """Sums over one parameter in one step.

    sums: fp64 tensors of what `add` was shown, where they were computed; those of all measures come
    to the host in one copy, before `found`. Empty for a measure that keeps none on a device.
    """

    of_state: ClassVar[bool] = False  # it looks at weights and planes: all state is read once more

    def __init__(self, asked: MeasuredParam) -> None:
        self.asked = asked
        self.sums: list[Tensor] = []

    @classmethod
    def is_of(cls, shape: Sequence[int]) -> bool:
        """Whether a parameter of this shape is measured."""
        return True

    def add(self, tile: Tile) -> None:
        raise NotImplementedError

    def found(self) -> Tensor:
        """[k] fp64 of the host, to be added to that of other ranks."""
        raise NotImplementedError

    def told(self, found: Tensor) -> Any:
        """Hyperparameters of the parameter, of which all ranks found [k] together."""
        raise NotImplementedError


class Norms(Measure):
    """Squares of weights and of the direction of a `NormRule`."""

    of_state = True

    def add(self, tile: Tile) -> None:
        rule, hyper, param = self.asked.rule, self.asked.hyper, tile.param
        assert param is not None
        planes = rule.given(tile.planes, hyper, tile.first, param)
        direction = rule.moved_along(param, tile.grad, planes, hyper, self.asked.step)
        self.sums.append(torch.stack([_squares(param), _squares(direction)]))  # of a tile

    def found(self) -> Tensor:
        tiles = torch.cat([*self.sums, torch.zeros(2, dtype=torch.float64)]).tolist()
        sums = [math.fsum(tiles[::2]), math.fsum(tiles[1::2])]
        return torch.tensor(sums, dtype=torch.float64)

    def told(self, found: Tensor) -> Any:
        weight, direction = (math.sqrt(squares) for squares in found.tolist())
        asked = self.asked
        return asked.rule.trusting(asked.hyper, weight, direction, math.prod(asked.shape))


def _squares(values: Tensor) -> Tensor:
    wide = values.double()
    return torch.dot(wide, wide)


class NormRule(UpdateRule):
    """Rule whose step of a parameter is as long as its norm says.

    `direction` is a second function as `formula`: what a parameter moves along, [n]. `trust`, a
    field of the hyperparameters that is no option, is the ratio of both norms.
    """

    measures: ClassVar[Sequence[type[Measure]]] = (Norms,)
    direction: Callable[..., tuple[Tensor, Mapping[str, Tensor]]]

    def hyper(self, group: Mapping[str, Any]) -> Any:
        """Hyperparameters as of `UpdateRule`, with a `trust` of 1."""
        hyper = super().hyper(group)
        return hyper_type((*hyper._fields, "trust"))(*hyper, 1.0)

    def moved_along(
        self, param: Tensor, grad: Tensor, planes: Sequence[Tensor], hyper: Any, step: int
    ) -> Tensor:
        """Direction [n] of an update that is not made: nothing is changed."""
        # in host memory, as an update has them: numbers of a launch, and no copies to a device
        c = self.named(values_of(self, hyper, step, param.dtype))
        given = dict(zip(self.layout.names, planes, strict=True))
        found: Tensor = self.direction(param, grad, c, **given)[0]
        return found

    def trusting(self, hyper: Any, weight_norm: float, direction_norm: float, numel: int) -> Any:
        """Hyperparameters of one parameter, whose norms these are; of zeros the trust is 1."""
        if weight_norm == 0 or direction_norm == 0:
            return hyper
        return hyper._replace(trust=weight_norm / direction_norm)
