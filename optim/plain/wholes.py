"""Executors of rules over whole parameters, for a plain module, which has all of each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gemini.optim.matrices.plan import Whole, buckets_of
from gemini.optim.matrices.updater import Alone
from gemini.optim.rules.control_vector import ControlVector
from gemini.optim.rules.line_rule import LineRule
from gemini.optim.rules.matrix_rule import MOMENTUM, MatrixRule
from gemini.optim.rules.rule import NormRule
from gemini.optim.rules.state_layout import Columns
from gemini.optim.state.lines import Lines
from gemini.optim.state.memory import memory_of
from gemini.optim.state.space import Block, BlockSegment
from gemini.optim.state.tiered_state import TieredState
from gemini.optim.step.cpu_step import CpuStep
from gemini.optim.step.matrix_step import (
    MatrixDeviceStep,
    MatrixPlan,
    MatrixStep,
    MatrixUpdates,
    bucket_homes,
)
from gemini.optim.step.norms import Cover, add_lines, square_sums, trusted, with_lines
from gemini.optim.step.triton_step import OperatorStep
from gemini.optim.update.cpu_update import CpuWorkers, StepInputs
from gemini.optim.update.updaters import CpuUpdater

from .views import Order, dense_grad


def check_width(params: Sequence[Tensor]) -> None:
    """Raise ValueError for parameters whose dtype is wider than that of directions."""
    if params[0].dtype == torch.float64:
        raise ValueError(
            "a rule over matrices got torch.float64 parameters; expected float32, bfloat16 or "
            "float16 (torch.optim.Muon updates others)"
        )


def wholes_of(orders: Sequence[Order], columns: Columns) -> list[Whole]:
    """Wholes of the parameters that keep a momentum: matrices, or stacks of them."""
    return [
        Whole(i, tuple(order.size), order.stride, ((0, order.size.numel()),))
        for i, order in enumerate(orders)
        if columns.has(i, MOMENTUM.name) and len(order.size) >= 2 and order.size.numel()
    ]


def matrix_step(
    rule: MatrixRule,
    group_of: Sequence[int],
    wholes: Sequence[Whole],
    state: TieredState,
    device: torch.device,
) -> MatrixStep | MatrixDeviceStep:
    """Make the executor of a rule over matrices for parameters on a device."""

    def planned() -> MatrixPlan:
        on_disk = () if state.nvme is None else state.nvme.blocks
        return MatrixPlan(buckets, bucket_homes(buckets, on_disk), {"": Alone()})

    buckets = buckets_of(wholes)
    updates = MatrixUpdates(rule, group_of, state.columns, planned)
    control = ControlVector(None, device)
    if device.type != "cpu":
        return MatrixDeviceStep(updates, control, memory_of(device))
    return MatrixStep(CpuUpdater(CpuWorkers(), rule), updates, control)


def line_step(rule: LineRule, num_params: int, device: torch.device) -> CpuStep | OperatorStep:
    """Make the executor of a rule over lines, by operators on any device."""
    control = ControlVector(None, device)
    if device.type != "cpu":
        return OperatorStep(rule, range(num_params), control, memory_of(device))
    return CpuStep(CpuUpdater(CpuWorkers(), rule), num_params, control)


class _PlainCover(Cover):
    """Cover of a plain module: parameters, and gradients in `p.grad`."""

    def __init__(self, params: Sequence[Tensor], orders: Sequence[Order]) -> None:
        self._params = params
        self._orders = orders

    def param(self, block: Block, part: BlockSegment) -> Tensor:
        flat = self._orders[part.param].flat(self._params[part.param].detach())
        return flat[part.param_offset : part.param_offset + part.numel]

    def largest(self, param: int) -> float:
        """Largest magnitude of a parameter's gradient."""
        grad = self._params[param].grad
        return 0.0 if grad is None else float(torch.linalg.vector_norm(grad, math.inf))

    def grad(self, block: Block, part: BlockSegment) -> Tensor | None:
        param = self._params[part.param]
        if param.grad is None:
            return None
        flat = dense_grad(param, self._orders[part.param])
        return flat[part.param_offset : part.param_offset + part.numel]


def with_norms(
    rule: NormRule,
    state: TieredState,
    params: Sequence[Tensor],
    orders: Sequence[Order],
    hyper: Sequence[Any],
    counts: Sequence[int],
    factor: float,
    lines: Lines,
) -> list[Any]:
    """Hyperparameters by parameter, with factors from norms. counts: of updates before this one."""
    steps, cover = [count + 1 for count in counts], _PlainCover(params, orders)
    inputs = StepInputs(factor)
    if isinstance(rule, LineRule):
        largest = [cover.largest(i) * factor for i in range(len(params))]
        of_lines = lines.sums([param.grad is not None for param in params], largest)
        add_lines(state, cover, of_lines, inputs)
        hyper = with_lines(rule, lines, of_lines, hyper, steps)
    sums = square_sums(rule, state, cover, hyper, steps, inputs)
    return trusted(rule, hyper, sums, [param.numel() for param in params])
