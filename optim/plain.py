"""The update of a plain module's parameters: their state in one space, some of it on disk."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from gemini.tickets import Done, Ticket

from .clipping import Clip
from .config import StateConfig, UpdateFacts
from .cpu_path import Piece, StepInputs
from .interrupts import HeldSignals
from .report import Outcome, SkipLog, StepReport, Traffic
from .rules import UpdateRule
from .scaler import Scaler
from .space import Block, BlockPart, StateSpace, blocks_on_nvme
from .state_layout import Plane, StateLayout
from .state_stream import (
    Look,
    RunSpec,
    Source,
    StateRun,
    StateSnapshot,
    fill_runs,
    list_runs,
    visit_runs,
)
from .target import AmpInputs, Group, Target
from .tiered_state import TieredState
from .updaters import CpuUpdater, Planes, Updater, cpu_updater


class PlainTarget:
    """`params` in order, of one device; `group_of[i]` is the param group of `params[i]`.

    State of resident parameters is shown as views, as torch's own optimizers do.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        group_of: Sequence[int],
        rule: UpdateRule,
        config: StateConfig,
    ) -> None:
        self._params = list(params)
        self._group_of = list(group_of)
        self._rule = rule
        space = StateSpace.pack([param.numel() for param in params], config.nvme.block_numel)
        self._tiers = TieredState(
            space,
            rule.layout,
            on_nvme=blocks_on_nvme(space.blocks, config.nvme_fraction),
            nvme=config.nvme,
            device=params[0].device,
            label="plain-",
        )
        try:
            self._tiers.initialise(lambda block, planes: None)
        except BaseException:
            self._tiers.close()
            raise
        self._path = _make_path(rule, config, group_of, self._params)
        self._num_steps = 0
        self._log = SkipLog()
        self._names = [str(i) for i in range(len(params))]

    def shown_state(self) -> Mapping[Tensor, dict[str, Tensor]]:
        shown = {param: {"step": self._path.steps[i]} for i, param in enumerate(self._params)}
        for segment in self._tiers.space.segments:
            planes = self._tiers.resident_run(segment.offset, segment.numel)
            if planes is not None:
                param = self._params[segment.param]
                size, stride = param.size(), param.stride()
                shown[param].update(
                    {name: plane.as_strided(size, stride) for name, plane in planes.items()}
                )
        return shown

    def step(self, groups: Sequence[Group], amp: AmpInputs | None = None) -> StepReport:
        hypers = [self._rule.hyper(group) for group in groups]
        views = _PlainViews(self._params, self._group_of, hypers, self._path.host_steps())
        if amp is not None and self._path.skips(amp):
            return self._skipped(amp)
        updater = self._path.begin(hypers, views.active, amp)
        before, stalled = self._traffic(updater), self._tiers.stalled_seconds
        with HeldSignals() as held:
            self._update(updater, views, held)
        report = StepReport(
            traffic=self._traffic(updater) - before,
            stalled_seconds=self._tiers.stalled_seconds - stalled,
            nvme_written_total=self._tiers.nvme_written_total,
            update_path=updater.name,
        )
        if amp is not None:
            report = replace(report, outcome=self._path.outcome())
            self._log.add(report)
        return report

    def _skipped(self, amp: AmpInputs) -> StepReport:
        """The host knows that GradScaler found a gradient that is not finite."""
        self.counters.stepped(overflow=True)
        scale = 1.0 if amp.grad_scale is None else float(amp.grad_scale)
        bad = [
            name
            for name, param in zip(self._names, self._params, strict=True)
            if param.grad is not None and not bool(torch.isfinite(param.grad).all())
        ]
        where = f"parameter {bad[0]}" if bad else None
        report = StepReport(Done(Outcome(True, math.nan, where, scale)))
        self._log.add(report)
        return report

    @property
    def counters(self) -> Scaler:
        return self._path.scaler

    @property
    def planes(self) -> Sequence[Plane]:
        return self._tiers.layout.planes

    @property
    def params(self) -> Sequence[Tensor]:
        """In the order of positions, by which runs of state are named."""
        return self._params

    @property
    def names(self) -> None:
        """By position, as torch does."""
        return

    def set_groups(self, groups: Sequence[Group]) -> None:
        raise AssertionError("a group of new parameters has a target of its own")

    @torch.no_grad()
    def _update(self, updater: Updater, views: _PlainViews, held: HeldSignals) -> None:
        try:
            self._tiers.prepare(updater, views, lambda: held.pending)
        except BaseException:
            self._tiers.rollback(views)
            raise
        self._tiers.commit(updater, views, self._num_steps + 1)
        self._num_steps += 1
        self._path.count(views.active)

    def _traffic(self, updater: Updater) -> Traffic:
        return self._tiers.traffic() + updater.traffic()

    def zero_grad(self, set_to_none: bool) -> None:
        """Nothing: gradients are in `p.grad`."""

    def visit_state(self, look: Look) -> None:
        visit_runs(self._tiers, self._names, look)

    def state_runs(self) -> Sequence[RunSpec]:
        return list_runs(self._tiers, self._names)

    def snapshot_state(self) -> StateSnapshot:
        return StateSnapshot(self._tiers, self._names)

    @torch.no_grad()
    def fill_state(self, source: Source) -> None:
        fill_runs(self._tiers, self._names, source)

    def clip(self, clip: Clip) -> Tensor | None:
        return clip_together([self], clip)

    def power_sum(self, norm_type: float) -> Tensor:
        """Of the gradients in `p.grad`: sum of |g|^p, or the largest |g|; fp64 0-d."""
        grads = [flat_view(_dense_grad(p)) for p in self._params if p.grad is not None]
        return self._path.power_sum(grads, norm_type)

    def scale_gradients(self, factor: Tensor | None, clip: Clip) -> None:
        """Multiply what is in `p.grad` by `factor`, and clamp it to the clip's value."""
        for param in self._params:
            if param.grad is not None and factor is not None:
                param.grad.mul_(factor.to(param.device))
            if param.grad is not None and clip.max_value != math.inf:
                param.grad.clamp_(-clip.max_value, clip.max_value)

    def offloaded_state(self) -> Mapping[Tensor, dict[str, Tensor]]:
        shown = {
            self._names[segment.param]
            for segment in self._tiers.space.segments
            if self._tiers.resident_run(segment.offset, segment.numel) is not None
        }
        params = dict(self._by_name())
        found: dict[Tensor, dict[str, Tensor]] = {}

        def keep(run: StateRun) -> None:
            if run.name in shown:
                return
            param = params[run.name]
            planes = found.setdefault(param, {})
            if run.plane not in planes:
                planes[run.plane] = torch.empty_strided(
                    param.size(), param.stride(), dtype=run.values.dtype
                )
            flat_view(planes[run.plane])[run.elements] = run.values

        self.visit_state(keep)
        return found

    def load_state(self, state: Mapping[Tensor, Mapping[str, Any]]) -> None:
        params = dict(self._by_name())

        def given(run: StateRun) -> Tensor | None:
            param = params[run.name]
            values = state.get(param, {}).get(run.plane)
            if values is None:  # also what torch's SGD has for a momentum that did not start yet
                return None
            return flat_view(with_strides_of(values, param))[run.elements]

        self.fill_state(given)
        for i, param in enumerate(self._params):
            if "step" in state.get(param, {}):
                self._path.steps[i] = float(state[param]["step"])

    def _by_name(self) -> list[tuple[str, Tensor]]:
        return list(zip(self._names, self._params, strict=True))

    def movable(self) -> Sequence[Tensor]:
        grads = [param.grad for param in self._params if param.grad is not None]
        return [*(param.data for param in self._params), *grads, *self._tiers.movable()]

    @property
    def nvme_bytes(self) -> int:
        return self._tiers.nvme_bytes

    def close(self, keep_masters: bool = True) -> None:
        self._tiers.close()


