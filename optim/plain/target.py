"""Target of a plain module's parameters: their state in one space, some of it on disk."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from gemini.dtypes import DTYPES
from gemini.optim.rules.clipping import Clip
from gemini.optim.rules.config import StateConfig, UpdateFacts
from gemini.optim.rules.control_vector import ControlVector
from gemini.optim.rules.report import StepReport
from gemini.optim.rules.rule import UpdateRule, Works
from gemini.optim.state.memory import Memory, memory_of
from gemini.optim.state.space import StateSpace, blocks_on_nvme
from gemini.optim.state.state_stream import StateRun, StateStream
from gemini.optim.state.tiered_state import TieredState
from gemini.optim.step.driver import Step, take_step
from gemini.optim.step.executors import make_executor
from gemini.optim.step.target import Target
from gemini.optim.target import AmpInputs, Group
from gemini.optim.update.cpu_update import StepInputs
from gemini.optim.update.updaters import CpuUpdater, cpu_updater
from gemini.units import BLOCK_NUMEL

from .views import Order, PlainViews, dense_grad

if TYPE_CHECKING:
    from gemini.optim.update.compiled_update import Mix


class PlainTarget(Target):
    """Target of `params` in order, `alike`; `group_of[i]` is the param group of `params[i]`.

    State of resident parameters is shown as views, as by torch's own optimizers.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        group_of: Sequence[int],
        rule: UpdateRule,
        config: StateConfig,
        groups: Sequence[Group] = (),
    ) -> None:
        """groups: of the optimizer, for a rule whose planes depend on the group."""
        if config.nvme.keep_versions:
            raise ValueError(
                "NvmeConfig(keep_versions=...) is for the optimizer of a GeminiDDP: the parameters "
                "of a plain module have one version; wrap the module, or leave it out"
            )
        is_float64 = params[0].dtype == torch.float64
        super().__init__(
            list(params), rule, groups, group_of, [param.shape for param in params],
            torch.float64 if is_float64 else torch.float32,
        )  # fmt: skip
        by_rows = rule.works is Works.ON_PLACES
        self._orders = [Order.of(param, by_rows=by_rows) for param in params]
        self._groups = sorted(set(group_of))  # the others are not looked at
        self._group_of = [self._groups.index(group) for group in group_of]
        block_numel = config.nvme.block_numel or BLOCK_NUMEL
        space = StateSpace.pack([param.numel() for param in params], block_numel)
        matrices, num_waiting = None, 0
        if rule.works is Works.ON_MATRICES:
            from .matrices import matrix_updates

            matrices, num_waiting = matrix_updates(
                rule, params, self._orders, self._columns, space.blocks, self._group_of,
                lambda: () if (nvme := self._tiered_state.nvme) is None else nvme.blocks,
            )  # fmt: skip
        self._tiered_state = TieredState(
            space,
            rule.layout.in_float64() if is_float64 else rule.layout,
            on_nvme=blocks_on_nvme(space.blocks, config.nvme_fraction),
            nvme=config.nvme,
            memory=memory_of(params[0].device),
            label="plain-",
            columns=self._columns,
            num_waiting=num_waiting,
        )
        try:
            self._tiered_state.initialise(lambda block, planes: None)
        except BaseException:
            self._tiered_state.close()
            raise
        device = params[0].device
        self._executor = make_executor(
            rule,
            self._executor_groups,
            ControlVector(None, device),
            kernels_of(device),
            partial(_cpu_updater, rule, config, self.params),
            matrices=matrices,
        )
        self._stream = StateStream(self._tiered_state, [str(i) for i in range(len(params))])

    def state_views(self) -> Mapping[Tensor, dict[str, Tensor]]:
        views = super().state_views()
        for segment in self._tiered_state.space.segments:
            planes = self._tiered_state.resident_run(segment.offset, segment.numel)
            if planes is not None:
                order = self._orders[segment.param]
                has = partial(self._tiered_state.columns.has, segment.param)
                views[self.params[segment.param]].update(
                    {name: order.shaped(plane) for name, plane in planes.items() if has(name)}
                )
        for i, param in enumerate(self.params):
            if not param.numel():
                views[param].update(
                    {plane.name: torch.zeros(param.shape, dtype=DTYPES[plane.dtype])
                     for plane in self.planes if self._tiered_state.columns.has(i, plane.name)}
                )  # fmt: skip
        return views

    @torch.no_grad()
    def step(
        self, together: Sequence[PlainTarget], groups: Sequence[Group], amp: AmpInputs | None
    ) -> StepReport:
        if amp is not None and any(target.skips(amp) for target in together):
            bad = [target.nonfinite() for target in together]
            where = next((name for name in bad if name is not None), None)
            report, *_ = [target.skipped(where, _scale_of(amp)) for target in together]
        else:
            seen = [target.views(groups, amp) for target in together]
            may_fail = any(target.tiered_state.nvme is not None for target in together)
            report = take_step(
                [
                    target.begin(views, hypers, amp, may_fail)
                    for target, (views, hypers) in zip(together, seen, strict=True)
                ]
            )
        return self.reported(report)

    def views(
        self, groups: Sequence[Group], amp: AmpInputs | None
    ) -> tuple[PlainViews, Sequence[Any]]:
        """Views of a step, and its hyperparameters. Raises ValueError for refused ones."""
        views = PlainViews(self.params, self._orders, self._executor.next_steps())
        views.hyper, hypers = self._told(
            self.hypers(groups), views.active, lambda: (views, StepInputs(1.0 / _scale_of(amp)))
        )
        return views, hypers

    def skips(self, amp: AmpInputs) -> bool:
        """Whether the host knows that GradScaler found a gradient that is not finite."""
        return self._executor.skips(amp)

    def nonfinite(self) -> str | None:
        """The first parameter whose gradient is not finite."""
        for i, param in enumerate(self.params):
            if param.grad is not None and not bool(torch.isfinite(param.grad).all()):
                return f"parameter {i}"
        return None

    def begin(
        self,
        views: PlainViews,
        hypers: Sequence[Any],
        amp: AmpInputs | None,
        may_fail: bool,
    ) -> Step:
        """Begin a step, for a driver. may_fail: `undo` may follow."""
        taken = views.active
        updater = self._executor.begin_amp(hypers, taken, amp, may_fail=may_fail)
        return Step(
            self._tiered_state, updater, views, self._num_steps + 1, target=self, taken=taken
        )

    def count(self, step: Step) -> None:
        """Count a step that was taken, and write copies back to parameters."""
        cast("PlainViews", step.views).write_back()
        super().count(step)

    def streams(self, names: Mapping[int, str]) -> Sequence[StateStream]:
        own = [names[id(param)] for param in self.params]
        return [StateStream(self._tiered_state, own)]

    @torch.no_grad()
    def blend(self, plane: str, weights: Sequence[float]) -> None:
        shares = self._shares(weights)

        def move(run: StateRun) -> None:
            i = int(run.name)
            if run.plane == plane and shares[i]:
                param, order = self.params[i], self._orders[i]
                flat = order.flat(param.detach())
                there, values = flat[run.elements], run.values.to(param.device)
                there.add_(values.sub(there).mul_(shares[i]))
                if not order.fits(param):  # it was a copy
                    param.copy_(order.shaped(flat))

        self._stream.visit(move)

    @torch.no_grad()
    def clip(self, together: Sequence[PlainTarget], clip: Clip) -> Tensor | None:
        """Clip the gradients of all targets by one norm, or by value; returns the norm before.

        Gradients of plain modules are changed in place, as in torch.
        """
        norm = factor = None
        if clip.max_norm > 0:
            sums = [target.power_sum(clip.norm_type) for target in together]
            parts = torch.stack([s.to(sums[0].device) for s in sums])
            norm = clip.norm_of(parts.max() if clip.norm_type == math.inf else parts.sum())
            factor = clip.factor_of(norm)
        for target in together:
            target.scale_gradients(factor, clip)
        return norm

    def power_sum(self, norm_type: float) -> Tensor:
        """Sum of |g|^p over the gradients in `p.grad`, or the largest |g|; fp64 0-d."""
        grads = [
            dense_grad(param, order)
            for param, order in zip(self.params, self._orders, strict=True)
            if param.grad is not None
        ]
        return self._executor.power_sum(grads, norm_type)

    def scale_gradients(self, factor: Tensor | None, clip: Clip) -> None:
        """Multiply gradients in `p.grad` by `factor`, and clamp them to the clip's value."""
        for param in self.params:
            if param.grad is not None and factor is not None:
                param.grad.mul_(factor.to(param.device))
            if param.grad is not None and clip.max_value != math.inf:
                param.grad.clamp_(-clip.max_value, clip.max_value)

    def offloaded_state(self, cut: bool) -> Mapping[Tensor, dict[str, Tensor]]:
        """Copies of state on disk; `cut` changes nothing, as no other process has a part of it."""
        views = self.state_views()
        found: dict[Tensor, dict[str, Tensor]] = {}

        def keep(run: StateRun) -> None:
            param, order = self.params[int(run.name)], self._orders[int(run.name)]
            if run.plane in views[param]:
                return
            planes = found.setdefault(param, {})
            if run.plane not in planes:
                planes[run.plane] = order.empty(run.values)
            order.flat(planes[run.plane])[run.elements] = run.values

        self._stream.visit(keep)
        return found

    def load_state(self, state: Mapping[Tensor, Mapping[str, Any]]) -> None:
        flats: dict[str, tuple[str, Tensor]] = {}  # by plane: the parameter that came last

        def given(run: StateRun) -> Tensor | None:
            values = state.get(self.params[int(run.name)], {}).get(run.plane)
            if values is None:  # also what torch's SGD has for a momentum that did not start yet
                return None
            if flats.get(run.plane, ("",))[0] != run.name:
                flats[run.plane] = run.name, self._orders[int(run.name)].flat(values)
            return flats[run.plane][1][run.elements]

        self._stream.fill(given)
        self._load_small({i: state[p] for i, p in enumerate(self.params) if p in state})

    def movable(self) -> Sequence[Tensor]:
        grads = [param.grad for param in self.params if param.grad is not None]
        return [*(param.data for param in self.params), *grads, *self._tiered_state.movable()]


