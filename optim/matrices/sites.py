"""Sites of the elementwise parts of an update of matrices: the host, or a device.

A device computes by torch's operators, in the dtypes and the order of the host's path; blocks whose
state is in host memory pass through its sets of staging in turn: one comes and one leaves while
another is updated. The orthogonal iterations between the two parts take far longer than both.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from gemini.optim.rules.orthogonal import Gram
from gemini.optim.rules.report import Traffic
from gemini.optim.rules.rule import UpdateRule
from gemini.optim.rules.state_layout import WEIGHT
from gemini.optim.state.memory import Memory
from gemini.optim.state.pieces import BlockViews, Piece, Planes, Resident
from gemini.optim.state.space import Block
from gemini.optim.update import cpu_update
from gemini.optim.update.changed_bits import mark
from gemini.optim.update.cpu_update import StepInputs
from gemini.optim.update.staging import DeviceStaging
from gemini.optim.update.updaters import CpuUpdater
from gemini.tickets import CopyTicket


class Site(Protocol):
    """Place where an update computes, on pieces whose tensors are in its memory."""

    @property
    def inputs(self) -> StepInputs:
        """Inputs of the step: factor and limit of gradients, and how weights are rounded."""
        ...

    @property
    def name(self) -> str: ...

    @property
    def gram(self) -> Gram | None:
        """Product of a matrix with its transpose, where torch's is not asked for; see
        `orthogonal`."""
        ...

    def zeros(self, numel: int, dtype: torch.dtype) -> Tensor: ...

    def bring(self, block: Block, planes: Planes, *, on_host: bool) -> Planes:
        """Bring a block's state to where it can be updated, until the next block is brought."""
        ...

    def take_back(
        self, planes: Planes, here: Planes, of: Block, views: BlockViews
    ) -> CopyTicket | None:
        """Begin to take updated state back to `planes`, and a block's borrowed parameters; None:
        they are there."""
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
    gram: ClassVar = None

    @property
    def inputs(self) -> StepInputs:
        return self.updater.inputs

    @property
    def name(self) -> str:
        return self.updater.name

    def zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(numel, dtype=dtype)

    def bring(self, block: Block, planes: Planes, *, on_host: bool) -> Planes:
        return planes

    def take_back(self, planes: Planes, here: Planes, of: Block, views: BlockViews) -> None:
        """None: state is updated where it is."""

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

    @property
    def gram(self) -> Gram | None:
        if self.memory.device.type != "cuda":  # a simulated one has the bits of its host
            return None
        from gemini.kernels_triton.symmetric import gram  # Triton is imported where it is used

        return gram

    def zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        return self.memory.zeros(numel, dtype, on_host=False)

    def bring(self, block: Block, planes: Planes, *, on_host: bool) -> Planes:
        if not on_host:
            self.staging.use(block.id)
            return planes
        state = {name: plane for name, plane in planes.items() if name != WEIGHT}
        return self.staging.bring_state(block.id, state)

    def take_back(
        self, planes: Planes, here: Planes, of: Block, views: BlockViews
    ) -> CopyTicket | None:
        pairs = [] if here is planes else [(planes[name], here[name]) for name in here]
        nbytes = sum(plane.nbytes for plane, _ in pairs)
        self.moved += Traffic(host_to_device=nbytes, device_to_host=nbytes)
        pairs += views.leaving(of, planes.get(WEIGHT))
        if not pairs:
            return None
        copies = self.staging.take_back(pairs)
        views.left(of, copies)
        return copies

    def update(self, rule: UpdateRule, pieces: Sequence[Piece], inputs: StepInputs) -> None:
        for piece in pieces:
            grad = piece.grad.float()
            if inputs.factor != 1.0:
                grad = grad * inputs.factor
            if inputs.limit != math.inf:
                grad = grad.clamp(-inputs.limit, inputs.limit)
            param = piece.param.float() if piece.master is None else piece.master
            before = None if piece.changed is None else piece.param.clone()
            planes = rule.given(piece.planes, piece.hyper, piece.first, param)
            rule.update(param, grad, planes, piece.hyper, piece.step)
            if param is not piece.param:
                cpu_update.show(param, piece, inputs.rounding_seed)
            if piece.changed is not None and before is not None:
                mark(piece.changed, before, piece.param)

    def traffic(self) -> Traffic:
        return self.moved


def update_apart(
    site: Site,
    rule: UpdateRule,
    block: Block,
    planes: Planes,
    views: BlockViews,
    *,
    on_host: bool,
) -> CopyTicket | None:
    """Update a block with a gradient and without matrices; see `Updater.update_block`."""
    here = site.bring(block, planes, on_host=on_host)
    site.update(rule, views.pieces(block, here), site.inputs)
    return site.take_back(planes, here, block, views)


@dataclass(frozen=True, slots=True)
class SiteUpdater:
    """Updater of blocks one after the other, by a rule whose parameters need no others' values."""

    site: Site
    rule: UpdateRule
    keeps_blocks: ClassVar = False

    @property
    def name(self) -> str:
        return self.site.name

    def update_block(self, block: Block, planes: Planes, views: BlockViews) -> CopyTicket | None:
        return update_apart(self.site, self.rule, block, planes, views, on_host=True)

    def update_resident(self, slab: Resident, views: BlockViews) -> None:
        for block in slab.blocks:
            if views.touches(block):
                planes = slab.planes(block)
                update_apart(self.site, self.rule, block, planes, views, on_host=False)

    def traffic(self) -> Traffic:
        return self.site.traffic()
