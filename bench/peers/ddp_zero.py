"""torch's DDP with ZeroRedundancyOptimizer: ZeRO-1 as torch has it, under bf16 autocast.

Weights, gradients and buckets are fp32; every rank keeps the moments of a part of the parameters.
Gradients are views of DDP's buckets, so they are there once.
"""

from __future__ import annotations

from typing import Any

from bench.rows.job import LEARNING_RATE, WEIGHT_DECAY, Job, Trainer


def load() -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # noqa: F401
    from torch.nn.parallel import DistributedDataParallel  # noqa: F401


def settings(job: Job) -> dict[str, Any]:
    return {
        "autocast": "bfloat16",
        "DistributedDataParallel": {"gradient_as_bucket_view": True},
        "ZeroRedundancyOptimizer": {
            "optimizer_class": "AdamW",
            "parameters_as_bucket_view": False,
            "lr": LEARNING_RATE,
            "weight_decay": WEIGHT_DECAY,
            "fused": True,
        },
        "clip_grad_norm_": job.max_norm,
    }


def wrap(model: Any, job: Job, given: dict[str, Any]) -> Trainer:
    import torch
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    from bench.rows.ranks import join_group

    join_group(job)
    model.to(job.device)
    wrapped = DistributedDataParallel(model, **given["DistributedDataParallel"])
    options = dict(given["ZeroRedundancyOptimizer"])
    kind = getattr(torch.optim, options.pop("optimizer_class"))
    optimizer = ZeroRedundancyOptimizer(wrapped.parameters(), optimizer_class=kind, **options)
    device, dtype = torch.device(job.device).type, getattr(torch, given["autocast"])

    def step() -> None:
        torch.nn.utils.clip_grad_norm_(wrapped.parameters(), given["clip_grad_norm_"])
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)  # they are views of the buckets

    def forward(ids: Any) -> Any:
        with torch.autocast(device, dtype):
            return wrapped(input_ids=ids, labels=ids).loss

    return Trainer(forward, lambda loss: loss.backward(), step)
