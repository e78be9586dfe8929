"""A Booster loop, and a plugin by name.

torchrun --nproc_per_node 2 examples/booster.py --plugin zero
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from gemini.integrations import (
    Booster,
    GeminiPlugin,
    HybridParallelPlugin,
    LowLevelZeroPlugin,
    TorchDDPPlugin,
    TorchFSDPPlugin,
)
from gemini.integrations.launch import DistCoordinator, launch_from_torch

EPOCHS, FEATURES, BATCH = 6, 20, 16
PLUGINS: dict[str, Callable[[], Any]] = {
    "gemini": lambda: GeminiPlugin(precision="bf16", placement_policy="auto"),
    "zero": lambda: LowLevelZeroPlugin(stage=2, precision="bf16"),
    "ddp": TorchDDPPlugin,  # in bf16 by torch's autocast
    "fsdp": TorchFSDPPlugin,
    "hybrid": lambda: HybridParallelPlugin(tp_size=1, pp_size=1, zero_stage=1, precision="bf16"),
    "pipeline": lambda: HybridParallelPlugin(
        tp_size=1, pp_size=2, microbatch_size=BATCH // 2, precision="bf16"
    ),
}


def mse(outputs: Tensor, batch: list[Tensor]) -> Tensor:
    return nn.functional.mse_loss(outputs.float(), batch[1])


def train(name: str, coordinator: DistCoordinator) -> None:
    inputs = torch.randn(256, FEATURES)
    dataset = TensorDataset(inputs, inputs.square().sum(1, keepdim=True) / FEATURES)
    module = nn.Sequential(
        nn.Linear(FEATURES, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1)
    )
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)

    plugin = PLUGINS[name]()
    loader = plugin.prepare_dataloader(dataset, batch_size=BATCH, shuffle=True, drop_last=True)
    booster = Booster(mixed_precision="bf16" if name == "ddp" else None, plugin=plugin)
    model, optimizer, _, loader, schedule = booster.boost(module, optimizer, None, loader, schedule)
    in_stages = name == "pipeline"
    for epoch in range(EPOCHS):
        loader.sampler.set_epoch(epoch)
        batches, losses = iter(loader), []
        for _ in range(len(loader)):
            if in_stages:  # takes micro-batches of the next batch, forward and backward
                loss = booster.execute_pipeline(batches, model, mse, optimizer)["loss"]
            else:
                batch = next(batches)
                loss = mse(model(batch[0]), batch)
                booster.backward(loss, optimizer)
            optimizer.clip_grad_by_norm(1.0)
            optimizer.step()
            optimizer.zero_grad()
            if loss is not None:  # of a pipeline, the last stage has it
                losses.append(float(loss.detach()))
        schedule.step()
        if losses and (coordinator.is_last_process() if in_stages else coordinator.is_master()):
            print(f"epoch {epoch}: loss {sum(losses) / len(losses):.4f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--plugin", choices=PLUGINS, default="gemini")
    name = parser.parse_args().plugin
    launch_from_torch()
    coordinator = DistCoordinator()
    train(name, coordinator)
    coordinator.destroy()  # when the model is gone: torch's DDP still holds the group


if __name__ == "__main__":
    main()
