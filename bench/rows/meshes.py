"""Meshes of a row's ranks, and how torch splits a model over them: the same for us and for peers.

Option of the row: `mesh`, the sizes of its dimensions by name. One that is named `tp` splits layers
of models like Llama by `PLAN`.
"""

from __future__ import annotations

from math import prod
from typing import Any

from bench.rows.job import Job

_COLUMNS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj",
            "mlp.up_proj")  # fmt: skip
_ROWS = ("self_attn.o_proj", "mlp.down_proj")
PLAN = {f"model.layers.*.{name}": "ColwiseParallel" for name in _COLUMNS} | {
    f"model.layers.*.{name}": "RowwiseParallel" for name in _ROWS
}


def mesh_settings(job: Job) -> dict[str, Any]:
    """What a user writes for the mesh of this row; nothing where it has none."""
    mesh = job.options.get("mesh")
    if mesh is None:
        return {}
    assert prod(mesh.values()) == job.world_size
    return {"init_device_mesh": mesh, **({"parallelize_module": PLAN} if "tp" in mesh else {})}


def make_mesh(model: Any, job: Job, given: dict[str, Any]) -> Any:
    """The mesh of all ranks, over which the model was split where `given` has a plan; else None.

    Raises ValueError for a model without the plan's layers.
    """
    if "init_device_mesh" not in given:
        return None
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import parallel

    sizes = given["init_device_mesh"]
    kind = torch.device(job.device).type
    mesh = init_device_mesh(kind, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    if "parallelize_module" in given:
        found = dict(model.named_modules())
        if "model.layers.0.self_attn.q_proj" not in found:
            raise ValueError(
                f"{type(model).__name__} has no model.layers.0.self_attn.q_proj; the plan of tp "
                "is for models like Llama: --model llama-150m"
            )
        plan = {name: getattr(parallel, how)() for name, how in given["parallelize_module"].items()}
        parallel.parallelize_module(model, mesh["tp"], plan)
    return mesh


def of_last_stage(loss: Any, mesh: Any) -> Any:
    """On all places of a pipeline the loss that the last has; None on the others."""
    import torch
    import torch.distributed as dist

    group = mesh.get_group("pp")
    found = torch.zeros((), device=mesh.device_type) if loss is None else loss.detach().float()
    dist.broadcast(found, group=group, group_src=group.size() - 1)
    return found
