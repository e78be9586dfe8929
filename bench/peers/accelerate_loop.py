"""accelerate's loop: over plain torch under its bf16 autocast, or with `GeminiAccelerator`."""

from __future__ import annotations

from typing import Any

from bench.rows.job import LEARNING_RATE, WEIGHT_DECAY, Job, Trainer


def load() -> None:
    from accelerate import Accelerator  # noqa: F401

    from gemini.integrations.accelerate import GeminiAccelerator  # noqa: F401


def settings(job: Job) -> dict[str, Any]:
    name = "GeminiAccelerator" if job.options["ours"] else "Accelerator"
    adam = {"lr": LEARNING_RATE, "weight_decay": WEIGHT_DECAY}
    return {name: {"mixed_precision": "bf16"}, "AdamW": adam, "clip_grad_norm_": job.max_norm}


def wrap(model: Any, job: Job, given: dict[str, Any]) -> Trainer:
    import torch
    from accelerate import Accelerator

    from gemini.integrations.accelerate import GeminiAccelerator

    kind = GeminiAccelerator if "GeminiAccelerator" in given else Accelerator
    accelerator = kind(cpu=job.device == "cpu", **given[kind.__name__])
    optimizer = torch.optim.AdamW(model.parameters(), **given["AdamW"])
    model, optimizer = accelerator.prepare(model, optimizer)

    def step() -> None:
        accelerator.clip_grad_norm_(model.parameters(), given["clip_grad_norm_"])
        optimizer.step()
        optimizer.zero_grad()

    def forward(ids: Any) -> Any:
        return model(input_ids=ids, labels=ids).loss

    return Trainer(forward, accelerator.backward, step)
