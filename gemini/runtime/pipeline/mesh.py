"""What a device mesh with a dimension "pp" says: who shards, splits and copies a part with whom.

The other dimensions are a mesh of their own at each place of "pp", with the roles that they have
without stages; a rank's number in it is its place there. Of (shard=2, pp=2, tp=2), ranks 0, 1, 4
and 5 are the mesh (shard=2, tp=2) of the first stage, and each of them has a half of the shards of
its part. Votes are of all ranks of the mesh (`gemini.runtime.pipeline.seats`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from gemini.mesh.roles import REPLICATE, TENSOR_PARALLEL
from gemini.runtime.comm.connect import check_mesh

PIPELINE = "pp"
DATA_PARALLEL = (*REPLICATE, "dp", "shard", "fsdp", "dp_shard")


def is_pipeline(process_group: dist.ProcessGroup | None, mesh: object) -> bool:
    """Whether stages of a pipeline are at other places of the mesh. Raises ValueError for both."""
    check_mesh(process_group, mesh)
    return PIPELINE in (getattr(mesh, "mesh_dim_names", None) or ())


def check_stages(mesh: Any, split: Sequence[str]) -> None:
    """Raise ValueError for dimensions that are not carried out beside "pp", for parameters that are
    split over another one than "tp", and for a mesh that misses ranks."""
    names = tuple(mesh.mesh_dim_names or ())
    if not {*names, *split} <= {PIPELINE, TENSOR_PARALLEL, *DATA_PARALLEL}:
        raise ValueError(
            f"mesh has the dimensions {names}, and parameters are split over {tuple(split)}; "
            f"expected 'pp', and beside it '{TENSOR_PARALLEL}', which alone splits parameters, "
            f"and {', '.join(DATA_PARALLEL)}"
        )
    missing = sorted(set(range(dist.get_world_size())) - set(mesh.mesh.flatten().tolist()))
    if missing:
        raise ValueError(
            f"mesh misses the ranks {missing}; expected all of the {dist.get_world_size()}, "
            "which vote on every step"
        )


def stage_of(mesh: Any) -> tuple[dist.ProcessGroup | None, Any]:
    """(group, None) of this rank alone, or (None, mesh) of the ranks that have the same part as
    this one. Collective among them."""
    others = tuple(name for name in mesh.mesh_dim_names if name != PIPELINE)
    if others:
        return None, mesh[others]
    return dist.new_group([dist.get_rank()], use_local_synchronization=True), None
