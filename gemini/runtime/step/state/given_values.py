"""Rank 0's whole values on their way to the ranks that have parts of them."""

from __future__ import annotations

import torch
from torch import Tensor

from gemini.chunk.local import own_part
from gemini.runtime.comm.links import Links


def given_part(links: Links, param: Tensor, whole: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Part that this rank has of rank 0's value of a parameter, or of a plane of its state.

    whole: on rank 0. Collective over the first ranks of all places of what is split.
    """
    for comm in (links.copies, links.split):
        if comm is None:
            continue
        there = torch.empty(param.shape, dtype=dtype, device=comm.device)
        if whole is not None:
            there.copy_(whole)
        comm.broadcast(there)
        whole = there
    assert whole is not None
    return own_part(param, whole)