class _CpuPath:
    """Step counts are on the host."""

    def __init__(self, rule: UpdateRule, params: Sequence[Tensor], cpu_path: str) -> None:
        facts = UpdateFacts(sum(param.numel() for param in params), has_master=False)
        mixes = [(dtype, dtype, False) for dtype in dict.fromkeys(p.dtype for p in params)]
        self._updater: CpuUpdater = cpu_updater(rule, cpu_path, facts, mixes)
        self.steps = torch.zeros(len(params), dtype=torch.float32)
        self.scaler = Scaler(None, self.steps.device)
        self._scale = 1.0

    def host_steps(self) -> list[int]:
        return [int(step) for step in self.steps.tolist()]

    def skips(self, amp: AmpInputs) -> bool:
        return amp.found_inf is not None and bool(amp.found_inf > 0)

    def begin(self, hypers: Sequence[Any], active: Sequence[int], amp: AmpInputs | None) -> Updater:
        scale = amp.grad_scale if amp is not None else None
        self._scale = 1.0 if scale is None else float(scale)
        return replace(self._updater, inputs=StepInputs(1.0 / self._scale))

    def outcome(self) -> Done[Outcome]:
        return Done(Outcome(loss_scale=self._scale))

    def count(self, active: Sequence[int]) -> None:
        self.steps[active] += 1

    def power_sum(self, grads: Sequence[Tensor], norm_type: float) -> Tensor:
        total = self._updater.grad_sum(grads, norm_type).power_sum
        return torch.tensor(total, dtype=torch.float64)


