"""Small modules with odd sizes for tests of the engine."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

_drawing = threading.RLock()


@contextmanager
def seeded(seed: int = 0) -> Iterator[None]:
    """What is drawn inside depends on `seed` alone, and nothing outside on it.

    Threads have one generator of torch's between them, so they take turns. No collective inside.
    """
    with _drawing, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


class Tower(nn.Module):
    """Linear layers, a norm, a tied head: several chunks when chunks are small."""

    def __init__(self, seed: int = 0, *, depth: int = 4, width: int = 33, wide: int = 77) -> None:
        super().__init__()
        with seeded(seed):
            self.embed = nn.Embedding(97, width)
            self.layers = nn.ModuleList(
                nn.Sequential(
                    nn.LayerNorm(width), nn.Linear(width, wide), nn.GELU(), nn.Linear(wide, width)
                )
                for _ in range(depth)
            )
            self.head = nn.Linear(width, 97, bias=False)
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x)
        logits: Tensor = self.head(x)
        return logits


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
        with seeded(0):
            self.body = nn.Linear(5, 7)
            self.heads = nn.ModuleList(nn.Linear(7, 3) for _ in range(3))

    def forward(self, x: Tensor, head: int) -> Tensor:
        out: Tensor = self.heads[head](self.body(x))
        return out


class Block(nn.Module):
    """Attention of 4 heads and a gated layer over x [batch, time, 32], as Llama has them."""

    def __init__(self, biases: bool) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(32), nn.LayerNorm(32)
        self.q, self.k, self.v = (nn.Linear(32, 32, bias=biases) for _ in range(3))
        self.out = nn.Linear(32, 32, bias=biases)
        self.gate, self.up = nn.Linear(32, 72, bias=biases), nn.Linear(32, 72, bias=biases)
        self.down = nn.Linear(72, 32, bias=biases)

    def forward(self, x: Tensor) -> Tensor:
        n = self.norm_1(x)
        batch = n.shape[0]
        q, k, v = (
            layer(n).view(batch, n.shape[1], -1, 8).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        weights = (q @ k.transpose(-1, -2) / 8**0.5).softmax(-1)
        x = x + self.out((weights @ v).transpose(1, 2).reshape(batch, v.shape[2], -1))
        n = self.norm_2(x)
        out: Tensor = x + self.down(nn.functional.silu(self.gate(n)) * self.up(n))
        return out


class Splittable(nn.Module):
    """A transformer that torch's tensor parallelism splits. ids [batch, time] to [.., 97]."""

    def __init__(self, seed: int = 0, *, biases: bool = True, tied: bool = False) -> None:
        super().__init__()
        with seeded(seed):
            self.embed = nn.Embedding(97, 32)
            self.blocks = nn.ModuleList(Block(biases) for _ in range(2))
            self.norm = nn.LayerNorm(32)
            self.head = nn.Linear(32, 97, bias=False)
            if tied:
                self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


class _Exchange(torch.autograd.Function):
    """Rows to other ranks, and their gradients back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, arrive: list[int], leave: list[int], group: Any) -> Tensor:
        ctx.back = leave, arrive, group
        there = x.new_empty(sum(arrive), *x.shape[1:])
        dist.all_to_all_single(there, x.contiguous(), arrive, leave, group=group)
        return there

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _Exchange.apply(grads[0], *ctx.back), None, None, None


class Experts(nn.Module):
    """Stacked gated layers, of which each token has one. x [n, width], chosen int64 [n].

    mesh: over which they were split, if they were: tokens go to the rank that has theirs.
    """

    def __init__(self, count: int = 4, width: int = 32, inner: int = 24) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(count, width, inner) / width**0.5)
        self.down = nn.Parameter(torch.randn(count, inner, width) / inner**0.5)
        self.mesh: Any = None

    def split(self, mesh: Any) -> None:
        from torch.distributed.tensor import Shard, distribute_tensor

        for name, whole in list(self.named_parameters()):
            mine = distribute_tensor(whole.detach(), mesh, [Shard(0)], src_data_rank=None)
            setattr(self, name, nn.Parameter(mine, requires_grad=whole.requires_grad))
        self.mesh = mesh

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        if self.mesh is None:
            return self._computed(x, chosen, self.up, self.down)
        up: Any = self.up
        down: Any = self.down
        group, size = self.mesh.get_group(), self.mesh.size()
        on_each = -(-up.shape[0] // size)
        order = chosen.argsort(stable=True)
        leave = (chosen // on_each).bincount(minlength=size)
        arrive = torch.empty_like(leave)
        dist.all_to_all_single(arrive, leave, group=group)
        here, there = arrive.tolist(), leave.tolist()
        mine = _Exchange.apply(chosen[order], here, there, group)
        tokens = _Exchange.apply(x[order], here, there, group)
        first = on_each * self.mesh.get_local_rank()
        y = self._computed(tokens, mine - first, up.to_local(), down.to_local())
        back: Tensor = _Exchange.apply(y, there, here, group)[order.argsort()]
        return back

    @staticmethod
    def _computed(x: Tensor, chosen: Tensor, up: Tensor, down: Tensor) -> Tensor:
        y = 0 * x
        for expert in range(up.shape[0]):
            rows = (chosen == expert).nonzero().flatten()
            if len(rows):  # else nothing of it is in the graph
                y = y.index_copy(0, rows, (x[rows] @ up[expert]).relu() @ down[expert])
        return y


class Routed(nn.Module):
    """A router, experts of which each token has one, and a shared one. x [n, width]."""

    def __init__(self, count: int = 4, width: int = 32, inner: int = 24) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(width), nn.Linear(width, count)
        self.experts = Experts(count, width, inner)
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        n = self.norm(x)
        weight, chosen = self.router(n).softmax(-1).max(-1)
        y: Tensor = x + weight[:, None] * self.experts(n, chosen) + self.down(self.up(n).relu())
        return y


class Mixture(nn.Module):
    """Layers of experts, and one more for ids from 90 on. ids [batch, time] to [.., 97]."""

    RARE = 90

    def __init__(self, seed: int = 0, count: int = 4) -> None:
        super().__init__()
        with seeded(seed):
            self.embed = nn.Embedding(97, 32)
            self.layers = nn.ModuleList(Routed(count) for _ in range(2))
            self.rare = Routed(count)
            self.head = nn.Linear(32, 97, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids).flatten(0, 1)
        for layer in self.layers:
            x = layer(x)
        rows = (ids.flatten() >= self.RARE).nonzero().flatten()
        x = x.index_copy(0, rows, self.rare(x[rows]))
        logits: Tensor = self.head(x).view(*ids.shape, -1)
        return logits