def _scale_of(amp: AmpInputs | None) -> float:
    """Scale that gradients carry. Waits for the device."""
    return 1.0 if amp is None or amp.grad_scale is None else float(amp.grad_scale)


def alike(new: Sequence[tuple[Tensor, int]]) -> list[tuple[list[Tensor], list[int]]]:
    """Sort parameters and their groups by target: one device each, float64 or not."""
    found: dict[tuple[torch.device, bool], tuple[list[Tensor], list[int]]] = {}
    for param, group in new:
        key = param.device, param.dtype == torch.float64
        params, groups = found.setdefault(key, ([], []))
        params.append(param)
        groups.append(group)
    return list(found.values())


def kernels_of(device: torch.device) -> Memory | None:
    """Memory of a device whose kernels update; None: the host does."""
    return None if device.type == "cpu" else memory_of(device)


def _cpu_updater(rule: UpdateRule, config: StateConfig, params: Sequence[Tensor]) -> CpuUpdater:
    """Updater of parameters that are all float64, or none of them."""
    from gemini.optim.update.compiled_update import Mix

    facts = UpdateFacts(
        sum(param.numel() for param in params),
        has_master=False,
        is_float64=params[0].dtype == torch.float64,
    )
    dtypes = dict.fromkeys(param.dtype for param in params)

    def mixes() -> list[Mix]:

        return [Mix(dtype, dtype, has_master=False) for dtype in dtypes]

    return cpu_updater(rule, config.cpu_path, facts, mixes)