class _TritonPath:
    """Step counts are on the device, raised by the prologue."""

    def __init__(
        self, rule: UpdateRule, layout: StateLayout, group_of: Sequence[int], device: torch.device
    ) -> None:
        from .triton_path import TritonUpdater  # Triton is imported where it is used

        self._updater = TritonUpdater(rule, layout, group_of, device)
        self._num_params = len(group_of)
        self.steps = self._updater.steps
        self.scaler = self._updater.scaler

    def host_steps(self) -> list[int]:
        return [0] * self._num_params  # not looked at

    def skips(self, amp: AmpInputs) -> bool:
        return False  # the device decides

    def begin(self, hypers: Sequence[Any], active: Sequence[int], amp: AmpInputs | None) -> Updater:
        self._updater.set_present(active)
        if amp is None:
            self.scaler.scale.fill_(1.0)
        else:
            self._updater.set_amp(amp.grad_scale, amp.found_inf)
        self._updater.begin(hypers, with_norm=amp is not None)
        return self._updater

    def outcome(self) -> Ticket[Outcome]:
        from .triton_path import DeviceOutcome

        return DeviceOutcome(self._updater, None)

    def count(self, active: Sequence[int]) -> None:
        return

    def power_sum(self, grads: Sequence[Tensor], norm_type: float) -> Tensor:
        norms = [torch.linalg.vector_norm(g, norm_type, dtype=torch.float64) for g in grads]
        if not norms:
            return torch.zeros((), dtype=torch.float64, device=self.steps.device)
        together = torch.stack(norms)
        return together.max() if norm_type == math.inf else (together**norm_type).sum()


def _make_path(
    rule: UpdateRule, config: StateConfig, group_of: Sequence[int], params: Sequence[Tensor]
) -> _CpuPath | _TritonPath:
    """The CPU path for CPU parameters, Triton for those of a device."""
    device = params[0].device
    if device.type == "cpu":
        return _CpuPath(rule, params, config.cpu_path)
    return _TritonPath(rule, rule.layout, group_of, device)


def _combined(parts: Tensor, norm_type: float) -> Tensor:
    return parts.max() if norm_type == math.inf else parts.sum()


