"""Torch's DDP in bf16 by autocast: torchrun --nproc_per_node 2 examples/booster_ddp.py"""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import TensorDataset

from gemini.integrations import Booster, TorchDDPPlugin
from gemini.integrations.launch import DistCoordinator, launch_from_torch

EPOCHS, FEATURES = 6, 20


def train(coordinator: DistCoordinator) -> None:
    inputs = torch.randn(256, FEATURES)
    dataset = TensorDataset(inputs, inputs.square().sum(1, keepdim=True) / FEATURES)
    module = nn.Sequential(nn.Linear(FEATURES, 64), nn.GELU(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)

    plugin = TorchDDPPlugin()
    loader = plugin.prepare_dataloader(dataset, batch_size=16, shuffle=True, drop_last=True)
    booster = Booster(mixed_precision="bf16", plugin=plugin)
    model, optimizer, criterion, loader, schedule = booster.boost(
        module, optimizer, nn.MSELoss(), loader, schedule
    )
    for epoch in range(EPOCHS):
        loader.sampler.set_epoch(epoch)
        total = 0.0
        for x, y in loader:
            loss = criterion(model(x).float(), y)
            booster.backward(loss, optimizer)
            optimizer.clip_grad_by_norm(1.0)
            optimizer.step()
            optimizer.zero_grad()
            total += loss.item()
        schedule.step()
        coordinator.print_on_master(f"epoch {epoch}: loss {total / len(loader):.4f}")


def main() -> None:
    launch_from_torch()
    coordinator = DistCoordinator()
    train(coordinator)
    coordinator.destroy()  # when the model is gone: torch's DDP still holds the group


if __name__ == "__main__":
    main()
