"""What an update before its step sees of an engine's shards: final gradients, and no weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gemini.chunk.storage import Chunk
from gemini.runtime.memory.shard_storage import ShardStorage
from gemini.runtime.step.views import Held, ShardViews
from nvme import Buffer
from optim.rules.state_layout import WEIGHT
from optim.state.memory import Memory, copy_alone
from optim.state.pieces import Planes
from optim.state.space import Block


class EarlyShardViews(ShardViews):
    """One step's view before it is agreed on; see `optim.step.speculation.EarlyViews`.

    New weights are written beside the block's state, where its master is split; else to a buffer
    that the next block writes over. What is held is read again, from that weight or from its
    master. So no payload and no shard changes before the step.
    """

    def __init__(
        self,
        chunks: Sequence[Chunk],
        hyper: Sequence[Any],
        steps: Sequence[int],
        storage: ShardStorage,
        memory: Memory,
        *,
        merges: bool,
    ) -> None:
        """As `ShardViews`."""
        super().__init__(chunks, hyper, steps, storage, memory, staging=None, merges=merges)
        self._buffer: Buffer | None = None
        nothing = torch.empty(0)
        self._held = [Held(nothing, None) for _ in chunks]

    def lend(self, buffer: Buffer | None) -> None:
        """New weights go there, and nowhere else."""
        self._buffer = buffer

    def see(self, shard: int, grad: Tensor) -> bool:
        """This gradient [S] is final, and kept; False for a shard that has one already."""
        if self._held[shard].grad is not None:
            return False
        self._held[shard].shard, self._held[shard].grad = self._chunks[shard].shard_memory, grad
        return True

    def _param_of(self, block: Block, planes: Planes) -> Tensor:
        if WEIGHT in planes:
            copy_alone(planes[WEIGHT], self._part_of(self._held[block.shard].shard, block))
            return planes[WEIGHT]
        assert self._buffer is not None
        dtype = self._chunks[block.shard].dtype
        return torch.frombuffer(self._buffer.view, dtype=dtype, count=block.numel)
