"""Places of flat tensors in a store, block by block."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from gemini.units import BlockId, ChunkId


@dataclass(frozen=True, slots=True)
class Flat:
    """A tensor [numel] to be."""

    numel: int
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Places:
    """Numbers of the blocks of tensors in a store, which has a place for each of them."""

    tensors: dict[ChunkId, Flat]  # that are there
    first: dict[ChunkId, int]  # block of each that has a place
    block_numel: int  # elements

    def id_of(self, chunk: ChunkId, index: int) -> BlockId:
        return BlockId(self.first[chunk] + index)

    def ids_of(self, chunk: ChunkId) -> list[BlockId]:
        """Numbers of all blocks of a tensor."""
        num_blocks = -(-self.tensors[chunk].numel // self.block_numel)
        return [self.id_of(chunk, index) for index in range(num_blocks)]

    def numel_of(self, chunk: ChunkId, index: int) -> int:
        return min(self.block_numel, self.tensors[chunk].numel - index * self.block_numel)

    @staticmethod
    def of(tensors: Mapping[ChunkId, Flat], block_numel: int) -> tuple[Places, list[int]]:
        """Places of tensors, one after the other, and the bytes of every block."""
        places, nbytes = Places(dict(tensors), {}, block_numel), list[int]()
        for chunk, flat in tensors.items():
            places.first[chunk] = len(nbytes)
            for index in range(len(places.ids_of(chunk))):
                nbytes.append(places.numel_of(chunk, index) * flat.dtype.itemsize)
        return places, nbytes
