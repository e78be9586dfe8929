"""Gradients and parameters in files, for updates in another thread than the one that trains."""

from __future__ import annotations

from collections.abc import Container

import torch

from gemini.runtime.memory.files.blocks import FileBlocks, Staged
from gemini.runtime.memory.files.tensor_files import TensorFiles
from gemini.runtime.memory.gradient_homes import FileBlock, GradientBlock
from gemini.runtime.memory.shard_storage import ShardStorage
from gemini.units import BUFFERS_AHEAD, BlockId, ChunkId

Place = tuple[ChunkId, int]  # a chunk, and which block of it


class UpdateFiles:
    """Before a step or behind it, through staging buffers of its own; whoever trains has others.

    New parameters are written beside those of the last step: whether they count is the step's to
    say. So a block that was updated before its step, and is held, has nothing left to do.

    written: blocks of state whose new parameters are, or are on their way.
    params: None where none live in files; versions as of `optim.step.driver.Versions`.
    """

    def __init__(self, storage: ShardStorage) -> None:
        self.written: dict[BlockId, Place] = {}
        self._gradients = storage.gradient_files
        self._blocks: dict[TensorFiles, FileBlocks] = {}
        self.params = None if storage.params is None else self._of(storage.params)

    @property
    def staging_bytes(self) -> int:
        return sum(blocks.staging_bytes for blocks in self._blocks.values())

    def read_grad(self, place: Place, dtype: torch.dtype) -> GradientBlock:
        """Begin to read a block, of at most `BUFFERS_AHEAD` at once."""
        blocks = self._gradients_of(place, dtype)
        return FileBlock(blocks, blocks.read_block(*place))

    def can_read_grad(self, place: Place, dtype: torch.dtype) -> bool:
        """Whether there is a buffer for one more."""
        return self._gradients_of(place, dtype).has_buffer

    def write_param(self, block: BlockId, place: Place, staged: Staged) -> None:
        """Begin to write the parameters of a block of state."""
        assert self.params is not None
        self.params.write_block(*place, staged)
        self.written[block] = place

    def end(self) -> None:
        """Wait for what is on its way; of what went wrong the step is told."""
        for blocks in self._blocks.values():
            blocks.end_writes()

    def drop(self, but: Container[BlockId] = ()) -> None:
        """What was written does not count, with these exceptions; behind `end`."""
        for block, place in self.written.items():
            if block not in but:
                assert self.params is not None
                self.params.take_back(*place)
        self.written.clear()

    def _gradients_of(self, place: Place, dtype: torch.dtype) -> FileBlocks:
        assert self._gradients is not None
        return self._of(self._gradients.files_of(place[0], dtype))

    def _of(self, files: TensorFiles) -> FileBlocks:
        if files not in self._blocks:
            self._blocks[files] = files.with_own_staging(BUFFERS_AHEAD)
        return self._blocks[files]
