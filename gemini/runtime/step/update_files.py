"""Files of gradients and parameters, as updates in a tail use them."""

from __future__ import annotations

import torch

from gemini.runtime.memory.files.blocks import FileBlocks
from gemini.runtime.memory.files.tensor_files import TensorFiles
from gemini.runtime.memory.gradient_homes import FileBlock, GradientBlock
from gemini.runtime.memory.shard_storage import ShardStorage
from gemini.units import BUFFERS_AHEAD, ChunkId

Place = tuple[ChunkId, int]  # a chunk, and which block of it


class UpdateFiles:
    """Blocks of files, through staging buffers of its own: the thread that trains has others.

    New parameters are a new version in their file, which the step commits or drops.
    params: None where no parameter lives in files; versions as of `optim.step.driver.Versions`.
    """

    def __init__(self, storage: ShardStorage) -> None:
        self._gradients, self._pin = storage.gradient_files, storage.config.pin
        self._blocks: dict[TensorFiles, FileBlocks] = {}
        self.params = None if storage.params is None else self._of(storage.params)

    @property
    def staging_bytes(self) -> int:
        return sum(blocks.staging_bytes for blocks in self._blocks.values())

    def read_grad(self, place: Place, dtype: torch.dtype) -> GradientBlock:
        """Begin to read a gradient block, at most `BUFFERS_AHEAD` at once."""
        blocks = self._gradients_of(place, dtype)
        return FileBlock(blocks, blocks.read_block(*place))

    def can_read_grad(self, place: Place, dtype: torch.dtype) -> bool:
        """Whether a buffer is free for one more read."""
        return self._gradients_of(place, dtype).has_buffer

    def _gradients_of(self, place: Place, dtype: torch.dtype) -> FileBlocks:
        assert self._gradients is not None
        return self._of(self._gradients.files_of(place[0], dtype))

    def _of(self, files: TensorFiles) -> FileBlocks:
        if files not in self._blocks:
            self._blocks[files] = files.with_own_staging(BUFFERS_AHEAD, self._pin)
        return self._blocks[files]
