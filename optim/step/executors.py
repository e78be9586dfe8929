"""Makers of executors: on the host or on a device, as a rule `works`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gemini.optim.rules.control_vector import ControlVector
from gemini.optim.rules.rule import UpdateRule
from gemini.optim.rules.state_layout import Columns
from gemini.optim.state.memory import Memory
from gemini.optim.update.cpu_update import CpuWorkers
from gemini.optim.update.updaters import CpuUpdater

from .cpu_step import CpuStep
from .executor import Executor
from .gradients import GradientRun

if TYPE_CHECKING:
    from gemini.optim.matrices.plan import Bucket
    from gemini.optim.matrices.sites import Site
    from gemini.optim.matrices.updater import MatrixUpdater, Transport


def make_executor(
    rule: UpdateRule,
    group_of: Sequence[int | None],
    control_vector: ControlVector,
    memory: Memory | None,
    compiled: Callable[[], CpuUpdater],
    *,
    runs: Sequence[GradientRun] = (),
    names: Sequence[str] | None = None,
    rounding_seed: int | None = None,
    matrices: MatrixUpdates | None = None,
) -> Executor:
    """Make the executor of a rule.

    memory: of the device whose kernels update; None: the host does, by what `compiled` makes if
    the rule is elementwise. runs: gradients that are measured; names: of the counters, None where
    the executor measures none. matrices: of a rule that works on them.
    """
    if memory is None:
        updater = CpuUpdater(CpuWorkers(), rule) if rule.by_operators else compiled()
        return CpuStep(updater, len(group_of), control_vector, rounding_seed, matrices)
    # the only place that makes one, so that no host imports it
    from .triton_step import OperatorStep, TritonStep

    kind = OperatorStep if rule.by_operators else TritonStep
    return kind(rule, group_of, control_vector, memory, runs, names, rounding_seed, matrices)


@dataclass(slots=True)
class MatrixUpdates:
    """Maker of the updater of a step.

    transports: between the ranks that exchange matrices, by sharding group. buckets: in the order
    of their exchanges. on_disk: parameters with a block on some rank's disk. Both are asked in
    every step, as trained parameters and homes may change.
    """

    rule: UpdateRule
    group_of: Sequence[int | None]
    columns: Columns
    transports: Mapping[str, Transport]
    buckets: Callable[[], Sequence[Bucket]]
    on_disk: Callable[[], Set[int]]

    def updater(self, site: Site, hypers: Sequence[Any], active: Sequence[int]) -> MatrixUpdater:
        """Updater of a step of the parameters in `active`.

        Raises ValueError for a parameter whose state no longer fits its group.
        """
        from gemini.optim.matrices.updater import MatrixUpdater

        hyper: list[Any] = [None] * len(self.group_of)
        for param in active:
            group = self.group_of[param]
            hyper[param] = None if group is None else hypers[group]
            if group is not None and not self.rule.is_kept(hyper[param], self.columns, param):
                raise ValueError(
                    f"group {group} has another use_muon than when the state of its parameters was "
                    "made; make another optimizer, and load the state that goes on"
                )
        buckets, on_disk = self.buckets(), self.on_disk()
        return MatrixUpdater(site, self.rule, buckets, on_disk, self.transports, hyper)
