"""Lines: state of a matrix that is a number for every row and every column, the same on every
rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gemini.optim.rules.lines import LineSums, has_lines, stack_of

LINES = ("row_var", "col_var")  # as torch.optim.Adafactor calls them


class Lines:
    """Averages of squared gradients of rows [..., r, 1] and of columns [..., 1, c] of parameters
    that have two dimensions or more, in host memory. The averages of a step replace them when it
    counts (`commit`)."""

    def __init__(
        self, shapes: Sequence[Sequence[int]] = (), dtype: torch.dtype = torch.float32
    ) -> None:
        self.dtype = dtype
        self._of = {
            i: (
                torch.zeros(*shape[:-1], 1, dtype=dtype),
                torch.zeros(*shape[:-2], 1, shape[-1], dtype=dtype),
            )
            for i, shape in enumerate(shapes)
            if has_lines(shape)
        }
        self._stacks = {i: stack_of(shapes[i]) for i in self._of}
        self._next: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def tensors(self) -> list[Tensor]:
        """All of them, in order of parameters."""
        return [line for lines in self._of.values() for line in lines]

    def shown(self, param: int) -> dict[str, Tensor]:
        """Averages by name, as they are kept; none of a parameter without lines."""
        return dict(zip(LINES, self._of.get(param, ()), strict=False))

    def load(self, param: int, given: Mapping[str, Any]) -> None:
        """Load averages; parameters without any begin anew."""
        for name, line in self.shown(param).items():
            value = given.get(name)
            line.zero_() if value is None else line.copy_(value)

    def sums(self, taken: Sequence[bool], largest: Sequence[float]) -> dict[int, LineSums]:
        """Sums of no element yet, of the parameters in `taken` that have lines. largest: see
        `LineSums`, by parameter."""
        return {i: LineSums(stack, largest[i]) for i, stack in self._stacks.items() if taken[i]}

    def begin(self) -> None:
        """Begin a step: averages of a step that did not count are forgotten."""
        self._next.clear()

    def advance(self, param: int, sums: LineSums, share: float) -> tuple[Tensor, Tensor]:
        """Averages of this step, with this share of its own squares: [matrices, rows] and
        [matrices, columns]."""
        averages = []
        for line, mean in zip(self._of[param], sums.means(), strict=True):
            old = line.double().view(mean.shape)
            averages.append(((mean - old) * share + old).to(self.dtype))
        rows, columns = self._next[param] = averages[0], averages[1]
        return rows, columns

    def commit(self, params: Sequence[int]) -> None:
        """Let the step count, which has updated these parameters."""
        for param in params:
            for line, new in zip(self._of.get(param, ()), self._next.pop(param, ()), strict=False):
                line.copy_(new.view(line.shape))
