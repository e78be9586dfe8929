"""Rows of all ranks: which rank has one, and what ranks send each other of them.

Row `id` of the whole table is row `id // W` of rank `id % W`: frequent ids, which are often
neighbours, spread evenly. At world size 1 nothing is sent.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gemini.comm.communicator import Communicator

ENDED = -1  # in place of a number of ids: this rank's loader has no further batch


@dataclass(frozen=True, slots=True)
class Route:
    """Ids that this rank asked for, by owner, and what others asked of it."""

    order: Tensor  # [n]: places of the asked ids, those of rank 0 first
    sent: list[int]  # ids asked of each rank
    received: list[int]  # ids that each rank asked of this one
    rows: Tensor  # [sum of received]: rows of this rank's table


class RowExchange:
    """Exchange of ids, rows and gradients. Every method but `owned` is collective."""

    def __init__(self, comm: Communicator, num_rows: int) -> None:
        self.comm, self.num_rows = comm, num_rows

    @property
    def owned(self) -> int:
        """Rows of this rank."""
        rank, world_size = self.comm.rank, self.comm.world_size
        return len(range(rank, self.num_rows, world_size))

    def route(self, ids: Tensor | None) -> Route | None:
        """Ask owners for `ids` [n], each once, ascending. None, on every rank: all loaders ended.

        ids: None if this rank's loader has no further batch. Raises ValueError, on every rank, if
        some have and others have not.
        """
        world_size = self.comm.world_size
        if world_size == 1:
            if ids is None:
                return None
            return Route(torch.arange(len(ids)), [len(ids)], [len(ids)], ids)
        if ids is None:
            order, sent = torch.empty(0, dtype=torch.int64), [ENDED] * world_size
        else:
            order = torch.argsort(ids % world_size, stable=True)
            sent = torch.bincount(ids % world_size, minlength=world_size).tolist()
        received = self._all_to_all(torch.tensor(sent), [1] * world_size, [1] * world_size).tolist()
        ended = [rank for rank in range(world_size) if received[rank] == ENDED]
        if ended:
            if len(ended) == world_size:
                return None
            raise ValueError(
                f"the loaders of ranks {ended} have ended, and those of others have a further "
                "batch; expected as many batches on every rank (drop_last, or a sampler that pads)"
            )
        assert ids is not None
        rows = self._all_to_all(ids[order] // world_size, received, sent)
        return Route(order, sent, received, rows)

    def fetch(self, route: Route, weights: Tensor) -> Tensor:
        """Weights [n, dim] of the ids of a route, in their order; `weights` [rows, dim]: those that
        this rank was asked for."""
        found = self._blocks(weights, route.sent, route.received)
        result = torch.empty_like(found)
        result[route.order.to(found.device)] = found
        return result

    def give(self, route: Route, grads: Tensor) -> list[tuple[Tensor, Tensor]]:
        """(rows, gradients) of this rank's rows, by the rank that sent them; `grads` [n, dim]: of
        the ids of the route."""
        found = self._blocks(grads[route.order.to(grads.device)], route.received, route.sent)
        parts = zip(route.rows.split(route.received), found.split(route.received), strict=True)
        return list(parts)

    def total(self, values: Tensor) -> Tensor:
        """Sum over ranks of fp64 `values`, on the host."""
        if self.comm.world_size == 1:
            return values
        here = values.to(self.comm.device)
        self.comm.all_reduce(here).wait()
        return here.cpu()

    def _blocks(self, values: Tensor, numels: list[int], sent: list[int]) -> Tensor:
        dim = values.shape[1]
        flat = self._all_to_all(
            values.reshape(-1), [count * dim for count in numels], [count * dim for count in sent]
        )
        return flat.view(-1, dim)

    def _all_to_all(self, values: Tensor, numels: list[int], sent: list[int]) -> Tensor:
        if self.comm.world_size == 1:
            return values
        here = values.to(self.comm.device).contiguous()
        there = here.new_empty(sum(numels))
        self.comm.all_to_all(there, numels, here, sent)
        return there.to(values.device)
