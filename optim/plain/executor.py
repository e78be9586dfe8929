"""The executor of a plain module's parameters: of the host for those of the CPU, else Triton's."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gemini.optim.rules.config import StateConfig, UpdateFacts
from gemini.optim.rules.control_vector import ControlVector
from gemini.optim.rules.rule import UpdateRule
from gemini.optim.state.memory import memory_of
from gemini.optim.step.cpu_step import CpuStep
from gemini.optim.step.executor import Executor
from gemini.optim.step.triton_step import TritonStep
from gemini.optim.update.compiled_update import Mix
from gemini.optim.update.updaters import cpu_updater


def make_executor(
    rule: UpdateRule, config: StateConfig, group_of: Sequence[int], params: Sequence[Tensor]
) -> Executor:
    """`group_of[i]` is the param group of `params[i]`, which are of one device, float64 or not."""
    device = params[0].device
    if device.type != "cpu":
        return on_device(rule, group_of, device)
    facts = UpdateFacts(
        sum(param.numel() for param in params),
        has_master=False,
        is_float64=params[0].dtype == torch.float64,
    )
    dtypes = dict.fromkeys(param.dtype for param in params)
    mixes = [Mix(dtype, dtype, has_master=False) for dtype in dtypes]
    updater = cpu_updater(rule, config.cpu_path, facts, mixes)
    return CpuStep(updater, len(params), ControlVector(None, device))


def on_device(rule: UpdateRule, group_of: Sequence[int], device: torch.device) -> TritonStep:
    """Triton's, whatever the device: that of tests is the CPU."""
    return TritonStep(rule, group_of, ControlVector(None, device), memory_of(device))
