"""How an engine's shards are measured and updated: by the CPU path, or by Triton on the device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from gemini.chunk.layout import ChunkLayout, ChunkSpec
from gemini.chunk.storage import Chunk
from gemini.placement.plan import Plan, Staging, UpdatePath
from gemini.runtime.comm.communicator import Communicator
from gemini.runtime.memory.backend import Backend
from gemini.units import ParamId
from kernels_triton.control_fields import BAD, LOSS_SCALE, SUM
from optim.rules.clipping import Clip, combined
from optim.rules.config import UpdateFacts
from optim.rules.control_vector import Scaler
from optim.rules.report import StepReport
from optim.rules.rule import UpdateRule
from optim.rules.state_layout import StateLayout
from optim.state.memory import Memory
from optim.state.pieces import Updater
from optim.update.compiled_path import Mix
from optim.update.cpu_path import StepInputs
from optim.update.staging import DeviceStaging, Reserved
from optim.update.updaters import cpu_updater

if TYPE_CHECKING:
    from optim.update.grad_tiles import GradTiles
    from optim.update.triton_path import TritonUpdater


class StepPath(Protocol):
    """One update path of one rank's shards."""

    merges_parameters: bool  # neighbours with the same hyperparameters may be one piece

    @property
    def staging(self) -> DeviceStaging | None:
        """Through which passes what the device updates; None where the host updates."""
        ...

    def reserve(self, staging: Staging) -> None:
        """As much of it as a plan says."""
        ...

    def measure(self, chunks: Sequence[Chunk], norm_type: float) -> tuple[float, ParamId | None]:
        """Sum of |g|^p over the chunks' gradients, and the first parameter that is not finite."""
        ...

    def measure_leaving(self, chunk: Chunk, grad: Tensor) -> object:
        """What `measure` wants to know of a gradient [S], while it is still on the device."""
        ...

    def begin(
        self, hypers: Sequence[Any], present: Sequence[bool], power_sum: float, clip: Clip
    ) -> Updater:
        """The updater of a step that all ranks agreed on. Moves the loss scale on."""
        ...

    def count(self, present: Sequence[bool]) -> None:
        """The step was taken: raise the step counts of these parameters."""
        ...

    def undo(self) -> None:
        """The step that was begun failed: counts and loss scale are those of before."""
        ...

    @property
    def steps(self) -> list[int]:
        """Step count of every parameter; may wait for the device."""
        ...

    @property
    def counts(self) -> Tensor:
        """The same as a tensor [params], which a checkpoint may fill."""
        ...

    def set_groups(self, group_of: Sequence[int | None]) -> None:
        """The param group of every parameter."""
        ...

    def close(self) -> None: ...


def updated_by_kernels(plan: Plan, backend: Backend) -> bool:
    """Who carries a plan's updates out: kernels of the device `RESIDENT` and `STREAM`, the host
    `CPU`; the host all of them where it is the device."""
    return plan.off_device is UpdatePath.STREAM and backend.updates_by_triton


@dataclass(frozen=True, slots=True)
class _Tiles:
    """Of some gradients: sum of |g|^p of every tile, and the first parameter that is not finite."""

    sums: list[float]
    first_nonfinite: ParamId | None


