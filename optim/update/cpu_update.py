"""Update and gradient norm of CPU tensors: cache-sized tiles of torch's vectorised operators.

[Note: one fork-join] A step hands whole pieces to a few workers, each single-threaded, and joins
once. OpenMP inside the pieces would join thousands of times, and collapse next to a busy process.

Bytes per element of an update with bf16 gradient, fp32 master and bf16 copy: 28 (2 + 12 read,
12 + 2 written); the upcast gradient lives in a scratch tile that stays in cache. A split master is
joined in such a tile, too: then 26 (2 + 2 + 10 read, 10 + 2 written).
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from gemini.optim.rules.clipping import Clip, combined
from gemini.optim.rules.formulas import noise, round_stochastic
from gemini.optim.rules.rule import UpdateRule, Works
from gemini.optim.state.deferred_signals import DeferredSignals, wait_all
from gemini.optim.state.pieces import Piece

T = TypeVar("T")
R = TypeVar("R")

TILE_NUMEL = 1 << 19  # 2 MiB of fp32: the scratch tile stays in cache; smaller ones cost more
# in handing the interpreter lock from worker to worker (docs/log.md)
BARE_TILE_NUMEL = 1 << 22  # where nothing is kept in cache between operators
NORM_TILE_NUMEL = 1 << 20
STRIP_NUMEL = 1 << 18  # of 16-bit gradients, widened in cache for their norm
ROW_NUMEL = 1 << 10  # summed in fp32, which is exact to 1e-7; rows are summed in fp64


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Changes that one step makes to each gradient on its way in, and to each parameter at last."""

    factor: float = 1.0  # multiplies gradients: unscale and clip in one
    limit: float = math.inf  # clamps them, after `factor`
    rounding_seed: int | None = None  # bf16 parameters without a master are rounded at random

    @classmethod
    def clipping(
        cls, clip: Clip, power_sum: float, scale: float, rounding_seed: int | None = None
    ) -> StepInputs:
        """Inputs for gradients that carry a loss scale, and whose norm comes from `power_sum`."""
        factor = clip.factor(clip.norm(power_sum) / scale) / scale
        return cls(factor, clip.max_value, rounding_seed)

    @property
    def changes_gradients(self) -> bool:
        return self.factor != 1.0 or self.limit != math.inf


NOTHING_CHANGED = StepInputs()


