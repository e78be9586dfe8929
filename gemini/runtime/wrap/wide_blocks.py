"""fp32 values of a chunk written to a file block by block: no rank ever has them whole."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import torch
from torch import Tensor

from gemini.chunk.storage import Chunk
from gemini.runtime.memory.originals import Originals


class WideBlocks:
    """Blocks of a chunk that one rank has alone, each written when all of its values have come.

    A block that rounding did not change equals its part of the payload: for a frozen chunk it is
    written only if another block was changed.
    """

    def __init__(self, chunk: Chunk, originals: Originals) -> None:
        self._chunk, self._originals = chunk, originals
        self._numel = originals.block_numel
        self._missing = Counter[int]()  # elements of parameters, by block
        for slot in chunk.spec.slots:
            for index, start, end in self._pieces(slot.offset, slot.numel):
                self._missing[index] += end - start
        self._begun: dict[int, Tensor] = {}  # blocks with a part of their values
        self._written: set[int] = set()

    def put(self, offset: int, values: Tensor) -> None:
        """Take one parameter's flat values; the payload has them already."""
        for index, start, end in self._pieces(offset, values.numel()):
            part = values[start - offset : end - offset]
            self._missing[index] -= end - start
            block = self._begun.pop(index, None)
            if block is None and part.numel() < self._payload(index).numel():
                block = torch.zeros(self._payload(index).numel())
            if block is not None:
                first = index * self._numel
                block[start - first : end - first] = part
                part = block
            if not self._missing[index]:
                self._write(index, part.to(torch.float32))
            elif block is not None:
                self._begun[index] = block

    def finish(self) -> None:
        """Write the blocks that are left, where they are needed: all values have come."""
        spec = self._chunk.spec
        if self._written or spec.trainable:
            for index in range(-(-spec.payload_numel // self._numel)):
                if index not in self._written:
                    self._originals.put_block(spec.id, index, self._payload(index).float())

    def _write(self, index: int, values: Tensor) -> None:
        if not torch.equal(self._payload(index).to(values), values):
            self._originals.put_block(self._chunk.spec.id, index, values)
            self._written.add(index)

    def _payload(self, index: int) -> Tensor:
        return self._chunk.payload[index * self._numel : (index + 1) * self._numel]

    def _pieces(self, offset: int, numel: int) -> Iterator[tuple[int, int, int]]:
        """Yield (block, start, end) of the parts of a run, each in one block."""
        start = offset
        while start < offset + numel:
            index = start // self._numel
            end = min((index + 1) * self._numel, offset + numel)
            yield index, start, end
            start = end