class CpuStepPath:
    """Gradients and state in host memory."""

    staging = None

    def __init__(
        self,
        rule: UpdateRule,
        layout: ChunkLayout,
        comm: Communicator,
        cpu_path: str,
        scaler: Scaler,
        rounding_seed: int | None,
        *,
        has_master: bool,
    ) -> None:
        """Collective where the update may be compiled: either all ranks do, or none."""
        self._layout = layout
        self._rank = comm.rank
        self._scaler = scaler
        self._rounding_seed = rounding_seed
        # random bits belong to a parameter's elements, and each has its own
        self.merges_parameters = rounding_seed is None
        trained = [spec for spec in layout.params if spec.trainable]
        numel = sum(spec.numel for spec in trained)
        facts = UpdateFacts(numel, has_master, rounds_at_random=rounding_seed is not None)
        mixes = _mixes([spec.dtype for spec in trained], has_master)
        self._updater = cpu_updater(rule, cpu_path, facts, mixes, partial(_any_failure, comm))
        self.counts = torch.zeros(len(layout.params), dtype=torch.float32)

    def reserve(self, staging: Staging) -> None:
        """Nothing passes through a device."""

    def measure(self, chunks: Sequence[Chunk], norm_type: float) -> tuple[float, ParamId | None]:
        sums: list[float] = []  # of tiles; the total is correctly rounded, in any order
        for run in _loadable(chunks):
            found = run[0].gradient.found if norm_type == 2 else None
            if found is None:
                found = self._tiles(run, [chunk.gradient.load() for chunk in run], norm_type)
            if found.first_nonfinite is not None:
                return math.nan, found.first_nonfinite
            sums += found.sums
        return combined(sums, norm_type), None

    def measure_leaving(self, chunk: Chunk, grad: Tensor) -> _Tiles:
        return self._tiles([chunk], [grad], 2.0)

    def _tiles(self, chunks: Sequence[Chunk], grads: Sequence[Tensor], norm_type: float) -> _Tiles:
        found = self._updater.tile_sums(grads, norm_type)
        first = found.first_nonfinite
        if first is None:
            return _Tiles(found.sums, None)
        return _Tiles([], self._first_nonfinite(chunks[first], grads[first]))

    def _first_nonfinite(self, chunk: Chunk, grad: Tensor) -> ParamId:
        for part in self._layout.shard_parts(chunk.spec, self._rank):
            if not bool(torch.isfinite(grad[part.offset : part.offset + part.numel]).all()):
                return part.param
        raise AssertionError("a chunk has a non-finite gradient outside its parameters")

    def begin(
        self, hypers: Sequence[Any], present: Sequence[bool], power_sum: float, clip: Clip
    ) -> Updater:
        scale = self._scaler.read().scale
        factor = clip.factor(clip.norm(power_sum) / scale) / scale
        return replace(
            self._updater, inputs=StepInputs(factor, clip.max_value, self._rounding_seed)
        )

    def count(self, present: Sequence[bool]) -> None:
        self.counts += torch.tensor(present, dtype=torch.float32)

    def undo(self) -> None:
        """Nothing was counted yet."""

    @property
    def steps(self) -> list[int]:
        return [int(count) for count in self.counts.tolist()]

    def set_groups(self, group_of: Sequence[int | None]) -> None:
        """Pieces carry their hyperparameters with them."""

    def close(self) -> None:
        self._updater.workers.close()


def _mixes(dtypes: Sequence[str], has_master: bool) -> list[Mix]:
    """Gradients come in their parameter's dtype, and are fp32 where backwards accumulate."""
    return [
        (getattr(torch, dtype), grad, has_master)
        for dtype in dict.fromkeys(dtypes)
        for grad in dict.fromkeys((getattr(torch, dtype), torch.float32))
    ]


def _any_failure(comm: Communicator, failure: str | None) -> str | None:
    """That of the first rank that has one, on every rank. Collective."""
    said = comm.gather_objects(failure)
    found = [f"rank {rank}: {text}" for rank, text in enumerate(said) if text is not None]
    return failure if comm.world_size == 1 else next(iter(found), None)


