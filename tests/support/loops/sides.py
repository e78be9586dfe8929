"""One training loop on plain torch and on a wrapped module, and how far their updates differ."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bench.shared.models import seeded
from bench.shared.simulated import SimBackend
from gemini import AutoPlacement, GeminiDDP, StaticPlacement
from gemini.chunk.layout import specs_of
from gemini.memtracer.trace import sequential_trace
from gemini.placement.tiers import Tier
from optim import HybridAdam, NvmeConfig
from tests.support.loops.doors import without_wrappers
from tests.support.loops.tails import on_host

WIDTH = 24
SMALL = {"min_chunk_size_m": 600 / 2**20, "search_range_m": 600 / 2**20}
# eps so large that an update shows the gradient and not its sign alone
ADAM = {"lr": 0.3, "eps": 1.0, "weight_decay": 0.0}
Loop = Callable[[Any, Any], object]  # of a model and its optimizer


class Net(nn.Module):
    """Square layers; at several ranks, and on the simulated device, each is released in turn."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        with seeded():
            self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


def batch(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(4, WIDTH, generator=generator), torch.randn(4, WIDTH, generator=generator)


def loss_of(model: nn.Module, seed: int) -> Tensor:
    x, y = batch(seed)
    return (model(x).float() - y).pow(2).mean()


def full_step(model: Any, optimizer: Any, seed: int = 0) -> None:
    """Backward, step, and gradients cleared."""
    loss_of(model, seed).backward()
    optimizer.step()
    optimizer.zero_grad()


# Where model data lives: by name, the options of GeminiDDP. Made anew for each run.
PLACEMENTS: dict[str, Callable[[nn.Module], dict[str, Any]]] = {
    "resident": lambda module: {"placement_policy": "cuda"},
    "zero2": lambda module: {"placement_policy": StaticPlacement(0.0)},
    "host": lambda module: {"device": SimBackend(seed=3)},
    "nvme": lambda module: {"placement_policy": "cuda"},  # and all state on disk
    "files": lambda module: {  # parameters and gradients too
        "placement_policy": AutoPlacement(world_size() * 104 * 1024),
        "trace": sequential_trace(specs_of(module, "float32")),
    },
}
# With updates beside a pass; in the last two half of the parameters are in host memory.
BESIDE: dict[str, Callable[[nn.Module], dict[str, Any]]] = {
    "nvme, tail": lambda module: {"placement_policy": "cuda", "update": "tail"},
    "cpu, tail": lambda module: {"update": "tail", **on_host("cpu", params=0.5, grads=True)},
    "stream, tail": lambda module: {"update": "tail", **on_host("stream", params=0.5, disk=0.5)},
}
ON_DISK = {"nvme": 1.0, "nvme, tail": 1.0}  # shares of the state
HOMES = ("resident", "host", "files")  # of parameters, among these
FILES_DEPTH = 12  # layers a rank, so that not everything fits beside the staging


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def depth_at(place: str) -> int:
    return FILES_DEPTH * world_size() if place == "files" else 3


def wrapped(
    build: Callable[..., nn.Module] = Net, place: str = "resident", **options: Any
) -> tuple[GeminiDDP, HybridAdam]:
    """A wrapped module in fp32, unless `options` say otherwise, and its optimizer."""
    module = build(depth_at(place))
    options = {"precision": "fp32", **SMALL, **(PLACEMENTS | BESIDE)[place](module), **options}
    on_disk = options.pop("fraction", ON_DISK.get(place, 0.0))
    model = GeminiDDP(module, **options)
    optimizer = HybridAdam(
        model.parameters(),
        nvme=NvmeConfig(block_numel=1024),
        nvme_offload_fraction=on_disk,
        **ADAM,
    )
    if place == "files":
        homes = {shard.param_home for shard in model.engine.planning.plan.shards}
        assert Tier.NVME in homes
    return model, optimizer


def plain(
    build: Callable[..., nn.Module] = Net, place: str = "resident"
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The same in plain torch."""
    module = build(depth_at(place))
    return module, torch.optim.AdamW(module.parameters(), foreach=False, **ADAM)


def updates(
    model: nn.Module, build: Callable[..., nn.Module] = Net, place: str = "resident"
) -> Tensor | None:
    """fp64 [n]: by how much training moved every weight; None on ranks without a state dict."""
    state = without_wrappers(model.state_dict())
    if not state:
        return None
    start = dict(build(depth_at(place)).named_parameters())
    moved = [(state[name].double() - value.double()).flatten() for name, value in start.items()]
    return torch.cat(moved).detach()


def difference(
    loop: Loop, build: Callable[..., nn.Module] = Net, place: str = "resident", **options: Any
) -> float:
    """||update - torch's|| / ||torch's|| after `loop`; 0 on ranks that have no state dict."""
    torch_model, torch_optimizer = plain(build, place)
    loop(torch_model, torch_optimizer)
    want = updates(torch_model, build, place)
    model, optimizer = wrapped(build, place, **options)
    loop(model, optimizer)
    got = updates(model, build, place)
    optimizer.close()
    if got is None or want is None:
        return 0.0
    return float((got - want).norm() / want.norm())
