"""The weights of all stages of a pipeline, by name, in the memory of rank 0."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from gemini.checkpoint.dcp.ranks import Ranks

from .pipelined import Pipelined


def full_weights(model: Pipelined, ranks: Ranks) -> dict[str, Tensor]:
    """On the CPU, on rank 0; empty on the others. All ranks call."""
    own = {name: value for part in model for name, value in part.state_dict().items()}
    said = ranks.gather([(name, value.shape, value.dtype) for name, value in own.items()])
    found: dict[str, Tensor] = {}
    known: set[str] = set()
    group = ranks.group()
    for rank, tensors in enumerate(said):
        for name, shape, dtype in tensors:
            if name in known:
                continue  # of another rank with the same stage
            known.add(name)
            if rank == 0 and ranks.rank == 0:
                found[name] = own[name].cpu()
            elif ranks.rank == 0:
                found[name] = torch.empty(shape, dtype=dtype)
                dist.recv(found[name], group=group, group_src=rank)
            elif ranks.rank == rank:
                dist.send(own[name].cpu().contiguous(), group=group, group_dst=0)
    return found