class TritonStepPath:
    """Gradients and resident state on the device; step counts too."""

    merges_parameters = False

    def __init__(
        self,
        rule: UpdateRule,
        layout: ChunkLayout,
        state: StateLayout,
        group_of: Sequence[int | None],
        rank: int,
        scaler: Scaler,
        memory: Memory,
        *,
        stochastic: bool,
    ) -> None:
        from optim.update.triton_path import TritonUpdater  # Triton is imported where it is used

        self._updater = TritonUpdater(
            rule,
            state,
            [group or 0 for group in group_of],
            scaler.control.device,
            scaler,
            memory=memory,
            stochastic=stochastic,
        )
        self._layout = layout
        self._rank = rank
        self._memory = memory
        self._grads = self._tiles_of([spec for spec in layout.chunks if spec.trainable])
        self._names = [spec.name for spec in layout.params]
        self._before = (self._updater.steps, self._updater.control)  # the step that is under way

    @property
    def updater(self) -> TritonUpdater:
        return self._updater

    @property
    def staging(self) -> DeviceStaging:
        return self._updater.staging

    def reserve(self, staging: Staging) -> None:
        reserved = Reserved()
        if staging.count:
            reserved = Reserved(
                staging.count, staging.state_bytes, staging.param_bytes, staging.grad_bytes
            )
        self._updater.reserve(reserved)

    def measure(self, chunks: Sequence[Chunk], norm_type: float) -> tuple[float, ParamId | None]:
        self.submit_measure(chunks, Clip(norm_type=norm_type))
        total, bad = self._updater.read_measure()
        return (total, None) if bad is None else (math.nan, bad)

    def measure_leaving(self, chunk: Chunk, grad: Tensor) -> object:
        if chunk.spec.id not in self._grads.runs:
            return None
        self._measure({chunk.spec.id: grad})
        return self._grads, self._updater.norm_type

    def submit_measure(self, chunks: Sequence[Chunk], clip: Clip) -> None:
        """Measure on the device, for `begin_unread`; the host waits for nothing."""
        self._updater.set_limits(clip)
        if any(chunk.spec.id not in self._grads.runs for chunk in chunks):  # trained since then
            known = [spec for spec in self._layout.chunks if spec.id in self._grads.runs]
            new = [c.spec for c in chunks if c.spec.id not in self._grads.runs]
            self._grads = self._tiles_of([*known, *new])
        self._measure({c.spec.id: grad for c in chunks if (grad := c.grad) is not None})
        known_by = self._grads, clip.norm_type
        for chunk in chunks:
            if chunk.grad is None and chunk.gradient.found != known_by:
                self._measure({chunk.spec.id: chunk.gradient.load()})
                chunk.gradient.found = known_by
        self._grads.keep([chunk.spec.id for chunk in chunks])
        self._updater.measured(self._grads.tables)

    def submit_vote(self, comm: Communicator) -> None:
        """Add up what all ranks measured, on the device."""
        if comm.world_size > 1:
            self._updater.vote(comm.rank, comm.world_size, lambda v: comm.all_reduce(v).wait())

    def _measure(self, grads: dict[int, Tensor]) -> None:
        self._grads.measure(grads, self._updater.norm_type, self._updater.control)

    def _tiles_of(self, chunks: Sequence[ChunkSpec]) -> GradTiles:
        """Chunks of one dtype are measured in one launch."""
        from optim.update.grad_tiles import GradTiles, Part

        return GradTiles(
            {
                chunk.id: [
                    Part(part.offset, part.numel, part.param)
                    for part in self._layout.shard_parts(chunk, self._rank)
                ]
                for chunk in sorted(chunks, key=lambda chunk: chunk.dtype)
            },
            self._memory,
        )

    def unread_norm(self, clip: Clip) -> Tensor:
        """Of the gradients that were measured last, unscaled: fp64 0-d on the device."""
        self._updater.finish_measure()
        control = self._updater.control
        total = clip.norm_of(control[SUM])
        return torch.where(control[BAD] > 0, torch.nan, total / control[LOSS_SCALE])

    def begin(
        self, hypers: Sequence[Any], present: Sequence[bool], power_sum: float, clip: Clip
    ) -> Updater:
        self._before = (self._updater.steps.clone(), self._updater.control.clone())
        scale = self._updater.scaler.read().scale
        self._updater.set_limits(clip.with_max_norm(clip.norm(power_sum) / scale))
        self._updater.set_measure(power_sum)
        return self.begin_unread(hypers, present)

    def begin_unread(self, hypers: Sequence[Any], present: Sequence[bool]) -> Updater:
        """Begin with what `submit_measure` finds: clip and skip are decided on the device."""
        self._updater.set_present([i for i, there in enumerate(present) if there])
        self._updater.begin(hypers, with_norm=True)
        return self._updater

    def report(self) -> StepReport:
        """Of the step that was begun unread; nothing is waited for before a field is read."""
        from optim.update.triton_path import DeviceOutcome

        outcome = DeviceOutcome(self._updater, self._names)
        return StepReport(outcome, update_path=self._updater.name)

    def count(self, present: Sequence[bool]) -> None:
        """The prologue did."""

    def undo(self) -> None:
        steps, control = self._before
        self._updater.steps.copy_(steps)
        self._updater.control.copy_(control)

    @property
    def counts(self) -> Tensor:
        counts: Tensor = self._updater.steps
        return counts

    @property
    def steps(self) -> list[int]:
        return [int(count) for count in self.counts.tolist()]

    def set_groups(self, group_of: Sequence[int | None]) -> None:
        self._updater.set_groups([group or 0 for group in group_of])

    def close(self) -> None:
        return


def _loadable(chunks: Sequence[Chunk]) -> list[list[Chunk]]:
    """Chunks whose gradients are on the device, then one by one those that must be brought."""
    here, away = [], []
    for chunk in chunks:
        if chunk.grad is not None:
            here.append(chunk)
        else:
            away.append([chunk])
    return [here] * bool(here) + away
