"""The single-process torch reference that engine runs are compared with, on updates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

MakeOptimizer = Callable[[list[Tensor]], torch.optim.Optimizer]


def flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([t.detach().double().flatten() for t in tensors])


def relative_error(got: Tensor, want: Tensor) -> float:
    """||got - want|| / ||want||, of updates."""
    return float((got - want).norm() / want.norm())


def train_reference(
    module: nn.Module,
    make_optimizer: MakeOptimizer,
    batches: Sequence[Sequence[Any]],
    loss_of: Callable[[nn.Module, Any], Tensor],
    dtype: torch.dtype = torch.float32,
    max_norm: float = 0.0,
) -> Tensor:
    """fp32 masters of `module`'s trainable parameters after one step for each of `batches`.

    The parts of a batch are what ranks would each see: their gradients are averaged in fp32. The
    norm that clips is computed in fp64. The module computes in `dtype`.
    """
    params = [p for p in module.parameters() if p.requires_grad]
    masters = [p.detach().clone().float() for p in params]
    module.to(dtype)
    optimizer = make_optimizer(masters)
    for parts in batches:
        sums = [torch.zeros_like(m) for m in masters]
        present = [False] * len(params)
        for part in parts:
            module.zero_grad()
            loss_of(module, part).backward()
            for i, p in enumerate(params):
                if p.grad is not None:
                    sums[i] += p.grad.float() / len(parts)
                    present[i] = True
        norm = float(flat(sums).norm())
        factor = min(1.0, max_norm / (norm + 1e-6)) if max_norm > 0 else 1.0
        for master, total, there in zip(masters, sums, present, strict=True):
            master.grad = total * factor if there else None
        optimizer.step()
        with torch.no_grad():
            for p, master in zip(params, masters, strict=True):
                p.copy_(master)
    return flat(masters)
