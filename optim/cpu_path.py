"""The update and the gradient norm of CPU tensors: cache-sized tiles of torch's vectorised ops.

[Note: one fork-join] A step hands whole pieces to a few workers, each single-threaded, and joins
once. OpenMP inside the pieces would join thousands of times, and collapse beside a busy process.

Bytes per element of an update with bf16 gradient, fp32 master and bf16 copy: 28 (2 + 12 read,
12 + 2 written); the upcast gradient lives in a scratch tile that stays in cache.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from gemini.units import PARAM_ALIGN_NUMEL, align_up

from .rules import UpdateRule
from .step_thread import wait_all

T = TypeVar("T")

TILE_NUMEL = 1 << 19  # 2 MiB of fp32: the scratch tile stays in cache; smaller ones cost more
# in handing the interpreter lock from worker to worker (docs/log.md)


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of elements of one group and one step count, all planes of it. All tensors are [n]."""

    param: Tensor  # what the model sees: fp32, or the 16-bit copy that is written
    grad: Tensor  # fp32 or 16-bit; not changed
    master: Tensor | None  # fp32; None where `param` is updated itself
    planes: tuple[Tensor, ...]  # in StateLayout order
    hyper: Any
    step: int  # counts from 1
    counter: int  # index of the parameter; of the first where neighbours are one piece

    def cut(self, start: int, end: int) -> Piece:
        """Elements [start, end) of every tensor."""
        tile = slice(start, end)
        return Piece(
            self.param[tile],
            self.grad[tile],
            None if self.master is None else self.master[tile],
            tuple(plane[tile] for plane in self.planes),
            self.hyper,
            self.step,
            self.counter,
        )

    def belonging_to(self, hyper: Any, step: int, counter: int) -> Piece:
        """The same tensors, of another parameter."""
        return replace(self, hyper=hyper, step=step, counter=counter)


class CpuWorkers:
    """A few threads, each of which runs torch operators single-threaded."""

    def __init__(self, num_threads: int | None = None) -> None:
        self.num_threads = num_threads or default_num_threads()
        self._pool = ThreadPoolExecutor(self.num_threads, thread_name_prefix="optim")
        self._local = threading.local()
        main_threads = torch.get_num_threads()
        ready = threading.Barrier(self.num_threads)
        wait_all([self._pool.submit(_single_threaded, ready) for _ in range(self.num_threads)])
        torch.set_num_threads(main_threads)  # the workers' setting leaks into threads to come

    def map(self, work: Callable[[T], Any], tasks: Sequence[T]) -> list[Any]:
        """`work` over all tasks, taken in order as workers become free; results in task order.

        An interrupt in between is raised when all tasks are done: an update is whole or not begun.
        """
        return wait_all([self._pool.submit(self._without_grad, work, task) for task in tasks])

    def scratch(self, name: str, numel: int) -> Tensor:
        """fp32 [numel] of the calling worker, reused by its next task."""
        tile: Tensor | None = getattr(self._local, name, None)
        if tile is None or tile.numel() < numel:
            tile = torch.empty(max(numel, TILE_NUMEL), dtype=torch.float32)
            setattr(self._local, name, tile)
        return tile[:numel]

    def close(self) -> None:
        self._pool.shutdown(wait=True)

    @staticmethod
    def _without_grad(work: Callable[[T], Any], task: T) -> Any:
        with torch.no_grad():
            return work(task)


def default_num_threads() -> int:
    """The process's cores, divided among the ranks on this node."""
    cores = len(os.sched_getaffinity(0))
    return max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def _single_threaded(ready: threading.Barrier) -> None:
    torch.set_num_threads(1)
    torch.get_num_threads()  # ends this thread's lazy set-up, which would undo the line above
    ready.wait()  # so that every thread of the pool gets one of these


def update(workers: CpuWorkers, rule: UpdateRule, pieces: Sequence[Piece], factor: float) -> None:
    """One step over all pieces. `factor` multiplies the gradients (unscale and clip in one)."""

    def work(run: Sequence[Piece]) -> None:
        for piece in run:
            _update_piece(workers, rule, piece, factor)

    total = sum(piece.param.numel() for piece in pieces)
    workers.map(work, _runs(pieces, _run_numel(workers, total)))