class CpuWorkers:
    """Pool of a few threads, each of which runs torch operators single-threaded."""

    def __init__(self, num_threads: int | None = None) -> None:
        self.num_threads = num_threads or default_num_threads()
        self._local = threading.local()
        self._start()

    def _start(self) -> None:
        self._process = os.getpid()
        self._pool = ThreadPoolExecutor(self.num_threads, thread_name_prefix="optim")
        main_threads = torch.get_num_threads()
        ready = threading.Barrier(self.num_threads)
        with DeferredSignals():  # a handler that raised in `submit` would leave its locks taken
            count = self.num_threads
            wait_all([self._pool.submit(_single_threaded, ready) for _ in range(count)])
        torch.set_num_threads(main_threads)  # the workers' setting leaks into threads to come

    def map(self, work: Callable[[T], R], tasks: Sequence[T]) -> list[R]:
        """Map `work` over all tasks, each taken by the next free worker; results in task order.

        A signal in between is delivered when all tasks are done: an update is whole or not begun.
        """
        if self._process != os.getpid():  # forked: threads stayed behind
            self._start()
        results: list[R | None] = [None] * len(tasks)
        positions = iter(range(len(tasks)))  # shared: `next` is atomic under the interpreter lock

        held = [(work, tasks)]

        def take() -> None:
            do, on = held[0]
            with torch.no_grad():
                for i in positions:
                    results[i] = do(on[i])

        count = min(self.num_threads, len(tasks))
        with DeferredSignals():
            wait_all([self._pool.submit(take) for _ in range(count)])
        held.clear()  # a worker may hold `take` a little longer, and gradients with it
        return results  # type: ignore[return-value]

    def scratch(self, name: str, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Scratch memory [numel] of the calling worker, reused by its next task."""
        name = f"{name} {dtype}"
        tile: Tensor | None = getattr(self._local, name, None)
        if tile is None or tile.numel() < numel:
            tile = torch.empty(max(numel, TILE_NUMEL), dtype=dtype)
            setattr(self._local, name, tile)
        return tile if tile.numel() == numel else tile[:numel]

    def close(self) -> None:
        self._pool.shutdown(wait=True)


def default_num_threads() -> int:
    """Number of the process's cores, divided among the ranks on this node."""
    cores = len(os.sched_getaffinity(0))
    return max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def _single_threaded(ready: threading.Barrier) -> None:
    torch.set_num_threads(1)
    torch.get_num_threads()  # ends this thread's lazy set-up, which would undo the line above
    ready.wait()  # so that every thread of the pool gets one of these


def update(
    workers: CpuWorkers, rule: UpdateRule, pieces: Sequence[Piece], inputs: StepInputs
) -> None:
    """Update all pieces by one step."""

    def work(run: Sequence[Piece]) -> None:
        for tile in run:
            if tile.changed is None:
                _update_tile(workers, rule, tile, inputs)
            else:
                _update_marking(workers, rule, tile, inputs)

    workers.map(work, _runs(pieces, inputs.changes_gradients, rule.layout.is_quantised))


def _runs(pieces: Sequence[Piece], changes_gradients: bool, quantised: bool) -> list[list[Piece]]:
    """Tiles of pieces, small ones together, so that no task is all overhead.

    They are cut here and not by the workers: every operator, a slice too, makes a worker hand on
    the interpreter lock.
    """
    runs: list[list[Piece]] = []
    room = 0
    for piece in pieces:
        as_it_is = piece.grad.dtype == _computed_in(piece) and not changes_gradients
        needs_scratch = quantised or not as_it_is
        tile_numel = TILE_NUMEL if needs_scratch else BARE_TILE_NUMEL
        for tile in piece.tiles(tile_numel):
            numel = tile.param.numel()
            if numel > room:
                runs.append([])
                room = tile_numel
            runs[-1].append(tile)
            room -= numel
    return runs


def _computed_in(piece: Piece) -> torch.dtype:
    """dtype of an update: fp64 for fp64 parameters, else fp32."""
    return torch.float64 if piece.param.dtype == torch.float64 else torch.float32


def _update_tile(workers: CpuWorkers, rule: UpdateRule, tile: Piece, inputs: StepInputs) -> None:
    grad, visible, dtype = tile.grad, tile.param, _computed_in(tile)
    if grad.dtype != dtype or inputs.changes_gradients:
        grad = workers.scratch("grad", grad.numel(), dtype).copy_(grad)
        if inputs.factor != 1.0:
            grad.mul_(inputs.factor)
        if inputs.limit != math.inf:
            grad.clamp_(-inputs.limit, inputs.limit)
    if rule.layout.is_quantised:
        _update_quantised(rule, tile, grad, inputs.rounding_seed)
        return
    if tile.is_split:
        _update_split(workers, rule, tile, grad)
        return
    if tile.master is not None:
        param = tile.master
    elif visible.dtype == dtype:
        param = visible
    else:
        param = workers.scratch("param", visible.numel()).copy_(visible)
    planes: Sequence[Tensor] = tile.planes
    if rule.works is Works.ON_PLACES:
        planes = rule.given(planes, tile.hyper, tile.first, param)
    rule.update(param, grad, planes, tile.hyper, tile.step)
    if param is not visible:
        show(param, tile, inputs.rounding_seed)


def _update_marking(workers: CpuWorkers, rule: UpdateRule, tile: Piece, inputs: StepInputs) -> None:
    """Update a tile, and set the bits of what has changed of what the model sees."""
    from .changed_bits import mark

    assert tile.changed is not None
    visible = tile.param
    before = workers.scratch("before", visible.numel(), visible.dtype).copy_(visible)
    _update_tile(workers, rule, tile, inputs)
    mark(tile.changed, before, visible)


def show(param: Tensor, tile: Piece, rounding_seed: int | None) -> None:
    """Set the parameter that the model sees from fp32 `param` [n]."""
    visible = tile.param
    if rounding_seed is not None and visible.dtype == torch.bfloat16:
        random = noise(rounding_seed, tile.counter, tile.step, tile.first, visible.numel())
        round_stochastic(param, random.to(param.device), visible)
    else:
        visible.copy_(param)  # rounds to nearest even, while the tile is in cache


def _update_quantised(
    rule: UpdateRule, tile: Piece, grad: Tensor, rounding_seed: int | None
) -> None:
    """Update a tile whose planes are decoded before and encoded after; see `StateLayout.codec`."""
    from gemini.optim.rules.quantised import state_noise
    from gemini.optim.rules.split_master import join, remainder_of, untied

    codec, numel = rule.layout.codec, tile.param.numel()
    planes = [plane[:numel] for plane in codec.decoded(tile.planes, rule.layout)]
    if tile.is_split and tile.master is not None:
        param = join(tile.param, tile.master, None)
    elif tile.master is not None:
        param = tile.master
    else:
        param = tile.param.float()  # itself, where it is fp32
    rule.update(param, grad, planes, tile.hyper, tile.step)
    if tile.master is not None:
        param.copy_(untied(param))
    random = state_noise(rounding_seed or 0, tile.counter, tile.step, tile.first, numel)
    codec.encode(planes, tile.planes, rule.layout, random)
    if tile.is_split and tile.master is not None:
        tile.master.copy_(remainder_of(param))
    if param is not tile.param:
        show(param, tile, rounding_seed if tile.master is None else None)


def _update_split(workers: CpuWorkers, rule: UpdateRule, tile: Piece, grad: Tensor) -> None:
    """Update a tile whose master is joined in scratch memory, and split again afterwards; see
    `optim.rules.split_master`."""
    from gemini.optim.rules.split_master import SIGN, TIE, TIE_MASK

    assert tile.master is not None
    keeper = tile.planes[rule.layout.names.index(rule.layout.tie_keeper)].view(torch.int32)
    bits = workers.scratch("bits", keeper.numel(), torch.int32)
    spare = workers.scratch("spare", keeper.numel(), torch.int32)
    master = bits.view(torch.float32).copy_(tile.param)
    bits.sub_(torch.bitwise_right_shift(keeper, 31, out=spare), alpha=1 << 16)  # -1 at a tie
    bits.add_(spare.copy_(tile.master))
    keeper.bitwise_and_(~SIGN)
    rule.update(master, grad, tile.planes, tile.hyper, tile.step)
    tile.master.copy_(bits)
    torch.bitwise_and(bits, TIE_MASK, out=spare).bitwise_xor_(TIE).sub_(1)
    keeper.bitwise_or_(spare.bitwise_and_(SIGN))
    tile.param.copy_(master)


@dataclass(frozen=True, slots=True)
class GradSum:
    """Result of one pass over gradients."""

    power_sum: float  # fp64: of |g|^p, or the largest |g|; NaN where a gradient is not finite
    first_nonfinite: int | None  # index of the first tensor with a NaN or an Inf


@dataclass(frozen=True, slots=True)
class TileSums:
    """Result of one pass over gradients, before tiles are summed up."""

    sums: list[float]  # of |g|^p, or the largest |g|, of every tile; to be `combined`
    first_nonfinite: int | None  # index of the first tensor with a NaN or an Inf


def grad_sum(workers: CpuWorkers, grads: Sequence[Tensor], norm_type: float = 2.0) -> GradSum:
    """Sum up `tile_sums`."""
    return summed(tile_sums(workers, grads, norm_type), norm_type)


def summed(found: TileSums, norm_type: float) -> GradSum:
    """Sum over all tiles, correctly rounded in any order."""
    if found.first_nonfinite is not None:
        return GradSum(math.nan, found.first_nonfinite)
    return GradSum(combined(found.sums, norm_type), None)


def tile_sums(workers: CpuWorkers, grads: Sequence[Tensor], norm_type: float = 2.0) -> TileSums:
    """Sum of |g|^p over all of `grads` (each [n], any float type), and the overflow check.

    norm_type: p, or inf, which takes the maximum. Rows of 1024 are summed in fp32, and in
    fp64 from there on, correctly rounded over tiles. Tiles are cut by position in each tensor, so
    neither the number of workers nor a tier changes a bit.
    """
    return checked(grads, sums_by_grad(workers, grads, norm_type), norm_type)


def tiles_of(grad: Tensor) -> Sequence[Tensor]:
    """Tiles of a gradient [n], by position."""
    return grad.split(NORM_TILE_NUMEL) if grad.numel() else ()


def sums_by_grad(
    workers: CpuWorkers, grads: Sequence[Tensor], norm_type: float
) -> list[list[float]]:
    """Sums of tiles by gradient; one is not finite where an element is not, or fp32 overflows."""
    tiles = [tile for grad in grads for tile in tiles_of(grad)]
    found = torch.zeros(len(tiles), dtype=torch.float64)
    results = found.unbind()

    def work(position: int) -> None:
        norms = _row_norms(workers, tiles[position], norm_type).double()
        if norm_type == math.inf:
            torch.amax(norms, dim=0, out=results[position])
        else:
            torch.sum(norms.pow_(norm_type), dim=0, out=results[position])

    workers.map(work, range(len(tiles)))
    sums = iter(found.tolist())
    return [[next(sums) for _ in tiles_of(grad)] for grad in grads]


def checked(
    grads: Sequence[Tensor], found: Sequence[Sequence[float]], norm_type: float
) -> TileSums:
    """Check the sums of tiles: one that is not finite is summed again in fp64, if its tile is."""
    owner = [i for i, sums in enumerate(found) for _ in sums]
    tiles = [tile for grad in grads for tile in tiles_of(grad)]
    sums = [value for sums in found for value in sums]
    suspects = [i for i, value in enumerate(sums) if not math.isfinite(value)]
    for i in suspects:
        if not bool(torch.isfinite(tiles[i]).all()):
            return TileSums([], owner[i])
        sums[i] = _fp64_sum(tiles[i], norm_type)  # all finite: fp32 overflowed
    return TileSums(sums, None)


def _row_norms(workers: CpuWorkers, values: Tensor, norm_type: float) -> Tensor:
    """Norm of every row of `values` [n], the last one shorter; fp32, or fp64 of fp64."""
    wide = values.dtype.itemsize >= 4
    strips = (values,) if wide else values.split(STRIP_NUMEL)
    norms = []
    for strip in strips:
        if not wide:
            strip = workers.scratch("grad", strip.numel()).copy_(strip)
        whole = strip.numel() - strip.numel() % ROW_NUMEL
        if whole:
            rows = strip[:whole].view(-1, ROW_NUMEL)
            norms.append(torch.linalg.vector_norm(rows, norm_type, dim=1))
        if whole < strip.numel():
            norms.append(torch.linalg.vector_norm(strip[whole:], norm_type).view(1))
    return norms[0] if len(norms) == 1 else torch.cat(norms)


def _fp64_sum(values: Tensor, norm_type: float) -> float:
    wide = values.double()
    return float(wide.abs().pow_(norm_type).sum())
