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
    divisor: int | None = None,
) -> Tensor:
    """fp32 masters of `module`'s trainable parameters after one step for each of `batches`.

    The parts of a batch are what ranks, and backwards before a step, would each see: their
    gradients are added in fp32 and divided by `divisor`, the number of ranks (None: averaged).
    The norm that clips is computed in fp64. The module computes in `dtype`, its buffers in theirs;
    in fp16 the loss is scaled, so that gradients do not underflow before they are added.
    """
    scale = 2.0**12 if dtype == torch.float16 else 1.0
    params = [p for p in module.parameters() if p.requires_grad]
    masters = [p.detach().clone().float() for p in params]
    for param in module.parameters():
        param.data = param.data.to(dtype)
    optimizer = make_optimizer(masters)
    for parts in batches:
        sums = [torch.zeros_like(m) for m in masters]
        present = [False] * len(params)
        for part in parts:
            module.zero_grad()
            (loss_of(module, part) * scale).backward()
            for i, p in enumerate(params):
                if p.grad is not None:
                    sums[i] += p.grad.float() / scale / (divisor or len(parts))
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


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Weights, masters, moments and step counts of a wrapped module, on rank 0."""
    found: dict[str, Tensor] = dict(model.state_dict())
    for name, planes in optimizer.state_dict()["state"].items():
        found |= {f"{name}/{plane}": values.clone() for plane, values in planes.items()}
    return found


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    """Bit for bit."""
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)
