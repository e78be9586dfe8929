"""Wrapped models whose parameters, gradients and state are on NVMe."""

from __future__ import annotations

import torch

from bench.shared.models import Tower
from gemini import AutoPlacement, GeminiDDP
from gemini.chunk.layout import specs_of
from gemini.memtracer.trace import sequential_trace
from gemini.placement.tiers import Tier
from optim import HybridAdam, NvmeConfig

SMALL = {"min_chunk_size_m": 0.004}  # 4194 elements: several chunks
BLOCKS = NvmeConfig(block_numel=1024)
LEAST = AutoPlacement("130KiB")  # of 408 KiB that the model data of bf16 takes
D, H, N = Tier.DEVICE, Tier.HOST, Tier.NVME


def wrapped(placement="cuda", *, device=None, optimizer=HybridAdam, lr=1e-2, **options):
    module = Tower()
    trace = sequential_trace(specs_of(module, "bfloat16"))
    model = GeminiDDP(module, device, placement, trace=trace, **SMALL, **options)
    return model, optimizer(model.parameters(), lr=lr, nvme=BLOCKS)


def assert_same(one, other):
    """fp32 weights and all state, bit for bit."""
    others = other[0].state_dict()
    for name, value in one[0].state_dict().items():
        assert torch.equal(value, others[name]), name
    others = other[1].state_dict()["state"]
    for name, planes in one[1].state_dict()["state"].items():
        for plane, value in planes.items():
            assert torch.equal(value, others[name][plane]), (name, plane)


def homes(model):
    """Homes of parameters, of gradients and of state that the plan uses."""
    shards = model.engine.planning.plan.shards
    return (
        {shard.param_home for shard in shards},
        {shard.grad_home for shard in shards},
        {home for shard in shards for home in shard.state_homes},
    )
