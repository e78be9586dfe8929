"""Collectives over one process group, as tickets. The only file that calls torch.distributed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gemini.tickets import Done, Ticket

# torch 2.13 renames both; keep one shim
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True, slots=True)
class WorkTicket:
    """A collective under way. Keeps its tensors alive."""

    work: Any
    tensors: tuple[Tensor, ...]

    def ready(self) -> bool:
        return bool(self.work.is_completed())

    def wait(self) -> None:
        self.work.wait()


class Communicator:
    """One process group; at world size 1 every collective is nothing.

    All ranks must call the same collectives in the same order.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        if not dist.is_available() or not dist.is_initialized():
            self._group = None
            self.rank, self.world_size = 0, 1
            return
        self._group = group if group is not None else dist.group.WORLD
        self.rank = dist.get_rank(self._group)
        self.world_size = dist.get_world_size(self._group)
        if self.rank < 0:
            raise ValueError("this process is not a member of the process group that was given")

    def all_gather(self, payload: Tensor, shard: Tensor) -> Ticket[None]:
        """payload [S * W] from every rank's shard [S]."""
        work = _all_gather(payload, shard, group=self._group, async_op=True)
        return WorkTicket(work, (payload, shard))

    def reduce_scatter(self, shard: Tensor, payload: Tensor) -> Ticket[None]:
        """shard [S]: the sum over ranks of their payload's [S] that belongs to this rank."""
        work = _reduce_scatter(shard, payload, group=self._group, async_op=True)
        return WorkTicket(work, (payload, shard))

    def all_reduce(self, tensor: Tensor) -> Ticket[None]:
        """Sum over ranks, in place."""
        if self.world_size == 1:
            return Done(None)
        return WorkTicket(dist.all_reduce(tensor, group=self._group, async_op=True), (tensor,))

    def broadcast(self, tensor: Tensor) -> None:
        """Rank 0's values on every rank."""
        if self.world_size > 1:
            dist.broadcast(tensor, group=self._group, group_src=0)

    def gather_objects(self, value: Any) -> list[Any]:
        """Every rank's value. For set-up, not for a step."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self._group)
        return values

    @property
    def device(self) -> torch.device:
        """Where small control tensors must be for this group's backend."""
        if self._group is None:
            return torch.device("cpu")
        if dist.get_backend(self._group) == "nccl":
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cpu")
