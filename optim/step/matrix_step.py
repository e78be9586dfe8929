"""Executors of a rule over whole matrices: on the host, and on a device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gemini.optim.matrices.plan import Bucket
from gemini.optim.matrices.sites import HostSite, Site
from gemini.optim.matrices.updater import MatrixUpdater, Ways
from gemini.optim.rules.control_vector import ControlVector
from gemini.optim.rules.matrix_rule import MatrixRule
from gemini.optim.rules.state_layout import Columns
from gemini.optim.state.memory import Memory
from gemini.optim.state.space import Block
from gemini.optim.update.cpu_update import StepInputs
from gemini.optim.update.updaters import CpuUpdater

from .cpu_step import CpuStep
from .gradients import GradientRun
from .triton_step import OperatorStep


@dataclass(frozen=True, slots=True)
class MatrixPlan:
    """Order in which matrices are dealt with, and the ranks that exchange them.

    on_disk: buckets of which a block is on some rank's disk. ways: by sharding group.
    """

    buckets: Sequence[Bucket]
    on_disk: frozenset[int]
    ways: Mapping[str, Ways]


def bucket_homes(buckets: Sequence[Bucket], on_disk: Sequence[Block]) -> frozenset[int]:
    """Indices of buckets that have elements in one of these blocks."""
    params = {part.param for block in on_disk for part in block.segments}
    return frozenset(
        i for i, bucket in enumerate(buckets) if any(w.param in params for w in bucket.wholes)
    )


@dataclass(slots=True)
class MatrixUpdates:
    """Maker of the updater of a step.

    planned: called in every step, as trained parameters and homes may change.
    """

    rule: MatrixRule
    group_of: Sequence[int | None]
    columns: Columns
    planned: Callable[[], MatrixPlan]

    def updater(self, site: Site, hypers: Sequence[Any], active: Sequence[int]) -> MatrixUpdater:
        """Updater of a step of the parameters in `active`.

        Raises ValueError for a parameter whose state no longer fits its group.
        """
        plan, hyper = self.planned(), [None] * len(self.group_of)
        for param in active:
            group = self.group_of[param]
            hyper[param] = None if group is None else hypers[group]
            if group is not None and not self.rule.is_kept(hyper[param], self.columns, param):
                raise ValueError(
                    f"group {group} has another use_muon than when the state of its parameters was "
                    "made; make another optimizer, and load the state that goes on"
                )
        return MatrixUpdater(site, self.rule, plan.buckets, plan.on_disk, plan.ways, hyper)


class MatrixStep(CpuStep):
    """`CpuStep` whose updates are those of a `MatrixUpdater`."""

    def __init__(
        self,
        updater: CpuUpdater,
        updates: MatrixUpdates,
        control_vector: ControlVector,
        rounding_seed: int | None = None,
    ) -> None:
        super().__init__(updater, len(updates.group_of), control_vector, rounding_seed)
        self.merges_parameters = False  # a matrix is its own
        self._updates = updates

    def set_groups(self, group_of: Sequence[int | None]) -> None:
        self._updates.group_of = group_of

    def updater_of(
        self, inputs: StepInputs, hypers: Sequence[Any], active: Sequence[int]
    ) -> MatrixUpdater:
        site = HostSite(replace(self._updater, inputs=inputs))
        return self._updates.updater(site, hypers, active)


class MatrixDeviceStep(OperatorStep):
    """`OperatorStep` whose updates are those of a `MatrixUpdater` on the device."""

    def __init__(
        self,
        updates: MatrixUpdates,
        control_vector: ControlVector,
        memory: Memory,
        *,
        runs: Sequence[GradientRun] = (),
        names: Sequence[str] | None = None,
        rounding_seed: int | None = None,
    ) -> None:
        super().__init__(
            updates.rule.others, updates.group_of, control_vector, memory, runs=runs, names=names,
            rounding_seed=rounding_seed,
        )  # fmt: skip
        self._updates = updates

    def set_groups(self, group_of: Sequence[int | None]) -> None:
        super().set_groups(group_of)
        self._updates.group_of = group_of

    def updater_at(self, site: Site, hypers: Sequence[Any], active: Sequence[int]) -> MatrixUpdater:
        return self._updates.updater(site, hypers, active)
