"""What a device mesh with a dimension "pp" says: who shards a part with whom."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from gemini.runtime.comm.connect import check_mesh
from gemini.runtime.wrap.precision import PrecisionSettings

PIPELINE = "pp"
DATA_PARALLEL = ("dp", "shard", "fsdp", "dp_shard")


def is_pipeline(process_group: dist.ProcessGroup | None, mesh: object) -> bool:
    """Whether stages of a pipeline are at other places of the mesh. Raises ValueError for both."""
    check_mesh(process_group, mesh)
    return PIPELINE in (getattr(mesh, "mesh_dim_names", None) or ())


def data_parallel_group(mesh: Any) -> dist.ProcessGroup:
    """The ranks that shard the same part as this one. Collective among them.

    Raises ValueError for dimensions that are not carried out, and for a mesh that misses ranks.
    """
    names = tuple(mesh.mesh_dim_names or ())
    others = [name for name in names if name != "pp"]
    if "pp" not in names or len(others) > 1 or not set(others) <= set(DATA_PARALLEL):
        raise ValueError(
            f"mesh has the dimensions {names}; expected 'pp', and beside it at most one of "
            f"{', '.join(DATA_PARALLEL)}"
        )
    missing = sorted(set(range(dist.get_world_size())) - set(mesh.mesh.flatten().tolist()))
    if missing:
        raise ValueError(
            f"mesh misses the ranks {missing}; expected all of the {dist.get_world_size()}, "
            "which vote on every step"
        )
    if others:
        group: dist.ProcessGroup = mesh.get_group(others[0])
    else:
        group = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    return group


def pipeline_ranks(mesh: Any) -> list[int]:
    """The ranks of one pipeline, in the order of "pp"."""
    return dist.get_process_group_ranks(mesh.get_group("pp"))


def check_stage_options(precision_settings: PrecisionSettings, split: Sequence[str]) -> None:
    """Raise ValueError for what a part of a pipeline cannot have."""
    if split:
        raise ValueError(
            f'a parameter is split over mesh dimension {split[0]} on a mesh with "pp"; expected '
            "parameters that are whole: a stage is sharded, and not split otherwise"
        )
    if precision_settings.dtype == "float16":
        raise ValueError(
            'precision="fp16" on a mesh with "pp": the loss scale is that of the last stage, and '
            'does not travel to the others; expected "bf16" or "fp32"'
        )
