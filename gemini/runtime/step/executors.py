"""Executor of an engine's shards, and their gradients as runs that it measures."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

from gemini.chunk.layout import ChunkLayout
from gemini.chunk.storage import Chunk
from gemini.comm.communicator import Communicator
from gemini.optim.rules.config import UpdateFacts
from gemini.optim.rules.control_vector import ControlVector
from gemini.optim.rules.rule import UpdateRule
from gemini.optim.rules.state_layout import StateLayout
from gemini.optim.state.pieces import GradSegment
from gemini.optim.step.executor import Executor
from gemini.optim.step.executors import MatrixUpdates, make_executor
from gemini.optim.step.gradients import GradientRun
from gemini.optim.update.updaters import CpuUpdater, cpu_updater
from gemini.placement.plan import Plan, UpdatePath
from gemini.runtime.memory.backend import Backend
from gemini.runtime.sharding import Sharding
from gemini.units import WORLD

if TYPE_CHECKING:
    from gemini.optim.update.compiled_update import Mix


def updated_by_kernels(plan: Plan, backend: Backend) -> bool:
    """Whether kernels of the device carry out a plan's updates, and not the host.

    Kernels carry out `RESIDENT` and `STREAM`, the host `CPU`, and all three where it is the device.
    """
    return plan.off_device is UpdatePath.STREAM and backend.updates_by_triton


def make_shard_executor(
    sharding: Sharding,
    plan: Plan,
    control_vector: ControlVector,
    rule: UpdateRule,
    state: StateLayout,
    group_of: Sequence[int | None],
    runs: Sequence[GradientRun],
    cpu_path: str,
    matrices: MatrixUpdates | None = None,
    *,
    is_stage: bool,
) -> Executor:
    """Make the executor of the plan in use.

    state: the planes of all shards. runs: gradients of trained chunks. is_stage: of a pipeline.
    Collective where the update may be compiled: either all ranks compile it, or none.
    """
    settings = sharding.precision_settings
    by_kernels = updated_by_kernels(plan, sharding.backend)
    return make_executor(
        rule,
        group_of,
        control_vector,
        sharding.backend if by_kernels else None,
        partial(_cpu_updater, sharding, rule, state, cpu_path, is_stage),
        runs=runs,
        names=[spec.name for spec in sharding.layout.params],
        rounding_seed=None if settings.master_weights else settings.rounding_seed,
        matrices=matrices,
    )


def _cpu_updater(
    sharding: Sharding, rule: UpdateRule, state: StateLayout, cpu_path: str, is_stage: bool
) -> CpuUpdater:
    trained = [spec for spec in sharding.layout.params if spec.trainable]
    numel = sum(spec.numel for spec in trained)
    if is_stage or set(sharding.links) != {WORLD}:  # ranks have other parts of a model
        numel = max(sharding.comm.gather_objects(numel))
    at_random = not sharding.precision_settings.master_weights
    facts = UpdateFacts(numel, state.has_master, rounds_at_random=at_random)
    mixes = partial(_mixes, [spec.dtype for spec in trained], state)
    return cpu_updater(rule, cpu_path, facts, mixes, partial(_any_failure, sharding.comm))


def run_of(layout: ChunkLayout, chunk: Chunk) -> GradientRun:
    """Run of the gradient of this rank's shard."""
    return GradientRun(
        chunk.spec.id,
        chunk.spec.dtype,
        tuple(
            GradSegment(part.offset, part.numel, part.param)
            for part in layout.shard_segments(chunk.spec, chunk.rank)
        ),
        chunk.gradient,
        chunk.counts,
        chunk.has_replicas,
    )


def reserve_staging(executor: Executor, plan: Plan) -> None:
    """Reserve staging on the device, as large as the plan has it."""
    staging = plan.device_staging
    executor.reserve(staging.count, staging.state_bytes, staging.param_bytes, staging.grad_bytes)


def _mixes(dtypes: Sequence[str], state: StateLayout) -> list[Mix]:
    """List the mixes of dtypes that an update meets.

    Gradients have their parameter's dtype, or fp32 where backwards accumulate. bf16 parameters
    have split masters in some blocks and whole ones in others, where the layout splits.
    """
    from gemini.optim.update.compiled_update import Mix

    return [
        Mix(getattr(torch, dtype), grad, state.has_master, is_split)
        for dtype in dict.fromkeys(dtypes)
        for grad in dict.fromkeys((getattr(torch, dtype), torch.float32))
        for is_split in (False, True)[: 1 + state.splits(dtype)]
    ]


def _any_failure(comm: Communicator, failure: str | None) -> str | None:
    """Failure of the first rank that has one, on every rank. Collective."""
    said = comm.gather_objects(failure)
    found = [f"rank {rank}: {text}" for rank, text in enumerate(said) if text is not None]
    return failure if comm.world_size == 1 else next(iter(found), None)
