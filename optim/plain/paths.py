"""How the parameters of a plain module are updated: by the CPU path, or by Triton on the device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from gemini.tickets import Done, Ticket
from optim.rules.config import StateConfig, UpdateFacts
from optim.rules.control_vector import Scaler
from optim.rules.report import Outcome
from optim.rules.rule import UpdateRule
from optim.rules.state_layout import StateLayout
from optim.state.pieces import Updater
from optim.target import AmpInputs
from optim.update.cpu_path import StepInputs
from optim.update.updaters import CpuUpdater, cpu_updater


class CpuPath:
    """Step counts are on the host."""

    def __init__(self, rule: UpdateRule, params: Sequence[Tensor], cpu_path: str) -> None:
        facts = UpdateFacts(
            sum(param.numel() for param in params),
            has_master=False,
            is_float64=params[0].dtype == torch.float64,
        )
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


class TritonPath:
    """Step counts are on the device, raised by the prologue."""

    def __init__(
        self, rule: UpdateRule, layout: StateLayout, group_of: Sequence[int], device: torch.device
    ) -> None:
        from optim.update.triton_path import TritonUpdater  # Triton is imported where it is used

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
        from optim.update.triton_path import DeviceOutcome

        return DeviceOutcome(self._updater, None)

    def count(self, active: Sequence[int]) -> None:
        return

    def power_sum(self, grads: Sequence[Tensor], norm_type: float) -> Tensor:
        norms = [
            torch.linalg.vector_norm(grad, norm_type, dtype=torch.float64)
            for grad in grads
            if grad.numel()
        ]
        if not norms:
            return torch.zeros((), dtype=torch.float64, device=self.steps.device)
        together = torch.stack(norms)
        return together.max() if norm_type == math.inf else (together**norm_type).sum()


def make_path(
    rule: UpdateRule, config: StateConfig, group_of: Sequence[int], params: Sequence[Tensor]
) -> CpuPath | TritonPath:
    """The CPU path for CPU parameters, Triton for those of a device."""
    device = params[0].device
    if device.type == "cpu":
        return CpuPath(rule, params, config.cpu_path)
    return TritonPath(rule, rule.layout, group_of, device)
