"""Flat tensors on disk, in blocks that pass through a few staging buffers.

Parameter shards and gradients whose home is NVMe, and fp32 originals until an optimizer takes them.
Memory of the device is not page-aligned, as direct I/O wants it, hence the staging buffers.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from gemini.tickets import Ticket
from gemini.units import BLOCK_NUMEL, BlockId, ChunkId
from nvme import (
    BlockStore,
    BufferPool,
    NvmeError,
    Pin,
    StoreLayout,
    WriteBehind,
    WriteMeter,
    check_folder,
    default_folder,
    settle,
)
from optim.state.memory import copy_alone

from .blocks import FileBlocks, Flat, Places, Staged


@dataclass(frozen=True, slots=True)
class FileConfig:
    """Where files of one rank go, and how."""

    folder: str | None = None  # None: a temporary folder on a disk
    block_numel: int = BLOCK_NUMEL  # elements
    depth: int = 2  # blocks read ahead of their update
    label: str = ""
    meter: WriteMeter | None = None  # of the optimizer that these belong to
    pin: Pin | None = None  # registers staging with the device

    def checked_folder(self) -> Path:
        """Raises FolderError."""
        return check_folder(self.folder) if self.folder is not None else default_folder()


class ReadTicket:
    """A ticket: a tensor is being read. It is in place when `wait` returns."""

    def __init__(self, files: TensorFiles, num_blocks: int) -> None:
        self._files = files
        self.blocks_left = num_blocks
        self.error: NvmeError | None = None

    def ready(self) -> bool:
        self._files.pump()
        return self.blocks_left == 0

    def wait(self) -> None:
        while self.blocks_left:
            self._files.finish_read()
        if self.error is not None:
            raise self.error


class TensorFiles(FileBlocks):
    """Tensors by chunk, each written whole or by block. One thread at a time; see `beside`.

    versioned: a write counts at `commit` and reads see the last commit; else it counts at once,
        and is gone after `rollback`.
    """

    def __init__(
        self,
        tensors: Mapping[ChunkId, Flat],
        config: FileConfig,
        *,
        versioned: bool,
    ) -> None:
        places, nbytes = Places.of(tensors, config.block_numel)
        digest = hashlib.sha256(repr(places.tensors).encode()).hexdigest()[:16]
        plan = StoreLayout.plan(digest, nbytes, num_versions=2 if versioned else 1)
        store = BlockStore([config.checked_folder()], plan, label=config.label, meter=config.meter)
        self._pin = config.pin
        pool = BufferPool(config.depth + 2, max(nbytes), config.pin)
        super().__init__(places, store, pool, versioned=versioned)
        self._queue: deque[tuple[ReadTicket, BlockId, Tensor]] = deque()  # without a buffer yet
        self._reads: deque[tuple[ReadTicket, Staged, Tensor]] = deque()

    def serve(self, depth: int, meter: WriteMeter | None) -> None:
        """Blocks are read so far ahead from now on, and what is written, and was, counts there."""
        if meter is not None:
            meter.written_bytes += self.store.meter.written_bytes
            self.store.meter = meter
        if depth + 2 != self._pool.count:
            while self._reads or self._queue:
                self.finish_read()
            self._writes.drain()
            self._pool = BufferPool(depth + 2, self._pool.buffer_nbytes, self._pin)
            self._writes = WriteBehind(self._pool)

    def rest(self) -> None:
        """End writes, and give the memory of staging back until it is used again."""
        self._writes.drain()
        self._pool.empty()

    def __iter__(self) -> Iterator[ChunkId]:
        return iter(self._places.tensors)

    def __contains__(self, chunk: ChunkId) -> bool:
        return chunk in self._places.tensors

    def forget(self, chunks: Collection[ChunkId]) -> None:
        """These tensors live elsewhere from now on: give their space on disk back."""
        for chunk in chunks:
            self.store.forget(self._places.ids_of(chunk))
            del self._places.tensors[chunk], self._places.first[chunk]

    @property
    def file_bytes(self) -> int:
        return self.store.file_bytes

    # -- whole tensors --

    def read(self, chunk: ChunkId, into: Tensor) -> Ticket[None]:
        """Begin to fill `into`, which must be left alone until the ticket is done."""
        parts = into.detach().split(self._places.block_numel)
        fill = ReadTicket(self, len(parts))
        blocks = self._places.ids_of(chunk)
        self._queue.extend((fill, block, part) for block, part in zip(blocks, parts, strict=True))
        self.pump()
        return fill

    def write(self, chunk: ChunkId, values: Tensor) -> None:
        """Write a whole tensor; `values` is free on return. Raises WriteBudgetError first."""
        self.store.check_step(self._written_bytes(chunk), "a tensor that leaves memory")
        for i, part in enumerate(values.detach().split(self._places.block_numel)):
            staged = self.block_to_fill(chunk, i)
            copy_alone(staged.values, part)
            self.write_block(chunk, i, staged)

    def replace(self, chunk: ChunkId, values: Tensor) -> None:
        """Write a whole tensor, and let it count."""
        try:
            self.write(chunk, values)
            self.commit(self.store.committed_step)
        except BaseException:
            self.rollback()
            raise

    def close(self) -> None:
        """Wait for transfers and remove the file."""
        if self.store.is_ours:
            self._queue.clear()
            for _, staged, _ in self._reads:
                settle(staged.ticket)
            self._reads.clear()
        self.store.close()

    # -- transfers under way --

    def pump(self) -> None:
        """Take over reads that have ended and begin those that wait. Never waits."""
        while self._reads and self._reads[0][1].is_ready:
            self._finish_head()
        self._writes.reap()
        while self._queue and self._pool.num_free:
            self._begin_next()

    def finish_read(self) -> None:
        """Wait for the oldest read."""
        if not self._reads:
            if not self._pool.num_free:
                self._writes.end_oldest()
            self._begin_next()
        self._finish_head()
        self.pump()

    def _begin_next(self) -> None:
        fill, block, part = self._queue.popleft()
        buffer = self._pool.take()
        values = torch.frombuffer(buffer.view, dtype=part.dtype, count=part.numel())
        staged = Staged(buffer, values, None)
        try:
            staged.ticket = self._begin_read(block, buffer)
        except NvmeError as error:
            fill.error = fill.error or error
        self._reads.append((fill, staged, part))

    def _finish_head(self) -> None:
        fill, staged, part = self._reads.popleft()
        try:
            values = staged.wait()
            if fill.error is None:
                copy_alone(part, values)
        except NvmeError as error:
            fill.error = fill.error or error
        self._pool.give(staged.buffer)
        fill.blocks_left -= 1

    def _make_room(self) -> None:
        while not (self._pool.num_free or self._writes):
            self.finish_read()
