"""Gradients in one order at any number of ranks, and what cannot have one.

[Note: the order of micro-batches] With `canonical=True` micro-batch j of rank r has the number
j * W + r, as a loader has it that deals batches to ranks in turn. A gradient is the sum over these
numbers, from the lowest: a fixed tree, whatever W is. Each backward sends every rank the parts of
its shard that all ranks have found (as many bytes as a reduce-scatter), and the rank adds them, one
by one, to the fp32 sum that it has. So there is no partial sum to keep, any number of backwards
makes a step, and nothing has to know which one is the last.

A backward is reduced as a whole: also under `no_sync`, and nothing that arrived for one micro-batch
is added before the rest of it. The mean over ranks is a product with 1 / W, which is exact where W
is a power of two.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

import torch
from torch import Tensor

from gemini.chunk.gradient import Allocator, ChunkGradient, UnderWay
from gemini.chunk.layout import ChunkSpec
from gemini.comm.links import Links
from gemini.optim.rules.rule import UpdateRule


class CanonicalGradient(ChunkGradient):
    """Gradient of one chunk that is summed in the order of micro-batches; fp32 from the first.

    buffer: of one micro-batch, not divided by M. `shard` is the sum so far, divided by M.
    """

    def __init__(self, spec: ChunkSpec, memory: Allocator, links: Links) -> None:
        self._share = 1 / links.num_means
        undivided = copy(links)
        undivided.num_means = 1
        super().__init__(spec, memory, undivided)
        self.apart = True

    def begin_reduce(self) -> None:
        if self._under_way is not None:
            self.end_reduce()
        alone = self._links.world_size == 1
        if self._buffer is None:
            if alone:
                return
            self._set_buffer(self._memory.allocate(self._payload_numel, self._dtype))
        own = self._take_buffer()
        self._left_over = False
        if alone:
            self._add([own])
            return
        received = self._memory.allocate(self._payload_numel, own.dtype)
        ticket = self._links.shards.exchange(received, own, self._spec.id)
        nbytes = received.nbytes + own.nbytes
        self._under_way = UnderWay(ticket, received, own, own.dtype, nbytes)
        self.account.gradients += nbytes

    def end_reduce(self) -> None:
        if self._under_way is None:
            return
        done, self._under_way = self._under_way, None
        self.account.gradients -= done.nbytes
        done.ticket.wait()
        self._add(done.shard.split(self._spec.shard_numel))

    def _add(self, parts: Sequence[Tensor]) -> None:
        """Add [S] of micro-batches that follow each other."""
        if self.exists:
            total = self._taken_back()
        else:
            self.changes += 1
            total = self._first(parts)
        for part in parts if self.exists else parts[1:]:
            total.add_(part, alpha=self._share)
        self._set_shard(total)
        if self.offload is not None:
            self._leave()

    def _first(self, parts: Sequence[Tensor]) -> Tensor:
        """The first part, fp32. A negative zero becomes a positive one, as beside any other part:
        who has no gradient adds zeros at one number of ranks, and nothing at another."""
        first = parts[0]
        if self._links.world_size == 1 and first.dtype == torch.float32:
            return first.add_(0.0)
        total = self._memory.allocate(first.numel(), torch.float32)
        return total.copy_(first).mul_(self._share).add_(0.0)


def check_rule(rule: UpdateRule) -> None:
    """Raise ValueError for a rule that measures parameters, in the order of their cuts."""
    if rule.measures:
        raise ValueError(
            f"canonical=True with {type(rule).__name__}, which measures parameters in the order of "
            "their cuts; expected an elementwise rule such as Adam's, or Muon's"
        )
