"""Specs of the compiled CPU path's kernels, as values: each knows the C++ of its loop."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from gemini.optim.rules.rule import UpdateRule
from gemini.optim.rules.split_master import join, remainder_of, tie_sign, untied

from .changed_bits import marking_tile
from .cpp_loops import element_type, library, traced_tile, widened
from .quantised_loop import NUMBERS, grouped_tile

TILE_NUMEL = 1 << 18  # of an update: what a thread takes at once
LANES = 64  # sums of squares side by side, whatever the processor's vectors are


@dataclass(frozen=True)
class UpdateSpec:
    """Update of [n] elements in place, by one rule.

    Columns: grad, visible, master where there is one, and the planes. Scalars: a factor and a
    limit of the gradient, then the rule's coefficients. is_split: the master column is the
    remainder that a bf16 `visible` lacks. Quantised planes: see `quantised_loop`. marks: a last
    column has the bits of elements of `visible` that changed; planes are not quantised.
    """

    rule: UpdateRule
    visible: torch.dtype
    grad: torch.dtype
    has_master: bool
    is_split: bool = False
    marks: bool = False

    @property
    def name(self) -> str:
        """Readable part of a file's name."""
        dtypes = f"{dtype_name(self.visible)}-{dtype_name(self.grad)}"
        master = "-split" if self.is_split else "-master" if self.has_master else ""
        return f"{self.rule.name}-{dtypes}{master}{'-marks' * self.marks}"

    @cached_property
    def source(self) -> str:
        """C++ of the loop. Raises NotImplementedError where the rule's formula cannot be one."""
        given, rule = [self.grad, self.visible], self.rule
        if self.has_master:
            given.append(torch.int16 if self.is_split else torch.float32)
        planes = [torch.float32] * len(rule.layout.planes)
        scalars = [2, len(rule.coefficient_names)]
        if self.marks:
            found = traced_tile(self._flagging, scalars, [*given, *planes, torch.bool])
            tile, columns = marking_tile(found), len(given) + 1
        else:
            tile, columns = traced_tile(self.update, scalars, [*given, *planes]), len(given)
        if rule.layout.is_quantised:
            tile = grouped_tile(tile, [dtype.itemsize for dtype in given], rule.layout)
            columns += len(rule.layout.stored().planes) + NUMBERS
        else:
            columns += len(planes)
        return library(tile, columns=columns, scalars=sum(scalars), tile_numel=TILE_NUMEL)

    @property
    def _keeper(self) -> int | None:
        """Plane whose sign keeps the ties of masters."""
        layout = self.rule.layout
        if self.is_split and not layout.is_quantised:
            return layout.names.index(layout.tie_keeper)
        return None

    def _flagging(
        self, scale: Tensor, coefficients: Tensor, grad: Tensor, visible: Tensor, *rest: Tensor
    ) -> None:
        """`update`, to be traced, with flags in the last column."""
        before = _bits(visible)
        new = self.update(scale, coefficients, grad, visible, *rest[:-1])
        rest[-1].copy_(_bits(new.to(self.visible)) != before)

    def update(
        self, scale: Tensor, coefficients: Tensor, grad: Tensor, visible: Tensor, *rest: Tensor
    ) -> Tensor:
        """Update to be traced: grad in fp32 times scale[0], within +-scale[1]; then the formula.

        Returns the new parameter, fp32.
        """
        param, planes = (rest[0], rest[1:]) if self.has_master else (visible.float(), rest)
        grad = (grad.float() * scale[0]).clamp(-scale[1], scale[1])
        before, keeper = list(planes), self._keeper
        if self.is_split:
            param = join(visible, rest[0], None if keeper is None else planes[keeper])
        if keeper is not None:
            before[keeper] = planes[keeper].abs()
        new, *state = self.rule.updated(param, grad, before, coefficients)
        if self.has_master and self.rule.layout.is_quantised:
            new = untied(new)
        if keeper is not None:
            state[keeper] = (state[keeper].view(torch.int32) | tie_sign(new)).view(torch.float32)
        if self.is_split:
            rest[0].copy_(remainder_of(new))
        elif self.has_master:
            rest[0].copy_(new)
        visible.copy_(new)
        for plane, values in zip(planes, state, strict=True):
            plane.copy_(values)
        return new


@dataclass(frozen=True)
class SquaresSpec:
    """Sums of squares of tiles of gradients [n], to fp64 [tiles].

    Columns: grad, sums. The squares of a row are summed in fp32, in an order of its own; rows in
    fp64, one after the other.
    """

    grad: torch.dtype
    row_numel: int
    tile_numel: int

    @property
    def name(self) -> str:
        """Readable part of a file's name."""
        return f"squares-{dtype_name(self.grad)}"

    @cached_property
    def source(self) -> str:
        """C++ of the loop."""
        element = widened(self.grad, "grad[begin + i + j]")
        tile = _SQUARES.format(
            lanes=LANES, row=self.row_numel, type=element_type(self.grad), element=element
        )
        return library(tile, columns=2, scalars=0, tile_numel=self.tile_numel)


KernelSpec = UpdateSpec | SquaresSpec

_SQUARES = """\
static void tile(const int64_t* columns, const float*, int64_t first, int64_t n) {{
  const {type}* grad = (const {type}*)columns[0] + first;
  double sum = 0;
  for (int64_t begin = 0; begin < n; begin += {row}) {{
    const int64_t numel = std::min<int64_t>({row}, n - begin);
    float lanes[{lanes}] = {{0}};
    int64_t i = 0;
    for (; i + {lanes} <= numel; i += {lanes})
      for (int j = 0; j < {lanes}; j++) {{ const float x = {element}; lanes[j] += x * x; }}
    for (int j = 0; j < numel - i; j++) {{ const float x = {element}; lanes[j] += x * x; }}
    for (int half = {lanes} / 2; half > 0; half /= 2)
      for (int j = 0; j < half; j++) lanes[j] += lanes[j + half];
    sum += lanes[0];
  }}
  ((double*)columns[1])[first / TILE] = sum;
}}
"""


def _bits(values: Tensor) -> Tensor:
    """Bits of 16 or 32-bit elements, int32, and no view of them."""
    if values.dtype.itemsize == 2:
        return values.view(torch.int16).to(torch.int32)
    return values.view(torch.int32) + 0


def dtype_name(dtype: torch.dtype) -> str:
    """Name of a dtype, as `"bfloat16"`."""
    return str(dtype).removeprefix("torch.")
