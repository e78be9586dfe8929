"""The process group of a row's ranks."""

from __future__ import annotations

import os
from pathlib import Path

from bench.rows.job import Job


def join_group(job: Job) -> None:
    """gloo, or NCCL with a device for each rank; a file in the row's folder is the store."""
    import torch
    import torch.distributed as dist

    os.environ.update(
        RANK=str(job.rank), LOCAL_RANK=str(job.rank),
        WORLD_SIZE=str(job.world_size), LOCAL_WORLD_SIZE=str(job.world_size),
    )  # fmt: skip
    cuda = torch.device(job.device).type == "cuda"
    device = None
    if cuda:  # else all of them take device 0
        device = torch.device("cuda", job.rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if cuda else "gloo",
        init_method=f"file://{Path(job.folder) / 'store'}",
        rank=job.rank,
        world_size=job.world_size,
        device_id=device,
    )