def _run_numel(workers: CpuWorkers, total: int) -> int:
    """Elements of one task: a few tasks a worker, so that a worker that is held up gets fewer."""
    return max(TILE_NUMEL // 4, align_up(-(-total // (4 * workers.num_threads)), TILE_NUMEL // 4))


def _runs(pieces: Sequence[Piece], run_numel: int) -> list[list[Piece]]:
    """Pieces as runs of about `run_numel` elements, in order; a piece that is longer is cut."""
    runs: list[list[Piece]] = []
    room = 0
    for piece in pieces:
        numel = piece.param.numel()
        start = 0
        while start < numel:
            if room < PARAM_ALIGN_NUMEL:
                runs.append([])
                room = run_numel
            end = min(numel, start + align_up(room, PARAM_ALIGN_NUMEL))
            runs[-1].append(piece if end - start == numel else piece.cut(start, end))
            room -= end - start
            start = end
    return runs


def _update_piece(workers: CpuWorkers, rule: UpdateRule, piece: Piece, factor: float) -> None:
    numel = piece.param.numel()
    for start in range(0, numel, TILE_NUMEL):
        tile = slice(start, min(start + TILE_NUMEL, numel))
        grad, visible = piece.grad[tile], piece.param[tile]
        if grad.dtype != torch.float32 or factor != 1.0:
            grad = workers.scratch("grad", grad.numel()).copy_(grad)
            if factor != 1.0:
                grad.mul_(factor)
        if piece.master is not None:
            param = piece.master[tile]
        elif visible.dtype == torch.float32:
            param = visible
        else:
            param = workers.scratch("param", visible.numel()).copy_(visible)
        rule.update(param, grad, [plane[tile] for plane in piece.planes], piece.hyper, piece.step)
        if param is not visible:
            visible.copy_(param)  # rounds to nearest even, while the tile is in cache


@dataclass(frozen=True, slots=True)
class GradSum:
    """What one pass over gradients yields."""

    sum_of_squares: float  # fp64; not finite where a gradient is not, or its square overflows
    first_nonfinite: int | None  # index of the first tensor with a NaN or an Inf


def grad_sum(workers: CpuWorkers, grads: Sequence[Tensor]) -> GradSum:
    """Sum of squares over all of `grads` (each [n], any float type), and the overflow check.

    Squares are summed in fp32 within tiles and in fp64, correctly rounded, over tiles. Tiles are
    cut by position in each tensor, so neither the number of workers nor a tier changes a bit.
    """
    tiles = [
        (index, start)
        for index, grad in enumerate(grads)
        for start in range(0, grad.numel(), TILE_NUMEL)
    ]
    run = max(1, -(-len(tiles) // (4 * workers.num_threads)))

    def work(some: Sequence[tuple[int, int]]) -> list[float]:
        return [_tile_sum(workers, grads[i][start : start + TILE_NUMEL]) for i, start in some]

    found = workers.map(work, [tiles[i : i + run] for i in range(0, len(tiles), run)])
    sums: list[float] = [value for some in found for value in some]
    if all(math.isfinite(value) for value in sums):
        return GradSum(math.fsum(sums), None)
    suspects = sorted({tiles[i][0] for i, value in enumerate(sums) if not math.isfinite(value)})
    for index in suspects:
        if not bool(torch.isfinite(grads[index]).all()):
            return GradSum(math.nan, index)
    # all finite: some square overflowed fp32
    exact = (
        value if math.isfinite(value) else _fp64_sum(grads[index][start : start + TILE_NUMEL])
        for value, (index, start) in zip(sums, tiles, strict=True)
    )
    return GradSum(math.fsum(exact), None)


def _tile_sum(workers: CpuWorkers, values: Tensor) -> float:
    squares = workers.scratch("grad", values.numel())
    if values.dtype != torch.float32:
        values = squares.copy_(values)
    # torch sums in cascade: exact to some 1e-7, where a dot product is off by 1e-5
    return float(torch.mul(values, values, out=squares).sum())


def _fp64_sum(values: Tensor) -> float:
    wide = values.double()
    return float(torch.dot(wide, wide))
