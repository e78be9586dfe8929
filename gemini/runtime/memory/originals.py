"""Originals: fp32 values of chunks whose dtype rounds their parameters.

Masters start from the originals of trained chunks, which are then dropped. Frozen chunks have
originals, which stay, if `keep_originals=True` asks for them: `unwrap()`, `state_dict()` and
checkpoints give them back, and masters start from them after unfreezing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gemini.chunk.layout import ChunkSpec
from gemini.placement.plan import Plan
from gemini.placement.tiers import Tier
from gemini.units import BLOCK_NUMEL, ORIGINAL_BLOCK_NUMEL, ChunkId

if TYPE_CHECKING:
    from gemini.nvme import BlockStore

    from .backend import FileConfig
    from .files.tensor_files import TensorFiles


def original_homes(specs: Sequence[ChunkSpec], plan: Plan) -> dict[ChunkId, Tier]:
    """Home of each chunk's original; of a trained chunk the lowest tier that has its state."""
    found: dict[ChunkId, Tier] = {}
    for shard in plan.shards:
        used = (t for t in (Tier.NVME, Tier.HOST) if t in shard.state_homes)
        lowest = next(used, Tier.DEVICE)
        found[shard.chunk] = lowest if specs[shard.chunk].trainable else plan.original_home
    return found


class Originals:
    """Originals [S] fp32 by chunk, each in its home: memory of the device, of the host, or a file.

    Until `release_staging` is called files have staging, and the last original read is in memory.

    lost: frozen chunks whose values were rounded and that have none.
    """

    def __init__(
        self,
        specs: Sequence[ChunkSpec],
        homes: dict[ChunkId, Tier],
        device: torch.device,
        config: FileConfig,
    ) -> None:
        self._specs = specs  # as they were when the module was wrapped
        self._homes = homes
        self._device = device
        self.block_numel = max(config.block_numel, ORIGINAL_BLOCK_NUMEL)  # few: each has objects
        # one transfer at a time is fast enough, and pinned staging could not be given back
        self._config = replace(config, pins=False, depth=0, block_numel=self.block_numel)
        self._memory: dict[ChunkId, Tensor] = {}
        self._files: list[TensorFiles] = []
        self._in_file: set[ChunkId] = set()
        self._last: tuple[ChunkId, Tensor] | None = None  # read from a file; asked for by block
        self.memory_bytes: Counter[Tier] = Counter()
        self.lost: set[ChunkId] = set()
        self.was_warned = False  # a warning has named them

    def __contains__(self, chunk: ChunkId) -> bool:
        return chunk in self._memory or chunk in self._in_file

    def get(self, chunk: ChunkId) -> Tensor | None:
        """Original [S] fp32, or None. From a file it is a copy: `put` takes changes back."""
        if chunk not in self._in_file:
            return self._memory.get(chunk)
        if self._last is None or self._last[0] != chunk:
            self._last = None  # give its memory back first
            values = torch.empty(self._specs[chunk].shard_numel, dtype=torch.float32)
            self._file_of(chunk).read(chunk, values).wait()
            self._last = (chunk, values)
        return self._last[1]

    def put(self, chunk: ChunkId, values: Tensor) -> None:
        """Keep `values` [S] fp32 from now on.

        Masters that come back in host memory stay there: the device may have no room for them as
        well as for their state.
        """
        home = self._homes[chunk]
        if home is Tier.NVME:
            self._last = None
            self._file_of(chunk).write(chunk, values)
            self._in_file.add(chunk)
            return
        if values is self._memory.get(chunk):
            return
        self._leave_memory(chunk)
        if values.device != self._device:
            home = self._homes[chunk] = Tier.HOST
        self._memory[chunk] = values.to("cpu", copy=True) if home is Tier.HOST else values
        self.memory_bytes[home] += values.nbytes

    def goes_to_file(self, chunk: ChunkId) -> bool:
        """Whether `put` would write this chunk's original to a file."""
        return self._homes[chunk] is Tier.NVME

    def put_block(self, chunk: ChunkId, index: int, values: Tensor) -> None:
        """Write one block of [S] of a chunk that goes to a file; the others are to follow."""
        self._last = None
        self._file_of(chunk).write_part(chunk, index, values)
        self._in_file.add(chunk)

    def drop(self, chunk: ChunkId) -> None:
        self._leave_memory(chunk)
        self.release_staging()
        if chunk in self._in_file:
            self._in_file.discard(chunk)
            self._give_space_back()

    def keep(self, chunks: Collection[ChunkId]) -> None:
        """Drop the originals of all chunks but these."""
        for chunk in sorted(self.chunks - frozenset(chunks)):
            self.drop(chunk)

    def complete(self) -> None:
        """Give back the unused room of files: all originals that will come have come."""
        self.release_staging()
        self._give_space_back()

    def release_staging(self) -> None:
        """Release staging and the original that was read last: none is read for a while."""
        self._last = None
        for file in self._files:
            file.release_staging()

    @property
    def chunks(self) -> frozenset[ChunkId]:
        return frozenset(self._memory) | self._in_file

    @property
    def stores(self) -> list[BlockStore]:
        return [file.store for file in self._files]

    @property
    def file_bytes(self) -> int:
        return sum(store.file_bytes for store in self.stores)

    @property
    def written_bytes(self) -> int:
        """Bytes written to files that still exist."""
        return sum(store.traffic.written_bytes for store in self.stores)

    def movable(self) -> list[Tensor]:
        self.release_staging()
        return list(self._memory.values())

    def clear(self) -> None:
        """Give memory and files back."""
        self._memory.clear()
        self.memory_bytes.clear()
        self._in_file.clear()
        self._last = None
        for file in self._files:
            file.close()
        self._files.clear()

    def _leave_memory(self, chunk: ChunkId) -> None:
        values = self._memory.pop(chunk, None)
        if values is not None:
            self.memory_bytes[self._homes[chunk]] -= values.nbytes

    def _file_of(self, chunk: ChunkId) -> TensorFiles:
        """File with room for this chunk; frozen chunks, whose values stay, share one."""
        from .files.blocks import Flat
        from .files.tensor_files import TensorFiles

        found = next((file for file in self._files if chunk in file), None)
        if found is None:
            trainable = self._specs[chunk].trainable
            taken = {other for file in self._files for other in file}
            wanted = [
                other
                for other, home in self._homes.items()
                if home is Tier.NVME
                and other not in taken
                and self._specs[other].trainable == trainable
            ]
            label = f"{self._config.label}{'' if trainable else 'frozen-'}originals-"
            found = TensorFiles(
                {c: Flat(self._specs[c].shard_numel, torch.float32) for c in wanted},
                replace(self._config, label=label),
                versioned=False,
            )
            self._files.append(found)
        return found

    def _give_space_back(self) -> None:
        """Forget what is in no file; all of them rest."""
        for file in list(self._files):
            unused = [chunk for chunk in file if chunk not in self._in_file]
            if len(unused) == len(list(file)):
                file.close()
                self._files.remove(file)
            elif unused:
                file.forget(unused)


def has_same_values(narrow: Tensor, wide: Tensor) -> bool:
    """Whether `wide` was rounded without a loss; in parts, as a comparison takes memory."""
    if narrow.dtype == wide.dtype:
        return True
    parts = zip(narrow.split(BLOCK_NUMEL), wide.split(BLOCK_NUMEL), strict=True)
    return all(torch.equal(part.to(other), other) for part, other in parts)
