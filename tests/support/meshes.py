"""What training on meshes is compared with one process by: its optimizer, ZeRO stages, steps."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bench.shared.models import token_loss
from bench.shared.reference import train_reference
from gemini import StaticPlacement

ADAM = {"lr": 1e-2, "eps": 1e-3, "weight_decay": 0.01}  # eps: small gradients are no signs
MAX_NORM = 0.3
STAGES = {
    1: StaticPlacement(0.0, shard_grads=False),
    2: StaticPlacement(0.0),
    3: StaticPlacement(1.0),
}
STEPS, PARTS = 3, 3  # parts: backwards that add up to a step
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def reference(
    module: nn.Module,
    batches: Sequence[Sequence[Any]],
    precision: str = "fp32",
    loss_of: Callable[[nn.Module, Any], Tensor] = token_loss,
) -> Tensor:
    """fp32 masters that one process of torch comes to."""
    return train_reference(
        module,
        lambda params: torch.optim.AdamW(params, **ADAM),  # type: ignore[arg-type]
        batches,
        loss_of,
        DTYPES[precision],
        MAX_NORM,
    )


def own_parts(parts: Sequence[Tensor], tp: int = 1) -> Sequence[Tensor]:
    """Of a batch: those of this rank, which ranks that split its layers have, too."""
    place, count = dist.get_rank() // tp, len(parts) * tp // dist.get_world_size()
    return parts[place * count : (place + 1) * count]
