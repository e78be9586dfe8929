"""The CPU update as one compiled loop: `torch.compile` of the reference formula, where asked for.

One pass over memory with no scratch, one fork-join per run of neighbouring pieces. It needs a C++
compiler on the machine, some seconds at the first step, and about 200 MiB for the compiler itself;
so it is asked for (`cpu_path="compile"`) and never chosen silently. It gives the bits of the Triton
kernels, not those of the default CPU path (docs/numerics.md).
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .cpu_path import Piece, StepInputs
from .rules import UpdateRule


def compiler() -> str | None:
    """The C++ compiler that torch.compile would use here."""
    return shutil.which("g++") or shutil.which("clang++") or shutil.which("c++")


class CompiledUpdate:
    """A rule's formula, compiled once for each combination of dtypes."""

    def __init__(self, rule: UpdateRule) -> None:
        if compiler() is None:
            raise ValueError(
                'cpu_path="compile" needs a C++ compiler and none was found; install g++, '
                'or use cpu_path="eager"'
            )
        self._rule = rule
        self._with_master = torch.compile(self._update_master, dynamic=True, fullgraph=True)
        self._in_place = torch.compile(self._update_visible, dynamic=True, fullgraph=True)

    def update(self, pieces: Sequence[Piece], inputs: StepInputs) -> None:
        """One step over all pieces."""
        assert inputs.rounding_seed is None, "refused when the optimizer was made"
        scale = torch.tensor([inputs.factor, inputs.limit], dtype=torch.float32)
        for piece in joined(pieces):
            row = self._rule.coefficients(piece.hyper, piece.step)
            coefficients = torch.tensor(row, dtype=torch.float64).to(torch.float32)
            if piece.master is not None:
                self._with_master(
                    piece.param, piece.master, piece.grad, piece.planes, coefficients, scale
                )
            else:
                self._in_place(piece.param, piece.grad, piece.planes, coefficients, scale)

    def _update_master(
        self,
        visible: Tensor,
        master: Tensor,
        grad: Tensor,
        planes: Sequence[Tensor],
        coefficients: Tensor,
        scale: Tensor,
    ) -> None:
        new, *state = self._formula(master, _changed(grad, scale), *planes, coefficients)
        master.copy_(new)
        visible.copy_(new)
        for plane, values in zip(planes, state, strict=True):
            plane.copy_(values)

    def _update_visible(
        self,
        visible: Tensor,
        grad: Tensor,
        planes: Sequence[Tensor],
        coefficients: Tensor,
        scale: Tensor,
    ) -> None:
        new, *state = self._formula(visible.float(), _changed(grad, scale), *planes, coefficients)
        visible.copy_(new)
        for plane, values in zip(planes, state, strict=True):
            plane.copy_(values)

    @property
    def _formula(self) -> Callable[..., Sequence[Tensor]]:
        formula: Callable[..., Sequence[Tensor]] = self._rule.formula
        return formula


def _changed(grad: Tensor, scale: Tensor) -> Tensor:
    """fp32, times scale[0], within +-scale[1]."""
    return (grad.float() * scale[0]).clamp(-scale[1], scale[1])


def joined(pieces: Sequence[Piece]) -> list[Piece]:
    """Pieces that are neighbours in every memory, and alike otherwise, as one."""
    runs: list[Piece] = []
    for piece in pieces:
        if runs and _continues(runs[-1], piece):
            runs[-1] = _extended(runs[-1], piece.param.numel())
        else:
            runs.append(piece)
    return runs


def _tensors(piece: Piece) -> list[Tensor]:
    tensors = [piece.param, piece.grad, *piece.planes]
    return tensors if piece.master is None else [piece.master, *tensors]


def _continues(first: Piece, second: Piece) -> bool:
    if (first.hyper, first.step) != (second.hyper, second.step):
        return False
    pairs = zip(_tensors(first), _tensors(second), strict=True)
    return all(
        a.dtype == b.dtype
        and a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
        and a.storage_offset() + a.numel() == b.storage_offset()
        for a, b in pairs
    )


def _extended(piece: Piece, numel: int) -> Piece:
    def longer(tensor: Tensor) -> Tensor:
        return tensor.as_strided((tensor.numel() + numel,), (1,))

    master = None if piece.master is None else longer(piece.master)
    planes: tuple[Any, ...] = tuple(longer(plane) for plane in piece.planes)
    return Piece(
        longer(piece.param), longer(piece.grad), master, planes, piece.hyper, piece.step,
        piece.counter,
    )  # fmt: skip
