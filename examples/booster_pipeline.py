"""Two stages of a pipeline: torchrun --nproc_per_node 2 examples/booster_pipeline.py"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from gemini.integrations import Booster, HybridParallelPlugin
from gemini.integrations.launch import DistCoordinator, launch_from_torch

EPOCHS, FEATURES = 6, 20


def train(coordinator: DistCoordinator) -> None:
    inputs = torch.randn(256, FEATURES)
    dataset = TensorDataset(inputs, inputs.square().sum(1, keepdim=True) / FEATURES)
    layers = [nn.Linear(FEATURES, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1)]
    module = nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)

    plugin = HybridParallelPlugin(tp_size=1, pp_size=2, microbatch_size=8, precision="bf16")
    loader = plugin.prepare_dataloader(dataset, batch_size=32, shuffle=True, drop_last=True)
    booster = Booster(plugin=plugin)
    model, optimizer, _, loader, _ = booster.boost(module, optimizer, dataloader=loader)

    def criterion(outputs: Tensor, batch: list[Tensor]) -> Tensor:
        return nn.functional.mse_loss(outputs.float(), batch[1])

    for epoch in range(EPOCHS):
        loader.sampler.set_epoch(epoch)
        batches, losses = iter(loader), []
        for _ in range(len(loader)):
            found = booster.execute_pipeline(batches, model, criterion, optimizer)
            optimizer.clip_grad_by_norm(1.0)
            optimizer.step()
            optimizer.zero_grad()
            if found["loss"] is not None:  # on the last stage
                losses.append(float(found["loss"]))
        if losses and coordinator.is_last_process():
            print(f"epoch {epoch}: loss {sum(losses) / len(losses):.4f}")


def main() -> None:
    launch_from_torch()
    coordinator = DistCoordinator()
    train(coordinator)
    coordinator.destroy()  # when the model is gone


if __name__ == "__main__":
    main()
