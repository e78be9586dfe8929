"""What measures gradients and updates blocks: `CpuStep` on the host, `TritonStep` on a device.

There is one pair for plain modules and for shards. Who uses it hands in what differs: gradients as
`GradientRun`s or as they lie in `p.grad`, weights as the pieces of `SteppedViews`, and what a step
begins with, an agreement of all ranks or what torch.amp.GradScaler says.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from gemini.optim.matrices.updater import MatrixUpdater
from gemini.optim.rules.clipping import Clip
from gemini.optim.rules.control_vector import ControlVector
from gemini.optim.rules.report import Outcome
from gemini.optim.state.pieces import Updater
from gemini.optim.target import AmpInputs
from gemini.optim.update.cpu_update import StepInputs
from gemini.optim.update.staging import DeviceStaging, Reserved
from gemini.tickets import Done, Ticket

from .gradients import GradientRun, Measured

AnyUpdater = Updater | MatrixUpdater


class Executor(Protocol):
    """One update path of one target. A counter is a parameter, by its index in the target; `active`
    are the counters that a step updates."""

    counts_on_host: bool  # the step counts and the schedule of the loss scale
    merges_parameters: bool  # neighbours with the same hyperparameters may be one piece
    control_vector: ControlVector

    @property
    def path(self) -> str:
        """As `StepReport.update_path`."""
        ...

    @property
    def staging(self) -> DeviceStaging | None:
        """Through which passes what the device updates; None where the host updates."""
        ...

    def reserve(self, reserved: Reserved) -> None:
        """So much of it from now on; between steps."""
        ...

    # -- gradients --

    def measure(self, runs: Sequence[GradientRun], norm_type: float) -> Measured:
        """Of the gradients of these runs. Waits for the device."""
        ...

    def measure_leaving(self, run: GradientRun, grad: Tensor) -> object:
        """What `measure` wants to know of a gradient [n] that is about to leave."""
        ...

    def power_sum(self, grads: Sequence[Tensor], norm_type: float) -> Tensor:
        """Of gradients of any places, together: sum of |g|^p, or the largest |g|; fp64 0-d."""
        ...

    # -- a step --

    def next_steps(self) -> Sequence[int]:
        """Of every counter, the number of the coming step; zeros where the device counts."""
        ...

    def begin(
        self, hypers: Sequence[Any], active: Sequence[int], power_sum: float, clip: Clip
    ) -> AnyUpdater:
        """The updater of a step whose gradients the host knows. Moves the loss scale on."""
        ...

    def skips(self, amp: AmpInputs) -> bool:
        """Whether the host knows that GradScaler found a gradient that is not finite."""
        ...

    def begin_amp(
        self,
        hypers: Sequence[Any],
        active: Sequence[int],
        amp: AmpInputs | None,
        *,
        may_fail: bool,
    ) -> AnyUpdater:
        """The updater of a step that clips nothing. `may_fail`: `undo` may follow."""
        ...

    def outcome(self) -> Ticket[Outcome]:
        """Of the step that was begun last."""
        ...

    def count(self, active: Sequence[int]) -> None:
        """The step was taken: raise the counts."""
        ...

    def undo(self) -> None:
        """The step that was begun failed: counts and loss scale are those of before."""
        ...

    # -- the rest --

    @property
    def counts(self) -> Tensor:
        """[counters]: how often each was updated. A checkpoint may fill it."""
        ...

    def set_groups(self, group_of: Sequence[int | None]) -> None:
        """The param group of every counter; None for one that is never active."""
        ...

    def close(self) -> None:
        """End threads."""
        ...


class HostStep:
    """The part of an executor whose counts and decisions are the host's; who measures gradients,
    and where blocks are updated, is a subclass's."""

    counts_on_host = True
    control_vector: ControlVector
    counts: Tensor
    _rounding_seed: int | None
    _used_scale = 1.0  # of the step that was begun last

    def updater_of(
        self, inputs: StepInputs, hypers: Sequence[Any], active: Sequence[int]
    ) -> AnyUpdater:
        """Of a step that updates the parameters that are `active`."""
        raise NotImplementedError

    def next_steps(self) -> Sequence[int]:
        return [int(count) + 1 for count in self.counts.tolist()]

    def begin(
        self, hypers: Sequence[Any], active: Sequence[int], power_sum: float, clip: Clip
    ) -> AnyUpdater:
        self._used_scale = self.control_vector.read().scale
        inputs = StepInputs.clipping(clip, power_sum, self._used_scale, self._rounding_seed)
        return self.updater_of(inputs, hypers, active)

    def skips(self, amp: AmpInputs) -> bool:
        return amp.found_inf is not None and bool(amp.found_inf > 0)

    def begin_amp(
        self,
        hypers: Sequence[Any],
        active: Sequence[int],
        amp: AmpInputs | None,
        *,
        may_fail: bool,
    ) -> AnyUpdater:
        given = None if amp is None else amp.grad_scale
        self._used_scale = 1.0 if given is None else float(given)
        inputs = StepInputs(1.0 / self._used_scale, rounding_seed=self._rounding_seed)
        return self.updater_of(inputs, hypers, active)

    def outcome(self) -> Done[Outcome]:
        return Done(Outcome(loss_scale=self._used_scale))

    def count(self, active: Sequence[int]) -> None:
        self.counts[list(active)] += 1

    def undo(self) -> None:
        """Nothing was counted yet."""


def step_counts(executor: Executor) -> list[int]:
    """Of every counter; may wait for the device."""
    return [int(count) for count in executor.counts.tolist()]
