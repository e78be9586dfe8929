"""Layers of experts by the names of `colossalai.nn.layer.moe`.

n tokens · E experts · k of a token · H width · C capacity of an expert, in tokens

`Experts` are stacked, as transformers' are: with `ep_size` of the plugins (`parallel =
dict(moe=dict(size=))` in a config) each rank has E / ep_size of them. Routers are GShard's (k = 2,
arXiv 2006.16668) and Switch Transformers' (k = 1, arXiv 2101.03961): an expert takes its first C
tokens of a rank; for a dropped token it adds nothing.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state
from torch.nn import functional

Noise = Callable[[Tensor], Tensor]


class NormalNoiseGenerator:
    """Noise of a router in training: adds 1 / E^2 times N(0, 1) to the logits it chooses by."""

    def __init__(self, num_experts: int) -> None:
        self._scale = 1 / num_experts**2

    def __call__(self, logits: Tensor) -> Tensor:
        return logits + torch.randn_like(logits) * self._scale


class UniformNoiseGenerator:
    """Noise of a router in training: multiplies the logits it chooses by with
    U(1 - eps, 1 + eps)."""

    def __init__(self, eps: float = 1e-2) -> None:
        self._eps = eps

    def __call__(self, logits: Tensor) -> Tensor:
        return logits * torch.empty_like(logits).uniform_(1 - self._eps, 1 + self._eps)


class _Router(nn.Module):
    """Router: chooses the k experts of a token, and their weights."""

    k: int

    def __init__(
        self,
        capacity_factor_train: float = 1.25,
        capacity_factor_eval: float = 2.0,
        min_capacity: int = 4,
        noisy_func: Noise | None = None,
        drop_tks: bool = True,
        *,
        capacity_factor: float | None = None,
    ) -> None:
        """Set the capacity. capacity_factor: for training and evaluation, in place of both.
        drop_tks: drop tokens over an expert's capacity."""
        super().__init__()
        both = capacity_factor_train, capacity_factor_eval
        self._factors = both if capacity_factor is None else (capacity_factor, capacity_factor)
        self._least, self._noise, self._drops = min_capacity, noisy_func, drop_tks

    def capacity(self, tokens: int, experts: int) -> int:
        """Capacity C = max(k * factor * n / E, least) of an expert, made an even number."""
        factor = self._factors[0 if self.training else 1]
        found = max(math.floor(self.k * factor * tokens / experts), self._least)
        return found + found % 2

    def forward(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Route logits [n, E] -> experts [n, k], weights [n, k] and balancing loss, 0-d.

        The loss is 1 if tokens are spread evenly.
        """
        experts = logits.shape[1]
        probs = logits.softmax(1)
        choice = logits if self._noise is None or not self.training else self._noise(logits)
        index = choice.topk(self.k, 1).indices
        chosen = functional.one_hot(index, experts)  # [n, k, E]
        share = chosen.sum(1).float().mean(0)
        loss = experts * (share * probs.mean(0)).sum() / self.k
        weights = probs.gather(1, index)
        if self._drops:  # first choices come before second ones
            by_rank = chosen.transpose(0, 1).reshape(-1, experts)  # [k * n, E]
            place = ((by_rank.cumsum(0) - 1) * by_rank).sum(1).view(self.k, -1).T
            weights = weights * (place < self.capacity(len(logits), experts))
        return index, weights, loss


class Top1Router(_Router):
    """Router of Switch Transformers: one expert for a token."""

    k = 1


class Top2Router(_Router):
    """Router of GShard: two experts for a token."""

    k = 2


class Experts(nn.Module):
    """Experts: E modules of one class, made with `expert_args`; every parameter is [E, ...].

    Raises ValueError for a class with buffers, which ranks would change apart.
    """

    def __init__(self, expert: type[nn.Module], num_experts: int, **expert_args: Any) -> None:
        super().__init__()
        made = [expert(**expert_args) for _ in range(num_experts)]
        params, buffers = stack_module_state(made)
        if buffers:
            raise ValueError(
                f"{expert.__name__} has buffers ({', '.join(buffers)}), which ranks would change "
                "apart; expected experts of parameters alone"
            )
        self.num_experts = num_experts
        self._names = {name: name.replace(".", "__") for name in params}
        for name, stacked in params.items():
            self.register_parameter(self._names[name], nn.Parameter(stacked.detach()))
        self.stacked = tuple(self._names.values())  # what `share_experts` splits
        self._template = (made[0].to("meta"),)  # a tuple: its parameters are none of this module

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Outputs [n, H] of experts `index` [n, k] for x [n, H], summed by `weights` [n, k]."""
        (template,), found = self._template, torch.zeros_like(x)
        template.train(self.training)
        for i in range(self.num_experts):
            token, place = torch.where(index == i)
            own = {name: getattr(self, key)[i] for name, key in self._names.items()}
            done = functional_call(template, own, (x[token],))
            found = found.index_add(0, token, (done * weights[token, place, None]).to(x.dtype))
        return found


class MoeLayer(nn.Module):
    """Layer [..., H] -> [..., H] of a gate, a router and experts.

    The gate's weight is [E, H]. The router gets fp32.
    """

    def __init__(
        self, dim_model: int, num_experts: int, router: nn.Module, experts: Experts
    ) -> None:
        super().__init__()
        self.gate = nn.Linear(dim_model, num_experts, bias=False)
        nn.init.trunc_normal_(self.gate.weight, std=math.sqrt(0.1 / dim_model))
        self.router, self.experts = router, experts

    def forward(self, inputs: Tensor) -> Tensor:
        tokens = inputs.reshape(-1, inputs.shape[-1])
        index, weights, loss = self.router(self.gate(tokens).float())
        MOE_CONTEXT.add(self, loss)
        found: Tensor = self.experts(tokens, index, weights)
        return found.reshape(inputs.shape)


class MoeContext:
    """Balancing losses of one forward, by layer.

    Each thread has its own, as threads may stand for ranks. A layer that runs again for activation
    checkpointing counts once.
    """

    def __init__(self) -> None:
        self._local = threading.local()

    def add(self, layer: nn.Module, loss: Tensor) -> None:
        """Note the loss of a layer in this forward."""
        self._losses()[layer] = loss

    def take(self) -> Tensor | float:
        """Sum of all losses; forgets them for the next forward."""
        losses = self._losses()
        found = sum(losses.values(), 0.0)
        losses.clear()
        return found

    def _losses(self) -> WeakKeyDictionary[nn.Module, Tensor]:
        if not hasattr(self._local, "losses"):
            self._local.losses = WeakKeyDictionary[nn.Module, Tensor]()
        found: WeakKeyDictionary[nn.Module, Tensor] = self._local.losses
        return found


MOE_CONTEXT = MoeContext()


class MoeLoss(nn.Module):
    """Loss of `loss_fn(**options)`, plus `aux_weight` times the balancing losses."""

    def __init__(self, aux_weight: float, loss_fn: type[nn.Module], **options: Any) -> None:
        super().__init__()
        self.loss_fn, self.aux_weight = loss_fn(**options), aux_weight

    def forward(self, *args: Any) -> Tensor:
        loss: Tensor = self.loss_fn(*args) + self.aux_weight * MOE_CONTEXT.take()
        return loss


def moe_set_seed(seed: int) -> None:
    """Seed torch before experts are made: all ranks make all of them, and keep their own."""
    torch.manual_seed(seed)
