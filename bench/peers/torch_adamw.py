"""Plain torch: AdamW in pure bf16 (parameters, gradients and state), or fp32 under autocast."""

from __future__ import annotations

from typing import Any

from bench.rows.job import LEARNING_RATE, WEIGHT_DECAY, Job, Trainer


def load() -> None:
    import torch  # noqa: F401


def settings(job: Job) -> dict[str, Any]:
    adam = {"lr": LEARNING_RATE, "weight_decay": WEIGHT_DECAY, "fused": True}
    how = "autocast" if job.options["autocast"] else "to"
    return {how: "bfloat16", "AdamW": adam, "clip_grad_norm_": job.max_norm}


def wrap(model: Any, job: Job, given: dict[str, Any]) -> Trainer:
    from contextlib import nullcontext

    import torch

    model.to(job.device)
    if "to" in given:
        model.to(getattr(torch, given["to"]))
    optimizer = torch.optim.AdamW(model.parameters(), **given["AdamW"])
    device = torch.device(job.device).type

    def forward(ids: Any) -> Any:
        dtype = given.get("autocast")
        with torch.autocast(device, getattr(torch, dtype)) if dtype else nullcontext():
            return model(input_ids=ids, labels=ids).loss

    def step() -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), given["clip_grad_norm_"])
        optimizer.step()
        optimizer.zero_grad()

    return Trainer(forward, lambda loss: loss.backward(), step)
