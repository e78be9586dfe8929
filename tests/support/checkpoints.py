"""Small wrapped models for tests of checkpoints, and what a step leaves of them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from bench.shared.models import Tower, token_batches, token_loss
from bench.shared.reference import flat
from bench.shared.simulated import SimBackend
from gemini import GeminiDDP, StaticPlacement
from optim import HybridAdam, NvmeConfig

ADAM = {"lr": 1e-2, "eps": 1e-3, "weight_decay": 0.01}
# share of the state on NVMe, and whether parameter shards are in the host memory of a device
PLACEMENTS = {
    "resident": (0.0, False),
    "host": (0.0, True),
    "nvme": (1.0, False),
    "mixed": (0.4, True),
}


def make(
    placement="resident",
    precision="bf16",
    chunk_size_m=0.004,
    seed=0,
    module=None,
    policy=None,
    folder=None,
    keep_versions=0,
    state="fp32",
    **options,
):
    """A wrapped Tower and its optimizer."""
    fraction, on_host = PLACEMENTS[placement]
    backend = SimBackend() if on_host else None
    if policy is None:
        policy = StaticPlacement(offload_param_frac=1.0) if on_host else "static"
    model = GeminiDDP(
        Tower(seed) if module is None else module,
        backend,
        policy,
        precision=precision,
        min_chunk_size_m=chunk_size_m,
        **options,
    )
    optimizer = HybridAdam(
        model.parameters(),
        nvme_offload_fraction=fraction,
        nvme_offload_dir=folder,
        nvme=NvmeConfig(block_numel=1024, keep_versions=keep_versions),
        state=state,
        **ADAM,
    )
    return model, optimizer


def batches(first: int, last: int, world_size: int = 1) -> list[list[torch.Tensor]]:
    """Of steps [first, last); the same batch for a step wherever training began."""
    return token_batches(last, world_size)[first:last]


def train(model: Any, optimizer: Any, steps: list[list[torch.Tensor]]) -> None:
    rank = dist.get_rank() if dist.is_initialized() else 0
    for parts in steps:
        token_loss(model, parts[rank]).backward()
        optimizer.step()
        optimizer.zero_grad()


def bits(model: GeminiDDP, optimizer: HybridAdam) -> dict[str, Any]:
    """What must be bit-equal after a rewind: this rank's runs, counters, groups."""
    runs: dict[str, torch.Tensor] = {}
    optimizer.visit_state(
        lambda run: runs.update({f"{run.name}/{run.plane}/{run.start}": run.values.clone()})
    )
    with model.summon_full_params(writeback=False):
        runs |= {name: p.detach().clone() for name, p in model.module.named_parameters()}
    return {
        "runs": runs,
        "steps": optimizer.targets[0].step_counts,
        "counters": optimizer.targets[0].counters.state_dict(),
        "groups": [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups],
    }


def everything(model: GeminiDDP, optimizer: HybridAdam) -> dict[str, Any]:
    """What must be bit-equal after a resume: also random numbers."""
    drawn = torch.rand(3), numpy.random.rand(3).tolist(), random.random()
    return {**bits(model, optimizer), "random": drawn}


def whole(model: GeminiDDP, optimizer: HybridAdam) -> dict[str, torch.Tensor]:
    """Masters and moments by name, on rank 0; empty elsewhere. Collective."""
    state = optimizer.state_dict()["state"]
    found = {f"model.{name}": value for name, value in model.state_dict().items()}
    for name, planes in state.items():
        found |= {f"{name}.{plane}": value.clone() for plane, value in planes.items()
                  if plane != "master"}  # fmt: skip
    return found if not dist.is_initialized() or dist.get_rank() == 0 else {}


def torch_state(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What torch's own functions save of both."""
    weights, state = get_state_dict(module, optimizer)
    return {"model": weights, "optim": state}


def load_with_dcp(path: Any, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    state = torch_state(module, optimizer)
    dcp.load(state, checkpoint_id=path)
    set_state_dict(
        module, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"]
    )


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def assert_same(got: Any, want: Any, where: str = "") -> None:
    """Equal, bit for bit."""
    assert type(got) is type(want), where
    if isinstance(want, dict):
        assert got.keys() == want.keys(), (where, got.keys() ^ want.keys())
        for key in want:
            assert_same(got[key], want[key], f"{where}.{key}")
    elif isinstance(want, (list, tuple)):
        assert len(got) == len(want), where
        for i, (one, other) in enumerate(zip(got, want, strict=True)):
            assert_same(one, other, f"{where}[{i}]")
    elif isinstance(want, torch.Tensor):
        assert torch.equal(got, want), where
    else:
        assert got == want, (where, got, want)


def masters_of(model, optimizer):
    """This rank's fp32 weights, from state."""
    found = []

    def look(block, planes):
        master = planes.get("master")
        found.extend(
            (part.param, part.param_offset, master[part.offset : part.offset + part.numel].clone())
            for part in block.segments
            if master is not None
        )

    optimizer.targets[0].tiered_state.visit(look)
    return flat([values for *_, values in sorted(found, key=lambda entry: entry[:2])])


def weights(model):
    return flat([p for p in model.parameters() if p.requires_grad])
