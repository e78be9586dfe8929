"""Executor of a device: its kernels measure gradients and update blocks; see `Executor`.

Where the device decides alone, a step is begun unread: the measures of `submit_measure` stay on the
device, and so do the clip factor and whether the step counts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gemini.kernels_triton.control_fields import BAD, FACTOR, LOSS_SCALE, MAX_VALUE, SEED, SKIP, SUM
from gemini.optim.matrices.sites import DeviceSite, SiteUpdater
from gemini.optim.rules.clipping import Clip
from gemini.optim.rules.control_vector import ControlVector
from gemini.optim.rules.report import Outcome
from gemini.optim.rules.rule import UpdateRule
from gemini.optim.state.memory import Memory, StreamMark
from gemini.optim.state.pieces import Updater
from gemini.optim.target import AmpInputs
from gemini.optim.update.cpu_update import StepInputs
from gemini.optim.update.staging import DeviceStaging
from gemini.tickets import Done, Ticket

from .executor import Executor
from .gradients import Bits, GradientRun, Measured, bits_of, checksum
from .measuring import to_host

if TYPE_CHECKING:
    from gemini.optim.update.grad_tiles import GradTiles
    from gemini.optim.update.triton_update import TritonUpdater

    from .executor import AnyUpdater
    from .executors import MatrixUpdates


@dataclass(frozen=True, slots=True)
class _OnDevice:
    """Measure of a gradient: its tiles and norm type."""

    tiles: GradTiles
    norm_type: float
    bits: Sequence[Bits] = ()


class DeviceStep(Executor):
    """Executor for gradients, resident state and counts on the device."""

    def __init__(
        self,
        rule: UpdateRule,
        group_of: Sequence[int | None],
        control_vector: ControlVector,
        memory: Memory,
        runs: Sequence[GradientRun],
        names: Sequence[str] | None,
        rounding_seed: int | None,
        matrices: MatrixUpdates | None,
    ) -> None:
        """See `optim.step.executors.make_executor`."""
        from gemini.optim.update.triton_update import (
            TritonUpdater,  # Triton is imported where it is used
        )

        self._updater = TritonUpdater(
            rule.elementwise,
            _without_none(group_of),
            control_vector.tensor.device,
            control_vector,
            memory=memory,
            stochastic=rounding_seed is not None,
        )
        self.control_vector, self.counts = control_vector, self._updater.steps
        self._rule, self._matrices = rule, matrices
        self._rounding_seed = rounding_seed
        self._memory = memory
        self._names = names
        self._runs = {run.id: run for run in runs}
        self._made_tiles: GradTiles | None = None

    @property
    def updater(self) -> TritonUpdater:
        return self._updater

    @property
    def staging(self) -> DeviceStaging:
        return self._updater.staging

    def reserve(self, count: int, *nbytes: int) -> None:
        self._updater.reserve(count, *nbytes)

    # -- gradients --

    def measure(self, runs: Sequence[GradientRun], norm_type: float) -> Measured:
        self.submit_measure(runs, Clip(norm_type=norm_type))
        bits = [pair for run in runs for pair in _bits_of(run)]
        total, bad = self._updater.read_measure()
        # A rank that does not speak for a run has not seen it is not finite: the checksum is for
        # it, too.
        return Measured(total if bad is None else math.nan, bad, checksum(bits))

    def measure_leaving(self, run: GradientRun, grad: Tensor) -> object:
        if run.id not in self._runs:
            return None
        if run.counts:
            self._measure({run.id: grad})
        return _OnDevice(self._tiles, self._updater.norm_type, bits_of([run], [grad]))

    def submit_measure(self, runs: Sequence[GradientRun], clip: Clip) -> None:
        """Measure runs that this rank speaks for, on the device; the host waits for nothing."""
        self._updater.set_limits(clip)
        runs = [run for run in runs if run.counts]
        self._know([run for run in runs if run.id not in self._runs])
        here = {run.id: grad for run in runs if (grad := run.gradient.shard) is not None}
        self._measure(here)
        for run in runs:
            if run.id not in here and not self._has_measured(run, clip.norm_type):
                grad = run.gradient.load()
                self._measure({run.id: grad})
                found = _OnDevice(self._tiles, clip.norm_type, bits_of([run], [grad]))
                run.gradient.found = found
        self._tiles.keep([run.id for run in runs])
        self._updater.measured(self._tiles.tables)

    def submit_vote(
        self, rank: int, num_ranks: int, all_reduce: Callable[[Tensor], object]
    ) -> None:
        """Add up the measures of all ranks, on the device."""
        if num_ranks > 1:
            self._updater.vote(rank, num_ranks, all_reduce)

    def unread_norm(self, clip: Clip) -> Tensor:
        """Norm of the gradients that were measured last, unscaled: fp64 0-d on the device."""
        self._updater.finish_measure()
        control = self._updater.control
        total = clip.norm_of(control[SUM])
        return torch.where(control[BAD] > 0, torch.nan, total / control[LOSS_SCALE])

    def power_sum(self, grads: Sequence[Tensor], norm_type: float) -> Tensor:
        """Sum of |g|^p, or the largest |g|, by torch's operators; fp64 0-d.

        Gradients in `p.grad` have other memory in each step, so tables of it would be made for
        each.
        """
        norms = [
            torch.linalg.vector_norm(grad, norm_type, dtype=torch.float64)
            for grad in grads
            if grad.numel()
        ]
        if not norms:
            return torch.zeros((), dtype=torch.float64, device=self._memory.device)
        together = torch.stack(norms)
        return together.max() if norm_type == math.inf else (together**norm_type).sum()

    def _has_measured(self, run: GradientRun, norm_type: float) -> bool:
        found = run.gradient.found
        known = isinstance(found, _OnDevice) and found.tiles is self._tiles
        return known and found.norm_type == norm_type

    def _measure(self, grads: dict[int, Tensor]) -> None:
        self._tiles.measure(grads, self._updater.norm_type, self._updater.control)

    def _know(self, runs: Sequence[GradientRun]) -> None:
        """Add runs that are trained since the executor was made."""
        if runs:
            known = [self._runs[run] for run in sorted(self._runs)]
            self._runs = {run.id: run for run in (*known, *runs)}
            self._made_tiles = None

    @property
    def _tiles(self) -> GradTiles:
        """Tiles of all runs, ordered by dtype: runs of one dtype are measured in one launch."""
        if self._made_tiles is None:
            from gemini.optim.update.grad_tiles import GradTiles

            runs = sorted(self._runs.values(), key=lambda run: run.dtype)
            self._made_tiles = GradTiles({run.id: run.parts for run in runs}, self._memory)
        return self._made_tiles

    def set_groups(self, group_of: Sequence[int | None]) -> None:
        self._updater.set_groups(_without_none(group_of))
        super().set_groups(group_of)


class TritonStep(DeviceStep):
    """Executor whose device counts, and decides: kernels update every element alike."""

    counts_on_host = False
    path = "triton"
    _before: tuple[Tensor, Tensor] | None = None  # counts and control, for `undo`
    _known: Outcome | None = None  # of the step begun last; None: the device knows
    _read: tuple[int, list[int]] | None = None  # version of `counts`, and what they are
    _expects: TritonUpdater | None = None  # see `expecting`

    def __init__(self, rule: UpdateRule, *args: Any) -> None:
        super().__init__(rule, *args)
        # Operators of a CPU, and so of a simulated device, have a square root in fp32 that is not
        # correctly rounded everywhere: what they measure beside kernels would have other bits.
        is_gpu = self._memory.device.type == "cuda"
        if not rule.measures or rule.layout.is_quantised or not is_gpu:
            return
        from gemini.optim.rules.measures import NormRule

        if isinstance(rule, NormRule):
            from .direction_norms import DirectionNorms

            norms = DirectionNorms(rule, self._memory, lambda: self.staging)
            self.norms_by_kernels = norms.run

    def step_counts(self) -> list[int]:
        """See `Executor.step_counts`. Waits for the device, unless the host has read the counts
        and has decided on all steps since."""
        version = self.counts._version
        if self._read is None or self._read[0] != version:
            (now,) = to_host([self.counts])
            self._read = version, now.tolist()
        return list(self._read[1])

    def _counted(self, before: list[int] | None, active: Sequence[int]) -> None:
        """Note what the prologue has counted, in a step on which the host decided."""
        if before is not None:
            for counter in active:
                before[counter] += 1
            self._read = self.counts._version, before

    def _known_counts(self) -> list[int] | None:
        """Counts that the host knows without asking the device."""
        if self._read is None or self._read[0] != self.counts._version:
            return None
        return list(self._read[1])

    def next_steps(self) -> Sequence[int]:
        return [0] * len(self.counts)

    def begin(
        self, hypers: Sequence[Any], active: Sequence[int], power_sum: float, clip: Clip
    ) -> AnyUpdater:
        before, scale = self._now(), self.control_vector.read().scale
        counts = self._known_counts()
        norm = clip.norm(power_sum) / scale
        self._updater.set_limits(clip.with_max_norm(norm))
        self._updater.set_measure(power_sum)
        updater = self.begin_unread(hypers, active)
        self._counted(counts, active)
        self._before, self._known = before, Outcome(grad_norm=norm, loss_scale=scale)
        return updater

    def begin_unread(self, hypers: Sequence[Any], active: Sequence[int]) -> Updater:
        """Begin with the measures of `submit_measure`: the device decides on clip and skip."""
        self._before = self._known = self._read = None
        self._updater.set_present(active)
        self._updater.begin(hypers, with_norm=True)
        return self._updater

    def expecting(self, hypers: Sequence[Any], active: Sequence[int]) -> TritonUpdater:
        """Updater that has begun the coming step as it is expected: no clip bites, and it is not
        skipped. Nothing here changes; it uses the same staging."""
        own, found = self._updater, self._expects
        if found is None:
            from gemini.optim.update.triton_update import TritonUpdater

            groups, device = [0] * len(self.counts), own.control.device
            found = self._expects = TritonUpdater(
                self._rule.elementwise, groups, device, ControlVector(None, device),
                memory=self._memory, stochastic=self._rounding_seed is not None,
            )  # fmt: skip
        found.copy_from(own)
        found.set_present(active)
        found.set_measure(0.0)
        found.begin(hypers, with_norm=True)
        return found

    def decided_as(self, expected: TritonUpdater) -> bool:
        """Whether kernels of the step that was begun are given what those of `expected` were, to
        the bit. Waits for the device."""
        found = [t for u in (self._updater, expected) for t in u.inputs()]
        one, control, other, controls = _on_host(found)
        fields = [FACTOR, SKIP, MAX_VALUE, SEED]
        same = torch.equal(one.view(torch.int32), other.view(torch.int32))
        return same and torch.equal(control[fields], controls[fields])

    def skips(self, amp: AmpInputs) -> bool:
        return False  # the device decides

    def begin_amp(
        self,
        hypers: Sequence[Any],
        active: Sequence[int],
        amp: AmpInputs | None,
        *,
        may_fail: bool,
    ) -> AnyUpdater:
        self._before = self._now() if may_fail else None
        self._known = Outcome() if amp is None else None
        self._updater.set_present(active)
        if amp is None:
            self.control_vector.scale.fill_(1.0)
        else:
            self._updater.set_amp(amp.grad_scale, amp.found_inf)
        counts = self._known_counts() if amp is None else None
        self._read = None
        self._updater.begin(hypers, with_norm=amp is not None)
        self._counted(counts, active)
        return self._updater

    def outcome(self) -> Ticket[Outcome]:
        """Outcome of the step begun last; waits only when a field is read."""
        if self._known is not None:
            return Done(self._known)
        from gemini.optim.update.triton_update import DeviceOutcome

        return DeviceOutcome(self._updater, self._names)

    def count(self, active: Sequence[int]) -> None:
        """Do nothing: the prologue has counted."""

    def _now(self) -> tuple[Tensor, Tensor]:
        return self.counts.clone(), self._updater.control.clone()

    def undo(self) -> None:
        if self._before is not None:
            steps, control = self._before
            self.counts.copy_(steps)
            self._updater.control.copy_(control)


def _on_host(found: Sequence[Tensor]) -> list[Tensor]:
    """Copies in host memory, for which the host waits once."""
    here = [torch.empty_like(one, device="cpu", pin_memory=one.is_cuda) for one in found]
    for copy, one in zip(here, found, strict=True):
        copy.copy_(one, non_blocking=True)
    if found[0].is_cuda:
        StreamMark(torch.cuda.current_stream(found[0].device)).settle()
    return here


def _without_none(group_of: Sequence[int | None]) -> list[int]:
    return [group or 0 for group in group_of]


def _bits_of(run: GradientRun) -> Sequence[Bits]:
    found = run.gradient.found
    if isinstance(found, _OnDevice):
        return found.bits
    return bits_of([run], [run.gradient.load()]) if run.has_replicas else ()


class OperatorStep(DeviceStep):
    """Executor for rules that need more than an element at a time."""

    path = "torch"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        # The host reads and raises them in every step: on the device it would wait for each.
        self.counts = torch.zeros(len(self.counts), dtype=self.counts.dtype)

    def updater_of(
        self, inputs: StepInputs, hypers: Sequence[Any], active: Sequence[int]
    ) -> AnyUpdater:
        site = DeviceSite(self._memory, self.staging, inputs)
        if self._matrices is None:
            return SiteUpdater(site, self._rule)
        return self._matrices.updater(site, hypers, active)
