"""Gradients measured and blocks updated by the host's cores, of a rule over whole matrices."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gemini.optim.matrices.plan import Bucket
from gemini.optim.matrices.updater import MatrixUpdater, Ways
from gemini.optim.rules.control_vector import ControlVector
from gemini.optim.rules.matrix_rule import MatrixRule
from gemini.optim.rules.state_layout import Columns
from gemini.optim.state.space import Block
from gemini.optim.update.cpu_update import StepInputs
from gemini.optim.update.updaters import CpuUpdater

from .cpu_step import CpuStep


@dataclass(frozen=True, slots=True)
class MatrixPlan:
    """In which order matrices are dealt with, and between which ranks.

    on_disk: buckets of which a block is on some rank's disk. ways: by sharding group.
    """

    buckets: Sequence[Bucket]
    on_disk: frozenset[int]
    ways: Mapping[str, Ways]


def bucket_homes(buckets: Sequence[Bucket], on_disk: Sequence[Block]) -> frozenset[int]:
    """Buckets of which one of these blocks has elements."""
    params = {part.param for block in on_disk for part in block.segments}
    return frozenset(
        i for i, bucket in enumerate(buckets) if any(w.param in params for w in bucket.wholes)
    )


class MatrixStep(CpuStep):
    """`CpuStep` whose updates are those of a `MatrixUpdater`.

    planned: asked for in every step, as what is trained, and where it lives, may change.
    """

    def __init__(
        self,
        updater: CpuUpdater,
        rule: MatrixRule,
        group_of: Sequence[int | None],
        columns: Columns,
        planned: Callable[[], MatrixPlan],
        control_vector: ControlVector,
        rounding_seed: int | None = None,
    ) -> None:
        super().__init__(updater, len(group_of), control_vector, rounding_seed)
        self.merges_parameters = False  # a matrix is its own
        self._rule = rule
        self._group_of = group_of
        self._columns = columns
        self._planned = planned

    def set_groups(self, group_of: Sequence[int | None]) -> None:
        self._group_of = group_of

    def updater_of(
        self, inputs: StepInputs, hypers: Sequence[Any], active: Sequence[int]
    ) -> MatrixUpdater:
        plan, hyper = self._planned(), [None] * len(self._group_of)
        for param in active:
            group = self._group_of[param]
            hyper[param] = None if group is None else hypers[group]
            if group is not None and not self._rule.is_kept(hyper[param], self._columns, param):
                raise ValueError(
                    f"group {group} has another use_muon than when the state of its parameters was "
                    "made; make another optimizer, and load the state that goes on"
                )
        inner = replace(self._updater, inputs=inputs)
        return MatrixUpdater(inner, self._rule, plan.buckets, plan.on_disk, plan.ways, hyper)
