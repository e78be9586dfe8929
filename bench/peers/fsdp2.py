"""FSDP2: `fully_shard` of every block and the root, bf16 compute over fp32 shards.

Options of the row: `keep`, parameters that stay gathered behind their forward (ZeRO-2); `mesh`.
"""

from __future__ import annotations

from typing import Any

from bench.rows.job import LEARNING_RATE, WEIGHT_DECAY, Job, Trainer
from bench.rows.meshes import make_mesh, mesh_settings


def load() -> None:
    from torch.distributed.fsdp import fully_shard  # noqa: F401


def settings(job: Job) -> dict[str, Any]:
    policies: dict[str, Any] = {"MixedPrecisionPolicy": {"param_dtype": "bfloat16"}}
    if job.options.get("offload"):
        policies["CPUOffloadPolicy"] = {"pin_memory": True}
    if job.options.get("keep"):
        policies["reshard_after_forward"] = False
    return {
        **mesh_settings(job),
        **policies,
        "fully_shard": "every block",  # the user says which modules
        "AdamW": {"lr": LEARNING_RATE, "weight_decay": WEIGHT_DECAY, "fused": True},
        "clip_grad_norm_": job.max_norm,
    }


def wrap(model: Any, job: Job, given: dict[str, Any]) -> Trainer:
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    from bench.rows.ranks import join_group

    join_group(job)
    dtypes = {key: getattr(torch, name) for key, name in given["MixedPrecisionPolicy"].items()}
    how: dict[str, Any] = {"mp_policy": MixedPrecisionPolicy(**dtypes)}
    if "CPUOffloadPolicy" in given:
        how["offload_policy"] = CPUOffloadPolicy(**given["CPUOffloadPolicy"])
    if "reshard_after_forward" in given:
        how["reshard_after_forward"] = given["reshard_after_forward"]
    mesh = make_mesh(model, job, given)
    if mesh is not None:
        how["mesh"] = mesh["dp"] if "dp" in given["init_device_mesh"] else mesh
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList)]
    for block in max(lists, key=len, default=()):  # the longest list of modules is the blocks
        fully_shard(block, **how)
    fully_shard(model, **how)
    assert dist.get_world_size() == job.world_size
    optimizer = torch.optim.AdamW(model.parameters(), **given["AdamW"])

    def step() -> None:
        clip(list(model.parameters()), given["clip_grad_norm_"])
        optimizer.step()
        optimizer.zero_grad()

    def forward(ids: Any) -> Any:
        return model(input_ids=ids, labels=ids).loss

    return Trainer(forward, lambda loss: loss.backward(), step)


def clip(params: list[Any], max_norm: float, pipeline: Any = None) -> None:
    """`clip_grad_norm_`, which takes parameters of one mesh only, over those of several.

    pipeline: a group whose ranks have other parameters.
    """
    import torch
    import torch.distributed as dist

    by_mesh: dict[Any, list[Any]] = {}
    for param in params:
        if param.grad is not None:
            by_mesh.setdefault(param.device_mesh, []).append(param)
    if len(by_mesh) == 1 and pipeline is None:
        torch.nn.utils.clip_grad_norm_(params, max_norm)
        return
    partial: list[Any] = [
        torch.nn.utils.get_total_norm([param.grad for param in some]) for some in by_mesh.values()
    ]
    norms = [norm.full_tensor() for norm in partial]
    total = torch.linalg.vector_norm(torch.stack(norms))
    if pipeline is not None:
        squared = total.square()
        dist.all_reduce(squared, group=pipeline)
        total = squared.sqrt()
    for some in by_mesh.values():
        torch.nn.utils.clip_grads_with_norm_(some, max_norm, total)
