"""Matrices of a plain module, which has all of each, for a rule that works on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gemini.optim.matrices.plan import WholeParam, blocks_waiting, buckets_of
from gemini.optim.matrices.updater import LocalTransport
from gemini.optim.rules.matrix_rule import MOMENTUM
from gemini.optim.rules.rule import UpdateRule
from gemini.optim.rules.state_layout import Columns
from gemini.optim.state.space import Block
from gemini.optim.step.executors import MatrixUpdates

from .views import Order


def matrix_updates(
    rule: UpdateRule,
    params: Sequence[Tensor],
    orders: Sequence[Order],
    columns: Columns,
    blocks: Sequence[Block],
    group_of: Sequence[int | None],
    on_disk: Callable[[], Sequence[Block]],
) -> tuple[MatrixUpdates, int]:
    """Maker of updaters, and the number of blocks that wait at once at most.

    Raises ValueError for parameters whose dtype is wider than that of directions.
    """
    if params[0].dtype == torch.float64:
        raise ValueError(
            "a rule over matrices got torch.float64 parameters; expected float32, bfloat16 or "
            "float16 (torch.optim.Muon updates others)"
        )
    # those that keep a momentum: matrices, or stacks of them
    whole_params = [
        WholeParam(i, tuple(order.size), order.stride, ((0, order.size.numel()),))
        for i, order in enumerate(orders)
        if columns.has(i, MOMENTUM.name) and len(order.size) >= 2 and order.size.numel()
    ]
    buckets = buckets_of(whole_params)

    def params_on_disk() -> set[int]:
        return {part.param for block in on_disk() for part in block.segments}

    alone = {"": LocalTransport()}
    updates = MatrixUpdates(rule, group_of, columns, alone, lambda: buckets, params_on_disk)
    return updates, blocks_waiting(buckets, blocks)
