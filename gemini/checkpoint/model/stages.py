"""The parts of a pipeline that one process has, as what it saves and loads.

A checkpoint of a pipeline is one of the whole model: each rank streams the runs of its parts, under
the names that their parameters have in it. So it loads at any number of stages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

from gemini.checkpoint.dcp.reader import RunFiller
from gemini.checkpoint.dcp.sharded import FlatRuns
from gemini.checkpoint.format.errors import CheckpointError
from gemini.checkpoint.format.keys import Keys
from gemini.ddp import GeminiDDP
from gemini.optim.base import TieredOptimizer
from gemini.runtime.pipeline.joint_target import JointTarget

from .state import RunState, RunVisitor, ShardedState, Snapshot

T = TypeVar("T")


def parts_of(model: nn.Module) -> list[GeminiDDP]:
    """The wrapped modules of this process in `model`: itself, or an `nn.ModuleList` of parts."""
    if isinstance(model, GeminiDDP):
        return [model]
    if isinstance(model, nn.ModuleList):
        parts = [part for part in model if isinstance(part, GeminiDDP)]
        if parts and len(parts) == len(model) and all(p.engine.together for p in parts):
            return parts
    return []


class StagesState(RunState):
    """Of several parts of a pipeline, as `ShardedState` is of one."""

    def __init__(
        self,
        parts: Sequence[GeminiDDP],
        optimizer: TieredOptimizer | None,
        keys: Keys,
        *,
        weights: bool,
        once: bool = False,
    ) -> None:
        """Raises CheckpointError where the optimizer has other parts."""
        if optimizer is not None:
            _check_parts(parts, optimizer)
        self._states = [
            ShardedState(part, optimizer, keys, weights=weights, once=once) for part in parts
        ]
        self._keys, self._with_weights = keys, weights
        self.names = [names for state in self._states for names in state.names]
        self.shapes: Mapping[str, torch.Size] = _merged([s.shapes for s in self._states])
        self.buffers: Mapping[str, Tensor] = _merged([s.buffers for s in self._states])
        self.planes = self._states[0].planes
        self.tensors: dict[str, FlatRuns] = {}
        before = 0  # runs in the stream
        for state in self._states:
            for key, tensor in state.tensors.items():
                order = [before + place for place in tensor.order]
                self.tensors[key] = FlatRuns(
                    tensor.size(), tensor.dtype, tensor.runs, order, tensor.region
                )
            before += sum(len(tensor.runs) for tensor in state.tensors.values())

    def step_counts(self) -> Mapping[str, Tensor]:
        return _merged([state.step_counts() for state in self._states])

    def visit(self, look: RunVisitor) -> None:
        for state in self._states:
            state.visit(look)

    def snapshot(self) -> Snapshot:
        return _Snapshots([state.snapshot() for state in self._states])

    def fill(self, put: RunFiller) -> None:
        for state in self._states:
            state.fill(put)


class _Snapshots(Snapshot):
    def __init__(self, snapshots: Sequence[Snapshot]) -> None:
        self._snapshots = snapshots

    def visit_memory(self, look: RunVisitor) -> None:
        for snapshot in self._snapshots:
            snapshot.visit_memory(look)

    def visit_disk(self, look: RunVisitor) -> None:
        for snapshot in self._snapshots:
            snapshot.visit_disk(look)

    def close(self) -> None:
        for snapshot in self._snapshots:
            snapshot.close()


def _merged(found: Sequence[Mapping[str, T]]) -> dict[str, T]:
    return {name: value for part in found for name, value in part.items()}


def _check_parts(parts: Sequence[GeminiDDP], optimizer: TieredOptimizer) -> None:
    stepped = {
        id(owner)
        for target in optimizer.targets
        if isinstance(target, JointTarget)
        for owner in target.owners
    }
    if stepped != {id(part.engine) for part in parts}:
        raise CheckpointError(
            f"the optimizer is over {len(stepped)} parts of a pipeline, and {len(parts)} were "
            "given, not all the same; give all parts of this process: nn.ModuleList([part, ...])"
        )
