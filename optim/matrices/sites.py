"""Sites of the elementwise parts of an update of matrices: the host, or a device.

A device computes by torch's operators, in the dtypes and the order of the host's path; blocks whose
state is in host memory pass through its staging, one after the other. The orthogonal iterations
between the two parts take far longer than both.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from gemini.optim.rules.report import Traffic
from gemini.optim.rules.rule import UpdateRule
from gemini.optim.state.memory import Memory
from gemini.optim.state.pieces import Piece, Planes, Resident, SteppedViews
from gemini.optim.state.space import Block
from gemini.optim.update import cpu_update
from gemini.optim.update.cpu_update import StepInputs
from gemini.optim.update.staging import DeviceStaging
from gemini.optim.update.updaters import CpuUpdater


class Site(Protocol):
    """Place where an update computes, on pieces whose tensors are in its memory."""

    @property
    def inputs(self) -> StepInputs:
        """Inputs of the step: factor and limit of gradients, and how weights are rounded."""
        ...

    @property
    def name(self) -> str: ...

    def zeros(self, numel: int, dtype: torch.dtype) -> Tensor: ...

    def bring(self, planes: Planes, *, on_host: bool) -> Planes:
        """Bring a block's state to where it can be updated, until the next block is brought."""
        ...

    def give_back(
        self, planes: Planes, here: Planes, more: Sequence[tuple[Tensor, Tensor]] = ()
    ) -> None:
        """Copy updated state back to `planes`, together with the copies `more`. Waits for them."""
        ...

    def update(self, rule: UpdateRule, pieces: Sequence[Piece], inputs: StepInputs) -> None:
        """Update all pieces by one step."""
        ...

    def traffic(self) -> Traffic:
        """Bytes moved between host and device so far."""
        ...


@dataclass(frozen=True, slots=True)
class HostSite:
    """Site of the host: its cores and its memory."""

    updater: CpuUpdater

    @property
    def inputs(self) -> StepInputs:
        return self.updater.inputs

    @property
    def name(self) -> str:
        return self.updater.name

    def zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(numel, dtype=dtype)

    def bring(self, planes: Planes, *, on_host: bool) -> Planes:
        return planes

    def give_back(
        self, planes: Planes, here: Planes, more: Sequence[tuple[Tensor, Tensor]] = ()
    ) -> None:
        assert not more

    def update(self, rule: UpdateRule, pieces: Sequence[Piece], inputs: StepInputs) -> None:
        cpu_update.update(self.updater.workers, rule, pieces, inputs)

    def traffic(self) -> Traffic:
        return self.updater.traffic()


@dataclass(slots=True)
class DeviceSite:
    """Site of a device, which computes by torch's operators."""

    memory: Memory
    staging: DeviceStaging
    inputs: StepInputs
    moved: Traffic = field(default_factory=Traffic)
    name: str = "torch"

    def zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        return self.memory.zeros(numel, dtype, on_host=False)

    def bring(self, planes: Planes, *, on_host: bool) -> Planes:
        if not on_host:
            return planes
        here = self.staging.planes(0, planes)
        self.memory.copy_all([(here[name], planes[name]) for name in planes]).order()
        return here

    def give_back(
        self, planes: Planes, here: Planes, more: Sequence[tuple[Tensor, Tensor]] = ()
    ) -> None:
        if here is planes:
            return
        self.memory.copy_all([*((planes[name], here[name]) for name in planes), *more]).settle()
        nbytes = sum(plane.nbytes for plane in planes.values())
        self.moved += Traffic(host_to_device=nbytes, device_to_host=nbytes)

    def update(self, rule: UpdateRule, pieces: Sequence[Piece], inputs: StepInputs) -> None:
        for piece in pieces:
            grad = piece.grad.float()
            if inputs.factor != 1.0:
                grad = grad * inputs.factor
            if inputs.limit != math.inf:
                grad = grad.clamp(-inputs.limit, inputs.limit)
            param = piece.param.float() if piece.master is None else piece.master
            planes = rule.given(piece.planes, piece.hyper, piece.first, param)
            rule.update(param, grad, planes, piece.hyper, piece.step)
            if param is not piece.param:
                cpu_update.show(param, piece, inputs.rounding_seed)

    def traffic(self) -> Traffic:
        return self.moved


def update_apart(
    site: Site,
    rule: UpdateRule,
    block: Block,
    planes: Planes,
    views: SteppedViews,
    *,
    on_host: bool,
) -> bool:
    """Update a block without matrices; False where it has no gradient."""
    touched = views.touches(block)
    if touched:
        here = site.bring(planes, on_host=on_host)
        site.update(rule, views.pieces(block, here), site.inputs)
        site.give_back(planes, here, leaving_with(site, block, views))
    views.updated(block)
    return touched


@dataclass(frozen=True, slots=True)
class SiteUpdater:
    """Updater of blocks one after the other, by a rule whose parameters need no others' values."""

    site: Site
    rule: UpdateRule
    keeps_blocks: ClassVar = False

    @property
    def name(self) -> str:
        return self.site.name

    def update_staged(self, block: Block, planes: Planes, views: SteppedViews) -> bool:
        return update_apart(self.site, self.rule, block, planes, views, on_host=True)

    def update_host(
        self, blocks: Sequence[tuple[Block, Planes]], views: SteppedViews
    ) -> Iterator[tuple[Block, None]]:
        for block, planes in blocks:
            self.update_staged(block, planes, views)
            yield block, None

    def update_resident(self, slab: Resident, views: SteppedViews) -> None:
        for block in slab.blocks:
            planes = slab.planes(block)
            update_apart(self.site, self.rule, block, planes, views, on_host=False)

    def traffic(self) -> Traffic:
        return self.site.traffic()


def leaving_with(site: Site, block: Block, views: SteppedViews) -> Sequence[tuple[Tensor, Tensor]]:
    """Copies of a block's parameters that go to files, after an update on a device."""
    return views.leaving(block, None) if isinstance(site, DeviceSite) else ()
