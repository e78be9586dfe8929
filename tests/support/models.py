"""Small modules with odd sizes for tests of the engine."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Tower(nn.Module):
    """Linear layers, a norm, a tied head: several chunks when chunks are small."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(97, 33)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(33), nn.Linear(33, 77), nn.GELU(), nn.Linear(77, 33))
            for _ in range(4)
        )
        self.head = nn.Linear(33, 97, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def token_loss(model: nn.Module, ids: Tensor) -> Tensor:
    """Mean next-token cross entropy."""
    logits: Any = model(ids)
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


def token_batches(num_batches: int, num_parts: int, seed: int = 1) -> list[list[Tensor]]:
    """int64 [4, 9] for each part of each batch."""
    generator = torch.Generator().manual_seed(seed)
    return [
        [torch.randint(97, (4, 9), generator=generator) for _ in range(num_parts)]
        for _ in range(num_batches)
    ]


class Choosy(nn.Module):
    """A body and three heads, of which a call uses one. Returns [n, 3]."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(5, 7)
        self.heads = nn.ModuleList(nn.Linear(7, 3) for _ in range(3))

    def forward(self, x: Tensor, head: int) -> Tensor:
        return self.heads[head](self.body(x))