@torch.no_grad()
def clip_together(targets: Sequence[Target], clip: Clip) -> Tensor | None:
    """Clip the gradients of all targets by one norm, or by value; the norm before.

    Gradients of plain modules are changed in place, as torch does.
    """
    plain = [target for target in targets if isinstance(target, PlainTarget)]
    if len(plain) < len(targets):
        (shards,) = targets
        return shards.clip(clip)
    if clip.max_norm == 0:
        for target in plain:
            target.scale_gradients(None, clip)
        return None
    sums = [target.power_sum(clip.norm_type) for target in plain]
    total = _combined(torch.stack([s.to(sums[0].device) for s in sums]), clip.norm_type)
    norm = clip.norm_of(total)
    factor = (clip.max_norm / (norm + 1e-6)).clamp(max=1.0)
    for target in plain:
        target.scale_gradients(factor, clip)
    return norm


class _PlainViews:
    """One step's view of the parameters that have a gradient."""

    def __init__(
        self,
        params: Sequence[Tensor],
        group_of: Sequence[int],
        hypers: Sequence[Any],
        steps: Sequence[float],
    ) -> None:
        self.active = [i for i, param in enumerate(params) if param.grad is not None]
        self._flat = {i: flat_view(params[i].detach()) for i in self.active}
        self._grad = {i: flat_view(_dense_grad(params[i])) for i in self.active}
        self._hyper = {i: hypers[group_of[i]] for i in self.active}
        self._step = {i: int(steps[i]) + 1 for i in self.active}

    def pieces(self, block: Block, planes: Planes) -> list[Piece]:
        return [
            Piece(
                param=self._flat[part.param][_inside(part)],
                grad=self._grad[part.param][_inside(part)],
                master=None,
                planes=tuple(plane[_in_block(part)] for plane in planes.values()),
                hyper=self._hyper[part.param],
                step=self._step[part.param],
                counter=part.param,
            )
            for part in block.parts
            if part.param in self._flat
        ]

    def save(self, block: Block, undo: Callable[[], Tensor]) -> bool:
        saved = undo()
        for part in block.parts:
            if part.param in self._flat:
                saved[_in_block(part)] = self._flat[part.param][_inside(part)]
        return True

    def restore(self, block: Block, planes: Planes) -> None:
        for part in block.parts:
            if part.param in self._flat:
                self._flat[part.param][_inside(part)] = planes["param_undo"][_in_block(part)]

    def expect(self, blocks: Sequence[Block]) -> None:
        """Parameters and gradients are in memory."""

    def updated(self, block: Block) -> None:
        """Nothing was borrowed."""


def _inside(part: BlockPart) -> slice:
    return slice(part.param_offset, part.param_offset + part.numel)


def _in_block(part: BlockPart) -> slice:
    return slice(part.offset, part.offset + part.numel)


def flat_view(tensor: Tensor) -> Tensor:
    """A dense tensor as [numel], in the order of its storage."""
    if tensor.is_contiguous():
        return tensor.view(-1)
    if torch.ops.aten.is_non_overlapping_and_dense(tensor):
        return tensor.as_strided((tensor.numel(),), (1,))
    raise ValueError(
        f"a parameter of shape {tuple(tensor.shape)} has strides {tensor.stride()} with gaps or "
        "overlaps; make it contiguous before you pass it to the optimizer"
    )


def with_strides_of(tensor: Tensor, like: Tensor) -> Tensor:
    """`tensor`, copied if its memory order is not that of `like`."""
    if tensor.stride() == like.stride():
        return tensor
    return torch.empty_strided(like.size(), like.stride(), dtype=tensor.dtype).copy_(tensor)


def _dense_grad(param: Tensor) -> Tensor:
    grad = param.grad
    assert grad is not None
    if grad.is_sparse:
        raise ValueError(
            f"a parameter of shape {tuple(param.shape)} has a sparse gradient; "
            "use sparse=False, or torch.optim.SparseAdam for it"
        )
    return with_strides_of(grad.detach(), param)
