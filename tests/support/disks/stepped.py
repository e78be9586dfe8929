"""Plain parameters of 25 blocks, steps over them with state on disk, and what they leave."""

from __future__ import annotations

import torch
from torch import nn

from optim import HybridAdam, NvmeConfig

BLOCK = 1 << 14
SHAPES = [(3,), (1023,), (401, 977), (7, 11, 13)]  # 25 blocks


def make_params(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]


def make_optimizer(params, folder, fraction=1.0, budget=None, **nvme_options):
    config = NvmeConfig(block_numel=BLOCK, **nvme_options)
    return HybridAdam(
        params,
        lr=1e-2,
        weight_decay=0.01,
        nvme_offload_fraction=fraction,
        nvme_offload_dir=folder,
        nvme_write_budget=budget,
        nvme=config,
    )


def one_step(params, optimizer, step):
    generator = torch.Generator().manual_seed(100 + step)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
    optimizer.step()


def train(params, optimizer, steps, first=0):
    for step in range(first, first + steps):
        one_step(params, optimizer, step)
    return copies(params)


def copies(params):
    return [p.detach().clone() for p in params]


def same(got, want):
    return all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def in_memory(steps, dtype=torch.float32):
    params = make_params(dtype)
    return train(params, make_optimizer(params, None, 0.0), steps)
