"""What an update before its step sees of an engine's shards: final gradients, and no weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gemini.chunk.storage import Chunk
from gemini.nvme import Buffer
from gemini.optim.rules.state_layout import WEIGHT
from gemini.optim.state.memory import Memory, copy_alone
from gemini.optim.state.pieces import Planes
from gemini.optim.state.space import Block
from gemini.runtime.memory.shard_storage import ShardStorage
from gemini.runtime.step.update_files import UpdateFiles
from gemini.runtime.step.views import KeptGradient, ShardViews


class EarlyShardViews(ShardViews):
    """One step's view before it is agreed on; see `optim.step.speculation.EarlyViews`.

    New weights of a shard in memory are written beside the block's state, where its master is
    split; else to a buffer that the next block writes over. What is held is read again, from that
    weight or from its master. Those of a shard in a file are written beside its last version. So no
    payload and no shard changes before the step.
    """

    files: UpdateFiles

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
        files = UpdateFiles(storage)
        super().__init__(
            chunks, hyper, steps, storage, memory, staging=None, merges=merges, files=files
        )
        self._buffer: Buffer | None = None
        self._kept_grads = [KeptGradient(None, None) for _ in chunks]

    def lend(self, buffer: Buffer | None) -> None:
        """New weights of shards in memory go there, and nowhere else."""
        self._buffer = buffer

    def writes_parameters(self, block: Block) -> bool:
        """Whether its update leaves them where the step does, beside their last version."""
        return self._chunks[block.shard].files is not None

    def see(self, shard: int) -> bool:
        """The gradient of this one is final, and kept; False where it has been seen."""
        if self.has_seen(shard):
            return False
        self._kept_grads[shard] = self._kept(self._chunks[shard])
        return True

    def has_seen(self, shard: int) -> bool:
        """Whether blocks may be updated with its gradient."""
        return (
            self._kept_grads[shard].grad is not None
            or self._kept_grads[shard].offloaded is not None
        )

    def read_ahead(self, block: Block) -> None:
        """It is one of the next `BUFFERS_AHEAD` to be updated."""
        if self._offloaded(block.shard) is not None:
            self._ahead[block.id] = self._begin_grad(block)

    def _param_of(self, block: Block, planes: Planes) -> Tensor:
        if self._chunks[block.shard].files is not None:
            return super()._param_of(block, planes)
        if WEIGHT in planes:
            copy_alone(planes[WEIGHT], self._part_of(self._memory_of(block.shard), block))
            return planes[WEIGHT]
        assert self._buffer is not None
        dtype = self._chunks[block.shard].dtype
        return torch.frombuffer(self._buffer.view, dtype=dtype, count=block.numel)
