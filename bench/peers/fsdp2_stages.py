"""torch's tensor parallelism inside of the stages of torch's pipelines, sharded by FSDP2.

Options of the row: `mesh`, with "pp", "dp" and "tp".
"""

from __future__ import annotations

from typing import Any

from bench.peers import fsdp2
from bench.rows.job import Job, Trainer
from bench.rows.meshes import make_mesh, of_last_stage


def load() -> None:
    from torch.distributed.pipelining import Schedule1F1B  # noqa: F401

    fsdp2.load()


def settings(job: Job) -> dict[str, Any]:
    return {
        **fsdp2.settings(job),
        "reshard_after_forward": False,
        "PipelineStage": "the layers of every stage",  # the user cuts the model
        "Schedule1F1B": {"n_microbatches": job.batch},
    }


def wrap(model: Any, job: Job, given: dict[str, Any]) -> Trainer:
    import torch
    from torch import nn
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    from bench.rows.ranks import join_group
    from gemini.parallel.cut import stages_of

    join_group(job)
    mesh = make_mesh(model, job, given)
    place, places, group = mesh.get_local_rank("pp"), mesh["pp"].size(), mesh.get_group("pp")
    part = stages_of(model, places)[place]
    how = {
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16),
        "mesh": mesh["dp"],
        "reshard_after_forward": given["reshard_after_forward"],
    }
    for block in part.get_submodule("model.layers").children():
        if any(True for _ in block.parameters()):
            fully_shard(block, **how)
    fully_shard(part, **how)
    optimizer = torch.optim.AdamW(part.parameters(), **given["AdamW"])
    stage = PipelineStage(part, place, places, torch.device(job.device), group=group)

    def loss_of(logits: Any, ids: Any) -> Any:
        return nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten()
        )

    schedule = Schedule1F1B(stage, loss_fn=loss_of, **given["Schedule1F1B"])

    def forward(ids: Any) -> Any:
        losses: list[Any] = []
        last = {"target": ids, "losses": losses} if stage.is_last else {}
        schedule.step(*([ids] if stage.is_first else []), **last)
        return of_last_stage(torch.stack(losses).mean() if losses else None, mesh)

    def step() -> None:
        fsdp2.clip(list(part.parameters()), given["clip_grad_norm_"], group)
        optimizer.step()
        optimizer.zero_grad()

    return Trainer(forward, lambda loss: None, step)
