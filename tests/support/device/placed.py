"""Small modules on the simulated device, with model data wherever a test says."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from bench.shared.models import seeded
from bench.shared.simulated import SimBackend
from gemini import GeminiDDP, StaticPlacement
from gemini.placement.sizes import UNLIMITED
from gemini.placement.tiers import Tier
from optim import HybridAdam, NvmeConfig

Homes = tuple[bool, bool, bool]  # parameters, gradients, state: on the host
HOMES: list[Homes] = list(itertools.product((False, True), repeat=3))
NAMES = ["".join("dh"[on_host] for on_host in homes) for homes in HOMES]


class Forked(nn.Module):
    """Layers of odd sizes, and a spare one that not every call uses."""

    def __init__(self, width: int = 33, inner: int = 77) -> None:
        super().__init__()
        with seeded():
            self.first, self.second = nn.Linear(width, inner), nn.Linear(inner, width)
            self.spare = nn.Linear(width, width)

    def forward(self, x: Tensor, uses_spare: bool = True) -> Tensor:
        x = x + self.second(torch.tanh(self.first(x)))
        return x + self.spare(x) if uses_spare else x


class SpareLayer(nn.Module):
    """A block of whose state may belong to a parameter that no call uses."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.spare, self.b = nn.Linear(33, 77), nn.Linear(33, 33), nn.Linear(77, 33)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(torch.tanh(self.a(x)))


def batch(step: int) -> Tensor:
    return torch.randn(5, 33, generator=torch.Generator().manual_seed(step))


def device(by_triton: bool, seed: int = 1, reaches: float = 0.0) -> SimBackend:
    """Where a plan says where shards live. reaches: see `SimBackend`."""
    backend = SimBackend(seed, updates_by_triton=by_triton, reaches=reaches)
    backend.shards_start_on_host = False
    return backend


def place_gradients(model: GeminiDDP, home: Tier) -> None:
    """Whatever the plan says, they wait there, and all of them may be on their way at once."""
    plan = model.engine.planning.plan
    shards = tuple(replace(s, grad_home=home, leaving_bytes=UNLIMITED) for s in plan.shards)
    model.engine.storage.place_gradients(replace(plan, shards=shards), model.engine.chunks)


def wrapped(
    module: nn.Module, backend: SimBackend, homes: Homes, block_numel: int = 1024, **options: Any
) -> tuple[GeminiDDP, HybridAdam]:
    """In chunks of some layers, with model data in these homes."""
    params, grads, state = homes
    model = GeminiDDP(
        module, backend, StaticPlacement(1.0, float(state), float(params)),
        min_chunk_size_m=1500 / 2**20, **options,
    )  # fmt: skip
    optimizer = HybridAdam(
        model.parameters(), lr=1e-2, eps=1e-3, nvme=NvmeConfig(block_numel=block_numel)
    )
    place_gradients(model, Tier.HOST if grads else Tier.DEVICE)
    found = {(shard.param_home is Tier.HOST, set(shard.state_homes) == {Tier.HOST})
             for shard in model.engine.planning.plan.shards}  # fmt: skip
    assert found == {(params, state)}
    return model, optimizer
