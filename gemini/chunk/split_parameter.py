"""What a DTensor parameter becomes when its module is wrapped; see `parameter`."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor

from .parameter import ChunkParameter, GatheredParameter, Leaving, learn


class ChunkDTensor(Leaving, DTensor):
    """A parameter that torch has split, whose local tensor is a view of a chunk."""

    __torch_function__ = ChunkParameter.__torch_function__


class GatheredDTensor(ChunkDTensor):
    """One of an engine that releases nothing; see `GatheredParameter`."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    data = GatheredParameter.data  # type: ignore[assignment]
    grad = GatheredParameter.grad  # type: ignore[assignment]


class ChunkDTensorView(Leaving, DTensor):
    """A view of a ChunkDTensor that is a DTensor: what reads it fetches the chunk again."""

    __torch_function__ = ChunkParameter.__torch_function__


learn(DTensor, ChunkDTensor, GatheredDTensor, ChunkDTensorView)
