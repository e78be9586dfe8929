"""Executors measure gradients and update blocks: `CpuStep` on the host, `TritonStep` on a device.

The same pair serves plain modules and shards. A target hands in what differs: gradients as
`GradientRun`s or as they lie in `p.grad`, weights as the pieces of `BlockViews`, and the start of
a step, an agreement of all ranks or the inputs of torch.amp.GradScaler.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from torch import Tensor

from gemini.optim.rules.clipping import Clip
from gemini.optim.rules.control_vector import ControlVector
from gemini.optim.rules.report import Outcome
from gemini.optim.state.pieces import Updater
from gemini.optim.target import AmpInputs
from gemini.optim.update.cpu_update import StepInputs
from gemini.tickets import Done, Ticket

from .gradients import GradientRun, Measured

if TYPE_CHECKING:
    from gemini.optim.matrices.updater import MatrixUpdater
    from gemini.optim.update.staging import DeviceStaging

    from .executors import MatrixUpdates
    from .measuring import ByKernels

    AnyUpdater: TypeAlias = Updater | MatrixUpdater


class Executor:
    """Executor of one update path of one target. The host counts and decides, if no subclass lets
    the device.

    A counter is a parameter, by its index in the target; `active` are the counters that a step
    updates.

    counts_on_host: the step counts and the schedule of the loss scale.
    merges_parameters: neighbours with the same hyperparameters may be one piece.
    path: update path, as in `StepReport.update_path`.
    counts: number of updates of each counter: [counters]. A checkpoint may fill it.
    """

    counts_on_host = True
    merges_parameters = False
    path: str
    control_vector: ControlVector
    counts: Tensor
    norms_by_kernels: ByKernels | None = None  # what a rule's norms are measured by on a device
    _matrices: MatrixUpdates | None = None
    _rounding_seed: int | None = None
    _outcome = Outcome()  # of the step that was begun last

    @property
    def staging(self) -> DeviceStaging | None:
        """Staging that blocks pass through on a device; None where the host updates."""
        return None

    def reserve(self, count: int, *nbytes: int) -> None:
        """Reserve staging from now on: `count` buffers of each kind, so large; between steps."""

    # -- gradients --

    def measure(self, runs: Sequence[GradientRun], norm_type: float) -> Measured:
        """Measure the gradients of these runs. Waits for the device."""
        raise NotImplementedError

    def measure_leaving(self, run: GradientRun, grad: Tensor) -> object:
        """Measure a gradient [n] that is about to leave, for a later `measure`."""
        raise NotImplementedError

    def power_sum(self, grads: Sequence[Tensor], norm_type: float) -> Tensor:
        """Sum of |g|^p over all of these gradients, or the largest |g|; fp64 0-d."""
        raise NotImplementedError

    # -- a step --

    def updater_of(
        self, inputs: StepInputs, hypers: Sequence[Any], active: Sequence[int]
    ) -> AnyUpdater:
        """Updater of a step that updates the parameters in `active`."""
        raise NotImplementedError

    def step_counts(self) -> list[int]:
        """Number of updates of every counter; may wait for the device."""
        return [int(count) for count in self.counts.tolist()]

    def next_steps(self) -> Sequence[int]:
        """Number of the coming step of every counter; zeros where the device counts."""
        return [count + 1 for count in self.step_counts()]

    def begin(
        self, hypers: Sequence[Any], active: Sequence[int], power_sum: float, clip: Clip
    ) -> AnyUpdater:
        """Updater of a step whose norm the host knows."""
        scale = self.control_vector.read().scale
        self._outcome = Outcome(grad_norm=clip.norm(power_sum) / scale, loss_scale=scale)
        inputs = StepInputs.clipping(clip, power_sum, scale, self._rounding_seed)
        return self.updater_of(inputs, hypers, active)

    def skips(self, amp: AmpInputs) -> bool:
        """Whether the host knows that GradScaler found a gradient that is not finite."""
        return amp.found_inf is not None and bool(amp.found_inf > 0)

    def begin_amp(
        self,
        hypers: Sequence[Any],
        active: Sequence[int],
        amp: AmpInputs | None,
        *,
        may_fail: bool,
    ) -> AnyUpdater:
        """Updater of a step that clips nothing. `may_fail`: `undo` may follow."""
        given = None if amp is None else amp.grad_scale
        scale = 1.0 if given is None else float(given)
        self._outcome = Outcome(loss_scale=scale)
        inputs = StepInputs(1.0 / scale, rounding_seed=self._rounding_seed)
        return self.updater_of(inputs, hypers, active)

    def outcome(self) -> Ticket[Outcome]:
        """Outcome of the step that was begun last."""
        return Done(self._outcome)

    def count(self, active: Sequence[int]) -> None:
        """Raise the counts of a step that was taken."""
        self.counts[list(active)] += 1

    def undo(self) -> None:
        """Restore counts and loss scale of before the step that was begun and failed."""

    # -- the rest --

    def set_groups(self, group_of: Sequence[int | None]) -> None:
        """Set the param group of every counter; None for one that is never active."""
        if self._matrices is not None:
            self._matrices.group_of = group_of

    def close(self) -> None:
        """End threads."""
