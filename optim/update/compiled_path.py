"""The CPU update and the norm of 16-bit gradients as compiled loops (`optim.update.built_kernels`).

One pass over memory with no scratch, one fork-join a call. The update gives the bits of the Triton
kernels, not those of the eager CPU path (docs/numerics.md).

[Note: calls] A kernel holds the interpreter lock, so long runs are cut into calls of some 5 ms:
threads that feed disks get their turn between them (docs/log.md has what it costs).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from optim.rules.rule import UpdateRule
from optim.state.pieces import Piece

from .built_kernels import Kernel, kernels, threads
from .cpu_path import (
    NORM_TILE_NUMEL,
    ROW_NUMEL,
    CpuWorkers,
    StepInputs,
    TileSums,
    checked,
    sums_by_grad,
)
from .kernel_specs import KernelSpec, SquaresSpec, UpdateSpec, dtype_name

CALL_NUMEL = 1 << 23  # of an update
NORM_CALL_NUMEL = 1 << 25
Mix = tuple[torch.dtype, torch.dtype, bool]  # of what is updated, of its gradient; has a master


class CompiledUpdate:
    """A rule's formula and the sum of squares, compiled for each combination of dtypes.

    mixes: those that are made ready now; others are when they are met.
    Raises KernelBuildError where they cannot be had.
    """

    def __init__(self, rule: UpdateRule, mixes: Iterable[Mix]) -> None:
        self._rule = rule
        self._kernels: dict[KernelSpec, Kernel] = {}
        mixes = list(mixes)
        specs: list[KernelSpec] = [self._spec(*mix) for mix in mixes]
        specs += [_squares(grad) for _, grad, _ in mixes if grad.itemsize == 2]
        self._prepare(list(dict.fromkeys(specs)))

    def _prepare(self, specs: Sequence[KernelSpec]) -> None:
        self._kernels.update(zip(specs, kernels(specs), strict=True))

    def _kernel(self, spec: KernelSpec) -> Kernel:
        if spec not in self._kernels:
            self._prepare([spec])
        return self._kernels[spec]

    def _spec(self, visible: torch.dtype, grad: torch.dtype, has_master: bool) -> UpdateSpec:
        return UpdateSpec.of(self._rule, visible, grad, has_master)

    def update(self, workers: CpuWorkers, pieces: Sequence[Piece], inputs: StepInputs) -> None:
        """One step over all pieces, with as many threads as there are workers."""
        assert inputs.rounding_seed is None, "refused when the optimizer was made"
        scale = torch.tensor([inputs.factor, inputs.limit], dtype=torch.float32)
        runs = joined(pieces)
        ready = [self._kernel(self._spec(*_mix(piece))) for piece in runs]  # before any is updated
        with threads(workers.num_threads):
            for kernel, piece in zip(ready, runs, strict=True):
                self._update_piece(kernel, piece, scale)

    def _update_piece(self, kernel: Kernel, piece: Piece, scale: Tensor) -> None:
        row = self._rule.coefficients(piece.hyper, piece.step)
        coefficients = torch.tensor(row, dtype=torch.float64).to(torch.float32)
        for part in piece.tiles(CALL_NUMEL):
            master = () if part.master is None else (part.master,)
            written = (part.param, *master, *part.planes)
            kernel(scale, coefficients, part.grad, *written)
            torch.autograd.graph.increment_version(written)  # the library does not

    def tile_sums(self, workers: CpuWorkers, grads: Sequence[Tensor], norm_type: float) -> TileSums:
        """`cpu_path.tile_sums`; squares of 16-bit gradients are summed by the kernel.

        Rows and tiles are the same, and so is what is found: only the order within a row differs.
        """
        by_kernel = [norm_type == 2 and grad.dtype.itemsize == 2 for grad in grads]
        others = [grad for grad, ours in zip(grads, by_kernel, strict=True) if not ours]
        sums = iter(sums_by_grad(workers, others, norm_type))
        with threads(workers.num_threads):
            found = [
                self._squares_of(grad) if ours else next(sums)
                for grad, ours in zip(grads, by_kernel, strict=True)
            ]
        return checked(grads, found, norm_type)

    def _squares_of(self, grad: Tensor) -> list[float]:
        """fp64 sum of squares of every tile of `grad` [n]."""
        kernel = self._kernel(_squares(grad.dtype))
        num_tiles = -(-grad.numel() // NORM_TILE_NUMEL)
        rows = torch.zeros(num_tiles * (NORM_TILE_NUMEL // ROW_NUMEL), dtype=torch.float64)
        whole = grad.numel() - grad.numel() % ROW_NUMEL
        for start in range(0, whole, NORM_CALL_NUMEL):
            (sums,) = kernel(grad[start : min(start + NORM_CALL_NUMEL, whole)])
            rows[start // ROW_NUMEL :][: len(sums)] = sums
        if whole < grad.numel():
            rows[whole // ROW_NUMEL] = grad[whole:].float().square_().sum()
        found: list[float] = rows.view(num_tiles, NORM_TILE_NUMEL // ROW_NUMEL).sum(1).tolist()
        return found


def _mix(piece: Piece) -> Mix:
    return piece.param.dtype, piece.grad.dtype, piece.master is not None


def _squares(grad: torch.dtype) -> SquaresSpec:
    return SquaresSpec(dtype_name(grad), ROW_NUMEL)


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
