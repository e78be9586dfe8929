"""Links of one sharding group: the ranks with the shards of a chunk, and those with replicas.

W shards of a chunk · R replicas · [S] one shard

Gradients are summed over both: reduced and scattered inside a replica, then [S] is summed over
replicas.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gemini.tickets import Ticket

from .communicator import Communicator


@dataclass(frozen=True, slots=True)
class AcrossReplicas:
    """Reduction inside a replica, and then over replicas.

    The second needs the result of the first, so `wait()` begins it: all ranks must wait in one
    order.
    """

    inside: Ticket[None]
    replicas: Communicator
    shard: Tensor

    def ready(self) -> bool:
        return False

    def wait(self) -> None:
        self.inside.wait()
        self.replicas.all_reduce(self.shard).wait()


@dataclass(frozen=True, slots=True)
class Tie:
    """A parameter of which several stages of a pipeline have a copy.

    names: all its names in the whole model. copies: this rank and the ranks with the same part of
    the other copies; None if this process has all copies. is_first: this copy is counted and saved,
    for all of them.
    """

    names: tuple[str, ...]
    copies: Communicator | None
    is_first: bool


class Links:
    """Collectives of the chunks of one sharding group.

    rank, world_size: of the shards of one replica.
    num_means: ranks over which gradients are averaged: those of all shards and replicas, and for
        experts also those whose tokens they were given.
    is_alone: no other rank has a part of these chunks.
    counts: this rank's shards are counted in sums over all ranks, and saved; true on one of the
        ranks that have the same shards.
    sums: object that reduces and scatters: the communicator of shards if there is one replica.
    tie: of a parameter that other stages have too, whose gradients are added up before a step.
    """

    def __init__(
        self,
        shards: Communicator,
        replicas: Communicator | None = None,
        copies: Communicator | None = None,
        split: Communicator | None = None,
        num_means: int | None = None,
        tie: Tie | None = None,
    ) -> None:
        """Connect the ranks of one sharding group.

        copies: ranks that have the same shards and compute the same gradients by themselves: those
            at other places of a dimension that splits other parameters.
        split: ranks with other parts of these parameters.
        num_means: None for the number of all shards and replicas.
        """
        self.shards = shards
        self.replicas = replicas if replicas is not None and replicas.world_size > 1 else None
        self.copies = copies if copies is not None and copies.world_size > 1 else None
        self.split = split if split is not None and split.world_size > 1 else None
        self.rank, self.world_size = shards.rank, shards.world_size
        self.num_replicas = 1 if self.replicas is None else self.replicas.world_size
        self.num_means = num_means or self.world_size * self.num_replicas
        self.is_alone = self.world_size * self.num_replicas == 1
        # experts: other ranks send their tokens here, so these gradients are of their data too
        self.is_sent_data = self.num_means > self.world_size * self.num_replicas
        self.sums: Communicator | Links = shards if self.replicas is None else self
        self._is_first = self.replicas is None or self.replicas.rank == 0
        self.tie = tie
        self.counts = self._is_first and (self.copies is None or self.copies.rank == 0)
        self.counts &= tie is None or tie.is_first
        self._stream: torch.cuda.Stream | None = None

    # -- chunks --

    def reduce_scatter(self, shard: Tensor, payload: Tensor, label: int) -> Ticket[None]:
        """Sum this rank's [S] of every rank's `payload` [S * W] into `shard` [S].

        With one shard in a replica, `shard` is `payload`.
        """
        assert self.replicas is not None
        if self.world_size == 1:
            assert shard is payload
            return self.replicas.all_reduce_chunk(payload, label)
        inside = self.shards.reduce_scatter(shard, payload, label)
        if not shard.is_cuda:
            return AcrossReplicas(inside, self.replicas, shard)
        if self._stream is None:
            self._stream = torch.cuda.Stream()
        with torch.cuda.stream(self._stream):  # the device orders the two, and computes on
            inside.wait()
            return self.replicas.all_reduce(shard)

    # -- whole values --

    @property
    def is_given_nothing(self) -> bool:
        """Whether a module starts from this rank's own values: no other rank has them."""
        return self.is_alone and self.copies is None

    @property
    def is_first(self) -> bool:
        """Whether this is the first rank of the first replica."""
        return self._is_first and self.rank == 0

    def broadcast(self, tensor: Tensor) -> None:
        """Give every rank of these parameters the values of the first."""
        # Innermost last: each broadcast is from a rank that the one before has reached.
        for comm in (self.copies, self.replicas, self.shards):
            if comm is not None:
                comm.broadcast(tensor)

    def gather(self, shard: Tensor) -> Tensor | None:
        """Gather [S * W] on the first rank of the first replica; None on the others."""
        return self.shards.gather(shard) if self._is_first else None

    def gather_for_all(self, shard: Tensor, label: int) -> Tensor:
        """Gather [S * W] on every rank; at world size 1 it is `shard` itself."""
        if self.world_size == 1:
            return shard
        payload = torch.empty(
            shard.numel() * self.world_size, dtype=shard.dtype, device=shard.device
        )
        self.shards.all_gather(payload, shard, label).wait()
        return payload

    def scatter(self, payload: Tensor | None, shard: Tensor) -> None:
        """Scatter [S * W] of the first rank of the first replica to the shards of all replicas."""
        if self._is_first:
            self.shards.scatter(payload, shard)
        if self.replicas is not None:
            here = shard.to(self.replicas.device)
            self.replicas.broadcast(here)
            shard.copy_(here)
