"""View of an engine's shards for updates in backward: final gradients, and no weights."""

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
    """View of a step that is not agreed on yet; see `optim.step.speculation.EarlyViews`.

    No payload and no shard changes before the step. New weights of a shard in a file are a new
    version in it. Those of a shard in memory go to the block's undo plane where its master is
    split, else to a buffer that the next block overwrites; a step that holds the update reads them
    again, from there or from the master.
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
        """Arguments are those of `ShardViews`."""
        files = UpdateFiles(storage)
        super().__init__(
            chunks, hyper, steps, storage, memory, staging=None, merges=merges, files=files
        )
        self._buffer: Buffer | None = None
        self._kept_grads = [KeptGradient(None, None) for _ in chunks]

    def lend(self, buffer: Buffer | None) -> None:
        """Lend the buffer for new weights of shards in memory; None takes it back."""
        self._buffer = buffer

    def writes_parameters(self, block: Block) -> bool:
        """Whether the block's update writes parameters to their file, as a step does."""
        return self._chunks[block.shard].files is not None

    def see(self, shard: int) -> bool:
        """Keep the final gradient of this shard; False where it was kept before."""
        if self.has_seen(shard):
            return False
        self._kept_grads[shard] = self._kept(self._chunks[shard])
        return True

    def has_seen(self, shard: int) -> bool:
        """Whether blocks of this shard may be updated with its final gradient."""
        return (
            self._kept_grads[shard].grad is not None
            or self._kept_grads[shard].offloaded is not None
        )

    def read_ahead(self, block: Block) -> None:
        """Begin to read the block's gradient, if not on the device: its update is near."""
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
