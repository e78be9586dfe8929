"""UNet of diffusers that learns to remove noise, in a loop of one's own over a sharded model.

    python examples/diffusion.py --images images.npy --out runs/unet
    torchrun --nproc_per_node 2 examples/diffusion.py --images images.npy --out runs/unet

Images are one array [count, channels, height, width] from -1 to 1; without one, discs are drawn.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from diffusers import DDPMScheduler, UNet2DModel
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from gemini import AutoPlacement, GeminiDDP, HybridAdam


def discs(count: int, size: int) -> Tensor:
    """Images [count, 3, size, size] of one disc each."""
    made = torch.Generator().manual_seed(0)
    x, y, radius = torch.rand(3, count, 1, 1, generator=made)
    grid = torch.linspace(0, 1, size)
    inside = (grid[None, :] - x) ** 2 + (grid[:, None] - y) ** 2 < (radius / 3) ** 2
    one: Tensor = inside[:, None].float() * 2 - 1
    return one.repeat(1, 3, 1, 1)


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--images", type=Path, help="NPY")
    parser.add_argument("--out", required=True)
    parser.add_argument("--channels", type=int, default=128, help="of the first block")
    parser.add_argument("--size", type=int, default=32, help="of images that are drawn")
    parser.add_argument("--batch", type=int, default=16, help="images of a rank")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--fp32", action="store_true", help="compute in fp32, not in bf16")
    parser.add_argument("--device-budget", help="as in 22GiB; what does not fit goes elsewhere")
    parser.add_argument("--nvme-dir", help="a folder on a fast disk")
    parser.add_argument("--plain", action="store_true", help="torch alone, to compare with")
    return parser.parse_args(given)


def main(argv: Sequence[str] | None = None) -> list[float]:
    """Train, save the UNet, and return the losses."""
    given = arguments(argv)
    cuda = torch.cuda.is_available()
    if "WORLD_SIZE" in os.environ and not dist.is_initialized():
        dist.init_process_group("nccl" if cuda else "gloo")
    rank = dist.get_rank() if dist.is_initialized() else 0
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if cuda else "cpu"
    images = torch.from_numpy(np.load(given.images)) if given.images else discs(256, given.size)
    torch.manual_seed(0)
    wide = given.channels
    unet: Any = UNet2DModel(
        sample_size=images.shape[-1], in_channels=images.shape[1], out_channels=images.shape[1],
        layers_per_block=1, block_out_channels=(wide, 2 * wide), norm_num_groups=8,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )  # fmt: skip
    model: torch.nn.Module = unet.to(device)
    optimizer: torch.optim.Optimizer
    if given.plain:
        model = DistributedDataParallel(model) if dist.is_initialized() else model
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01)
    else:
        placement = AutoPlacement(device_budget=given.device_budget, nvme_dir=given.nvme_dir)
        precision = "fp32" if given.fp32 else "bf16"
        model = GeminiDDP(unet, placement_policy=placement, precision=precision)
        optimizer = HybridAdam(model.parameters(), lr=1e-4, weight_decay=0.01)
    scheduler: Any = DDPMScheduler(num_train_timesteps=1000)
    draw = torch.Generator().manual_seed(1 + rank)
    losses = []
    for step in range(given.steps):
        clean = images[torch.randint(len(images), (given.batch,), generator=draw)]
        noise = torch.randn(clean.shape, generator=draw)
        times = torch.randint(1000, (given.batch,), generator=draw)
        noisy = scheduler.add_noise(clean, noise, times).to(device)
        found = model(noisy, times.to(device)).sample
        loss = F.mse_loss(found.float(), noise.to(device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if rank == 0 and step % 10 == 0:
            print(f"step {step}: loss {losses[-1]:.4f}")
    if isinstance(model, GeminiDDP):
        model.unwrap()  # a plain UNet again, on all ranks
    if rank == 0:
        unet.save_pretrained(given.out)
    return losses


if __name__ == "__main__":
    main()
