"""CPU update and norm of 16-bit gradients as compiled loops (`optim.update.built_kernels`).

One pass over memory with no scratch, and one call for all pieces that a kernel updates. The update
gives the bits of the Triton kernels, not those of the eager CPU path (docs/numerics.md).

[Note: the lock] A call holds no lock of Python's, and its threads never ask for one: a backward
that runs meanwhile goes on, and the update does not wait for it between tiles.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gemini.optim.rules.quantised import NOISE_KEY
from gemini.optim.rules.rule import UpdateRule
from gemini.optim.state.pieces import Piece

from .built_kernels import Kernel, Rows, kernels
from .changed_bits import mark
from .cpu_update import (
    NORM_TILE_NUMEL,
    ROW_NUMEL,
    CpuWorkers,
    StepInputs,
    TileSums,
    checked,
    sums_by_grad,
)
from .kernel_specs import KernelSpec, SquaresSpec, UpdateSpec


class Mix(NamedTuple):
    """Dtypes of a parameter and its gradient; whether it has a master, whole or split, and bits of
    what changes."""

    param: torch.dtype
    grad: torch.dtype
    has_master: bool
    is_split: bool = False
    marks: bool = False


class CompiledUpdate:
    """Rule's formula and sum of squares, compiled for each combination of dtypes.

    mixes: combinations that are compiled now; others are compiled when they are met.
    Raises KernelBuildError where a kernel cannot be built.
    """

    def __init__(self, rule: UpdateRule, mixes: Iterable[Mix]) -> None:
        self._rule = rule
        self._kernels: dict[KernelSpec, Kernel] = {}
        mixes = [Mix(*mix) for mix in mixes]
        specs: list[KernelSpec] = [self._spec(mix) for mix in mixes]
        specs += [_squares(mix.grad) for mix in mixes if mix.grad.itemsize == 2]
        self._prepare(list(dict.fromkeys(specs)))

    def _prepare(self, specs: Sequence[KernelSpec]) -> None:
        self._kernels.update(zip(specs, kernels(specs), strict=True))

    def _kernel(self, spec: KernelSpec) -> Kernel:
        if spec not in self._kernels:
            self._prepare([spec])
        return self._kernels[spec]

    def _spec(self, mix: Mix) -> UpdateSpec:
        return UpdateSpec(self._rule, *mix)

    def update(self, workers: CpuWorkers, pieces: Sequence[Piece], inputs: StepInputs) -> None:
        """Update all pieces by one step, with as many threads as there are workers."""
        assert inputs.rounding_seed is None, "refused when the optimizer was made"
        rows: dict[Mix, Rows] = defaultdict(Rows)
        written: list[Tensor] = []
        apart: list[tuple[Piece, Tensor]] = []  # whose loops over quantised planes have no flags
        scalars, noisy = _Scalars(self._rule, inputs), self._rule.layout.is_quantised
        for piece in pieces:
            master = () if piece.master is None else (piece.master,)
            changed = (piece.param, *master, *piece.planes)
            has_master, is_split = piece.master is not None, piece.is_split
            marks = piece.changed is not None
            if marks and noisy:
                apart.append((piece, piece.param.clone()))
                marks = False
            mix = Mix(piece.param.dtype, piece.grad.dtype, has_master, is_split, marks)
            bits = () if not marks or piece.changed is None else (piece.changed,)
            numbers = (0, piece.counter + NOISE_KEY, piece.step, piece.first) if noisy else ()
            columns = (piece.grad, *changed, *bits)
            rows[mix].add(columns, piece.param.numel(), scalars.of(piece), numbers)
            written += changed
        ready = [(self._kernel(self._spec(mix)), of_mix) for mix, of_mix in rows.items()]
        for kernel, of_mix in ready:  # not before all of them are there
            kernel(of_mix, workers.num_threads)
        torch.autograd.graph.increment_version(written)  # the library does not
        for piece, before in apart:
            if piece.changed is not None:
                mark(piece.changed, before, piece.param)

    def tile_sums(self, workers: CpuWorkers, grads: Sequence[Tensor], norm_type: float) -> TileSums:
        """Sums as of `cpu_update.tile_sums`; the kernel sums squares of 16-bit gradients.

        Rows, tiles and checks are the same: only the order of sums within a row differs.
        """
        by_kernel = [norm_type == 2 and grad.dtype.itemsize == 2 for grad in grads]
        others = [grad for grad, ours in zip(grads, by_kernel, strict=True) if not ours]
        halves = [grad for grad, ours in zip(grads, by_kernel, strict=True) if ours]
        sums = iter(sums_by_grad(workers, others, norm_type))
        squares = iter(self._squares_of(workers, halves))
        found = [next(squares if ours else sums) for ours in by_kernel]
        return checked(grads, found, norm_type)

    def _squares_of(self, workers: CpuWorkers, grads: Sequence[Tensor]) -> list[list[float]]:
        """fp64 sum of squares of every tile of every gradient [n]."""
        counts = [-(-grad.numel() // NORM_TILE_NUMEL) for grad in grads]
        found = torch.empty(sum(counts), dtype=torch.float64).split(counts)
        rows: dict[torch.dtype, Rows] = defaultdict(Rows)
        for grad, sums in zip(grads, found, strict=True):
            rows[grad.dtype].add((grad, sums), grad.numel())
        for dtype, of_dtype in rows.items():
            self._kernel(_squares(dtype))(of_dtype, workers.num_threads)
        return [sums.tolist() for sums in found]


class _Scalars:
    """Scalars of kernels for a piece: of the step, and of the piece's group and step count."""

    def __init__(self, rule: UpdateRule, inputs: StepInputs) -> None:
        self._rule = rule
        self._scale = (inputs.factor, inputs.limit)
        self._found: dict[tuple[object, int], tuple[float, ...]] = {}

    def of(self, piece: Piece) -> tuple[float, ...]:
        key = piece.hyper, piece.step
        if key not in self._found:
            self._found[key] = (*self._scale, *self._rule.values(*key))
        return self._found[key]


def _squares(grad: torch.dtype) -> SquaresSpec:
    return SquaresSpec(grad, ROW_NUMEL, NORM_TILE_NUMEL)
