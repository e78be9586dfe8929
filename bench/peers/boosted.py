"""HybridParallelPlugin: layers split inside of a pipeline's stages, or sequences that ranks share.

Options of the row: `mesh`, with "pp" and "tp" or with "cp"; `mode`, of sequence parallelism.
"""

from __future__ import annotations

from typing import Any

from bench.rows.job import LEARNING_RATE, WEIGHT_DECAY, Job, Trainer
from bench.rows.meshes import of_last_stage


def load() -> None:
    from gemini.integrations import Booster, HybridParallelPlugin  # noqa: F401


def settings(job: Job) -> dict[str, Any]:
    mesh = job.options["mesh"]
    plugin = {
        "tp_size": mesh.get("tp", 1), "pp_size": mesh.get("pp", 1), "zero_stage": 1,
        "precision": "bf16", "max_norm": job.max_norm,
    }  # fmt: skip
    if "pp" in mesh:
        plugin["num_microbatches"] = job.batch
    if "cp" in mesh:
        plugin |= {
            "sp_size": mesh["cp"], "enable_sequence_parallelism": True,
            "sequence_parallelism_mode": job.options["mode"],
        }  # fmt: skip
    adam = {"lr": LEARNING_RATE, "weight_decay": WEIGHT_DECAY}
    return {"HybridParallelPlugin": plugin, "AdamW": adam}


def wrap(model: Any, job: Job, given: dict[str, Any]) -> Trainer:
    import torch

    from bench.rows.ranks import join_group
    from gemini.integrations import Booster, HybridParallelPlugin

    join_group(job)
    plugin = HybridParallelPlugin(**given["HybridParallelPlugin"])
    booster = Booster(plugin=plugin)
    optimizer: Any = torch.optim.AdamW(model.parameters(), **given["AdamW"])
    boosted, optimizer, *_ = booster.boost(model, optimizer)
    mesh = plugin.sizes.mesh(torch.device(job.device))

    def forward(ids: Any) -> Any:
        batch = {"input_ids": ids, "labels": ids}
        if plugin.pp_size == 1:
            return boosted(**batch).loss  # type: ignore[misc]
        found = booster.execute_pipeline(
            iter([batch]), boosted, lambda outputs, _: outputs.loss, optimizer
        )
        return of_last_stage(found["loss"], mesh)

    def backward(loss: Any) -> None:
        if plugin.pp_size == 1:
            booster.backward(loss, optimizer)

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return Trainer(forward, backward, step)
