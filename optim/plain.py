"""The update of a plain module's parameters: their state in one space, some of it on disk."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .config import StateConfig
from .cpu_path import Piece
from .report import StepReport, Traffic
from .rules import UpdateRule
from .space import Block, BlockPart, StateSpace
from .state_layout import StateLayout
from .step_thread import StepThread
from .target import Group
from .tiered_state import TieredState
from .updaters import Planes, Updater, cpu_updater


class PlainTarget:
    """`params` in order, of one device; `group_of[i]` is the param group of `params[i]`.

    State of resident parameters is shown in `state`, as views, as torch's own optimizers do.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        group_of: Sequence[int],
        rule: UpdateRule,
        config: StateConfig,
        state: MutableMapping[Tensor, Any],
    ) -> None:
        self._params = list(params)
        self._group_of = list(group_of)
        self._rule = rule
        space = StateSpace.pack([param.numel() for param in params], config.nvme.block_numel)
        self._tiers = TieredState(
            space,
            rule.layout,
            nvme_fraction=config.nvme_fraction,
            nvme=config.nvme,
            device=params[0].device,
            label="plain-",
        )
        try:
            self._tiers.initialise(lambda block, planes: None)
        except BaseException:
            self._tiers.close()
            raise
        self._path = _make_path(rule, config, group_of, params[0].device)
        self._thread = StepThread()
        self._num_steps = 0
        self._shown: set[int] = set()  # parameters whose whole state is resident
        for i, param in enumerate(params):
            state[param] = {"step": self._path.steps[i]}
        for segment in space.segments:
            planes = self._tiers.resident_run(segment.offset, segment.numel)
            if planes is not None:
                param = params[segment.param]
                self._shown.add(segment.param)
                state[param].update(
                    {name: p.as_strided(param.size(), param.stride()) for name, p in planes.items()}
                )

    def step(self, groups: Sequence[Group]) -> StepReport:
        hypers = [self._rule.hyper(group) for group in groups]
        views = _PlainViews(self._params, self._group_of, hypers, self._path.host_steps())
        updater = self._path.begin(hypers, views.active)
        before, stalled = self._traffic(updater), self._tiers.stalled_seconds
        if self._tiers.nvme is None:
            self._update(updater, views)
        else:
            self._thread.run(lambda: self._update(updater, views))
        return StepReport(
            traffic=self._traffic(updater) - before,
            stalled_seconds=self._tiers.stalled_seconds - stalled,
            update_path=updater.name,
        )

    @torch.no_grad()
    def _update(self, updater: Updater, views: _PlainViews) -> None:
        try:
            self._tiers.prepare(updater, views, lambda: self._thread.interrupted)
        except BaseException:
            self._tiers.rollback(views)
            raise
        self._tiers.commit(updater, views, self._num_steps + 1)
        self._num_steps += 1  # here, so that an interrupt that came meanwhile finds it done
        self._path.count(views.active)

    def _traffic(self, updater: Updater) -> Traffic:
        return self._tiers.traffic() + updater.traffic()

    def zero_grad(self) -> None:
        """Nothing: gradients are in `p.grad`."""

    def offloaded_state(self) -> Mapping[Tensor, dict[str, Tensor]]:
        found: dict[int, dict[str, Tensor]] = {}

        def look(block: Block, planes: Planes) -> None:
            for part in block.parts:
                if part.param in self._shown:
                    continue
                param = self._params[part.param]
                if part.param not in found:
                    found[part.param] = {
                        name: torch.empty_strided(param.size(), param.stride(), dtype=plane.dtype)
                        for name, plane in planes.items()
                    }
                for name, plane in planes.items():
                    flat_view(found[part.param][name])[_inside(part)] = plane[_in_block(part)]

        self._tiers.visit(look)
        return {self._params[i]: planes for i, planes in found.items()}

    @torch.no_grad()
    def load_state(self, state: Mapping[Tensor, Mapping[str, Any]]) -> None:
        def fill(block: Block, planes: Planes) -> None:
            for part in block.parts:
                param = self._params[part.param]
                given = state.get(param, {})
                for name, plane in planes.items():
                    if name in given:
                        flat = flat_view(with_strides_of(given[name], param))
                        plane[_in_block(part)] = flat[_inside(part)]

        self._tiers.overwrite(fill)
        for i, param in enumerate(self._params):
            if "step" in state.get(param, {}):
                self._path.steps[i] = float(state[param]["step"])

    @property
    def nvme_bytes(self) -> int:
        return self._tiers.nvme_bytes

    def close(self) -> None:
        self._tiers.close()
        self._thread.close()


class _CpuPath:
    """Step counts are on the host."""

    def __init__(self, rule: UpdateRule, num_params: int, cpu_path: str) -> None:
        self._updater = cpu_updater(rule, cpu_path)
        self.steps = torch.zeros(num_params, dtype=torch.float32)

    def host_steps(self) -> list[int]:
        return [int(step) for step in self.steps.tolist()]

    def begin(self, hypers: Sequence[Any], active: Sequence[int]) -> Updater:
        return self._updater

    def count(self, active: Sequence[int]) -> None:
        self.steps[active] += 1


class _TritonPath:
    """Step counts are on the device, raised by the prologue."""

    def __init__(
        self, rule: UpdateRule, layout: StateLayout, group_of: Sequence[int], device: torch.device
    ) -> None:
        from .triton_path import TritonUpdater  # Triton is imported where it is used

        self._updater = TritonUpdater(rule, layout, group_of, device)
        self._num_params = len(group_of)
        self.steps = self._updater.steps

    def host_steps(self) -> list[int]:
        return [0] * self._num_params  # not looked at

    def begin(self, hypers: Sequence[Any], active: Sequence[int]) -> Updater:
        self._updater.set_present(active)
        self._updater.begin(hypers, with_norm=False)
        return self._updater

    def count(self, active: Sequence[int]) -> None:
        return


def _make_path(
    rule: UpdateRule, config: StateConfig, group_of: Sequence[int], device: torch.device
) -> _CpuPath | _TritonPath:
    """The CPU path for CPU parameters, Triton for those of a device."""
    if device.type == "cpu":
        return _CpuPath(rule, len(group_of), config.cpu_path)
    return _TritonPath(rule, rule.layout, group_of, device)


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

    def save(self, block: Block, undo: Tensor) -> None:
        for part in block.parts:
            if part.param in self._flat:
                undo[_in_block(part)] = self._flat[part.param][_inside(part)]

    def restore(self, block: Block, planes: Planes) -> None:
        for part in block.parts:
            if part.param in self._flat:
                self._flat[part.param][_inside(part)] = planes["param_undo"][_in_block(part)]


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
