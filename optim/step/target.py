"""Target: parameters that an optimizer updates, with their state, wherever they live."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from gemini.optim.rules.clipping import Clip
from gemini.optim.rules.control_vector import ControlVector
from gemini.optim.rules.report import Outcome, Skips, StepReport, Traffic
from gemini.optim.rules.rule import UpdateRule
from gemini.optim.rules.state_layout import Plane
from gemini.optim.state.tiered_state import TieredState
from gemini.optim.target import AmpInputs, Group
from gemini.optim.update.cpu_update import StepInputs
from gemini.tickets import Done, Ticket

from .executor import Executor
from .measuring import Measuring, ParamAndGrad

if TYPE_CHECKING:
    from gemini.nvme import BlockStore
    from gemini.optim.state.state_stream import StateStream

    from .driver import Step

MeasureInputs: TypeAlias = Callable[[], tuple[ParamAndGrad, StepInputs]]


class Target:
    """State of some parameters, the executor that updates it, and counts of steps.

    A subclass has parameters and gradients, of a plain module or of an engine: it makes
    `_tiered_state` and `_executor`, and begins steps, which `optim.step.driver.take_step` takes.

    params: by their index here, which is their counter.
    """

    _tiered_state: TieredState
    _executor: Executor

    def __init__(
        self,
        params: Sequence[Tensor],
        rule: UpdateRule,
        groups: Sequence[Group],
        group_of: Sequence[int | None],
        shapes: Sequence[Sequence[int]],
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """groups: of the optimizer. group_of: of each parameter; None: it stays as it is."""
        self.params = params
        self._rule = rule
        self._groups: Sequence[int] = range(len(groups))  # of the optimizer, that are looked at
        self._group_of = group_of  # among them
        self._measuring = Measuring(rule, shapes, dtype)
        self._columns = rule.columns(shapes, group_of, groups)
        self._num_steps = 0
        self._skips = Skips()

    @property
    def names(self) -> Mapping[int, str]:
        """Name by id of the parameter, by which a state dict is keyed; none where it is by
        position."""
        return {}

    @property
    def planes(self) -> Sequence[Plane]:
        """Planes that are kept of every parameter; its master first, where there is one."""
        return self._tiered_state.layout.planes

    @property
    def tiered_state(self) -> TieredState:
        """State of the last step in its tiers, for readers."""
        return self._tiered_state

    @property
    def counters(self) -> ControlVector:
        """Loss scale and skipped steps, which belong to a state dict."""
        return self._executor.control_vector

    @property
    def step_counts(self) -> list[int]:
        """Number of updates of each parameter; may wait for the device."""
        return self._executor.step_counts()

    @property
    def _executor_groups(self) -> Sequence[int | None]:
        """Group of every parameter; its own number where it has hyperparameters of its own."""
        return range(len(self._group_of)) if self._rule.measures else self._group_of

    @property
    def untouched(self) -> bool:
        """Whether no step was taken and nothing loaded, so that state need not travel."""
        return False  # it is made only when it is needed

    @property
    def stores(self) -> Sequence[BlockStore]:
        """Stores on disk."""
        return self._tiered_state.stores

    def set_groups(self, groups: Sequence[Group]) -> None:
        """Take over all groups, after one was added over parameters that the target has already."""
        raise AssertionError("a group of new parameters has a target of its own")

    def zero_grad(self, set_to_none: bool) -> None:
        """Drop gradients that the target holds outside `p.grad`, or make them zeros."""

    def movable(self) -> Sequence[Tensor]:
        """Tensors that parking moves: parameters, gradients and state in memory.

        Nothing is under way afterwards.
        """
        raise NotImplementedError

    def close(self, keep_masters: bool = True) -> None:
        """Remove files and threads. `keep_masters`: give fp32 weights back to who owns them."""
        self._tiered_state.close()

    # -- state, for others --

    def streams(self, names: Mapping[int, str]) -> Sequence[StateStream]:
        """Streams of this process's state. names: of the parameters, by id."""
        raise NotImplementedError

    def blend(self, plane: str, weights: Sequence[float]) -> None:
        """Move the weights of each group its share of the way to a plane: w + share * (plane - w).

        In fp32, whatever they are rounded to; a parameter that was never updated stays.
        """
        raise NotImplementedError

    def offloaded_state(self, cut: bool) -> Mapping[Tensor, dict[str, Tensor]]:
        """Copies of the state that `optimizer.state` does not show, shaped like the parameters.

        cut: of a wrapped module every rank has its parts, as DTensors; else rank 0 has all.
        """
        raise NotImplementedError

    def load_state(self, state: Mapping[Tensor, Mapping[str, Any]]) -> None:
        """Take over state, shaped like the parameters."""
        raise NotImplementedError

    def state_views(self) -> Mapping[Tensor, dict[str, Tensor]]:
        """Views of the state that costs nothing to show, for `optimizer.state`."""
        counts = self._executor.counts
        return {
            param: {"step": counts[i], **self._measuring.tensors_of(i)}
            for i, param in enumerate(self.params)
            if self._group_of[i] is not None
        }

    def _load_small(self, state: Mapping[int, Mapping[str, Any]]) -> None:
        """Load counts of steps, and what the rule keeps of measures, by parameter."""
        for i, given in state.items():
            self._measuring.load(i, given)
            if "step" in given:
                self._executor.counts[i] = float(given["step"])

    def _shares(self, weights: Sequence[float]) -> list[float]:
        """Weight of each parameter's group; 0 for a parameter that was never updated."""
        return [
            weights[self._groups[group]] if count and group is not None else 0.0
            for group, count in zip(self._group_of, self.step_counts, strict=True)
        ]

    # -- a step --

    def step(
        self, together: Sequence[Any], groups: Sequence[Group], amp: AmpInputs | None
    ) -> StepReport:
        """Update once, together with all targets of the optimizer, of which this is the first.

        On an error the parameters and the state of all are those of the last step.
        """
        raise NotImplementedError

    def clip(self, together: Sequence[Any], clip: Clip) -> Tensor | None:
        """Clip the gradients of the coming step of all targets; returns the norm before, where one
        is asked."""
        raise NotImplementedError

    def hypers(self, groups: Sequence[Group]) -> list[Any]:
        """Hyperparameters of each group. Raises ValueError for refused ones."""
        return [self._rule.hyper(groups[index]) for index in self._groups]

    def _by_param(self, hypers: Sequence[Any], taken: Sequence[int]) -> list[Any]:
        """Hyperparameters by parameter; None for one that the step leaves alone."""
        found: list[Any] = [None] * len(self._group_of)
        for param in taken:
            group = self._group_of[param]
            found[param] = None if group is None else hypers[group]
        return found

    def _told(
        self, hypers: Sequence[Any], taken: Sequence[int], show: MeasureInputs
    ) -> tuple[list[Any], Sequence[Any]]:
        """Hyperparameters of a step, with what measures found: by parameter, and as the executor
        takes them. show: called where there are measures, for what they measure."""
        by_param = self._by_param(hypers, taken)
        if self._rule.measures:
            numbers = [count + 1 for count in self.step_counts]
            param_and_grad, inputs = show()
            by_param = self._measuring.told(
                self._tiered_state, param_and_grad, by_param, numbers, inputs,
                self._executor.norms_by_kernels,
            )  # fmt: skip
            rows = zip(by_param, self._group_of, strict=True)
            hypers = [one or hypers[group or 0] for one, group in rows]
        return by_param, hypers

    def before_step(self) -> None:
        """Prepare for a step that was begun."""

    def count(self, step: Step) -> None:
        """Count a step that was taken."""
        self._num_steps += 1
        self._executor.count(step.taken)
        self._measuring.commit(step.taken)

    def undo(self) -> None:
        """Undo the executor's part of a failed step; the driver has undone its own."""
        self._executor.undo()

    def after_step(self) -> None:
        """Go on after a step that was taken, or undone."""

    def gathered_since(self) -> Traffic:
        """Bytes of parameters and gradients moved since the last step, also in its passes."""
        return Traffic()

    def outcome(self) -> Ticket[Outcome]:
        """Outcome of the step that was begun last."""
        return self._executor.outcome()

    def skipped(self, where: str | None, scale: float) -> StepReport:
        """Count a step that changes nothing: the gradient of `where` is not finite."""
        self.counters.stepped(overflow=True)
        return StepReport(Done(Outcome(True, math.nan, where, scale)))

    def reported(self, report: StepReport) -> StepReport:
        """Note a report. Raises NonFiniteGradientError for one skipped step too many."""
        self._skips.add(report)
        return report
