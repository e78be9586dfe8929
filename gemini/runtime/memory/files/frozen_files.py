"""Shards of frozen chunks on disk: one version, one file a chunk, for all processes that have it.

What never changes needs no second version, no commit and no step. Files are named by what they
hold, so runs of one base on one host, whatever their plans, have it once (`nvme.shared`).
"""

from __future__ import annotations

import ctypes
import hashlib
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gemini.chunk.stack import RowCut
from gemini.nvme import (
    Buffer,
    BufferPool,
    SharedBlocks,
    ThreadEngine,
    WriteMeter,
    check_process,
    remove_stepless,
    settle,
)
from gemini.optim.rules.report import Traffic
from gemini.optim.state.deferred_signals import DeferredSignals
from gemini.ranges import named
from gemini.tickets import Ticket
from gemini.units import FROZEN_BLOCK_BYTES, BlockId, ChunkId

from .blocks import Flat
from .tensor_files import ReadTicket, TensorFill

if TYPE_CHECKING:
    from gemini.runtime.memory.backend import FileConfig


@dataclass(frozen=True, slots=True)
class _StraightRead:
    """A ticket: blocks are being read to where they belong, which is left alone when `wait` has
    ended, also where that was interrupted."""

    blocks: Sequence[Ticket[None]]
    into: Tensor  # whose memory stays until then

    def ready(self) -> bool:
        return all(block.ready() for block in self.blocks)

    def wait(self) -> None:
        try:
            for block in self.blocks:
                block.wait()
        finally:
            for block in self.blocks:
                settle(block)


class FrozenFiles:
    """Shards [S] by chunk. One thread at a time. A chunk has no file before its first `replace`.

    Where the device is the host, bytes go straight to where they belong; else a thread reads one
    shard after the other through staging buffers.

    straight: whether it is. names: what each chunk holds, for people.
    rows: cuts of those whose rows are read alone.
    """

    def __init__(
        self,
        tensors: Mapping[ChunkId, Flat],
        config: FileConfig,
        names: Mapping[ChunkId, str],
        rows: Mapping[ChunkId, RowCut],
        *,
        straight: bool,
    ) -> None:
        self._tensors = dict(tensors)
        self._names, self._rows = names, rows
        self._folder = config.checked_folder()
        remove_stepless([self._folder])
        self._memory, self._pin = config.memory, config.pin
        self._meter = config.meter or WriteMeter()
        self._pool: BufferPool | None = None
        if not straight:
            self._pool = BufferPool(config.depth + 2, self._buffer_nbytes, self._pin)
        self._engine = ThreadEngine()
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="frozen")  # starts when it is used
        self._reads: list[Future[None]] = []
        self._files: dict[ChunkId, SharedBlocks] = {}
        # of files, which other processes may have too; asked for at every gather
        self.file_bytes = 0
        self._traffic = Traffic()
        self._pid = os.getpid()

    def __iter__(self) -> Iterator[ChunkId]:
        return iter(self._tensors)

    def __contains__(self, chunk: ChunkId) -> bool:
        return chunk in self._tensors

    @property
    def _buffer_nbytes(self) -> int:
        largest = max(flat.numel * flat.dtype.itemsize for flat in self._tensors.values())
        return min(largest, FROZEN_BLOCK_BYTES)

    @property
    def staging_bytes(self) -> int:
        return 0 if self._pool is None else self._pool.nbytes

    @property
    def traffic(self) -> Traffic:
        """Bytes moved since this was made."""
        return self._traffic

    def configure(self, depth: int, meter: WriteMeter | None) -> None:
        """Blocks are read so far ahead from now on, and what is written, and was, counts there."""
        if meter is not None:
            meter.written_bytes += self._meter.written_bytes
            self._meter = meter
        if self._pool is not None and depth + 2 != self._pool.count:
            self._end_reads()
            self._pool = BufferPool(depth + 2, self._buffer_nbytes, self._pin)

    def read(
        self, chunk: ChunkId, into: Tensor, behind: Ticket[None] | None = None, first: int = 0
    ) -> Ticket[None]:
        """Begin to fill `into`, which must be left alone until the ticket is done.

        first: block of the tensor with which `into` begins. A `RowFill`, of a whole tensor, begins
        nothing before it is asked.
        """
        assert behind is None, f"chunk {chunk} is frozen, and no step changes it"
        read = partial(self._begin, chunk, into, first)
        if chunk in self._rows and into.numel() == self._tensors[chunk].numel:
            return self._rows[chunk].fill(into.numel(), read)
        return read(range(-(-into.numel() // self.block_numel(chunk))))

    def block_numel(self, chunk: ChunkId) -> int:
        """Elements of a block of a tensor."""
        if chunk in self._rows:
            return self._rows[chunk].block_numel
        return FROZEN_BLOCK_BYTES // self._tensors[chunk].dtype.itemsize

    def _begin(self, chunk: ChunkId, into: Tensor, first: int, ids: Sequence[int]) -> Ticket[None]:
        check_process(self._pid)
        blocks, parts = self._files[chunk], into.detach().split(self.block_numel(chunk))
        wanted = {BlockId(first + i): parts[i] for i in ids}
        self._traffic += Traffic(nvme_read=sum(part.nbytes for part in wanted.values()))
        if self._pool is None:
            begun = [blocks.read(block, _memory_of(part)) for block, part in wanted.items()]
            return _StraightRead(begun, into)
        fill = TensorFill(
            chunk, [*wanted], [*wanted.values()], None,
            torch.is_inference_mode_enabled(), self._memory.mover(),
        )  # fmt: skip
        self._reads = [read for read in self._reads if not read.done()]
        with DeferredSignals():  # a handler that raised in `submit` would leave its locks taken
            self._reads.append(self._reader.submit(fill.run, self._pool, partial(_read, blocks)))
        return ReadTicket(self._reads[-1], None)

    def replace(self, chunk: ChunkId, values: Tensor) -> None:
        """Keep [S] from now on: write it, where no file has it yet."""
        flat = self._tensors[chunk]
        nbytes = flat.numel * flat.dtype.itemsize
        self._meter.check(nbytes, "a tensor that leaves memory")
        self._end_reads()
        with named("write", "chunk", chunk), DeferredSignals():
            block_nbytes = self.block_numel(chunk) * flat.dtype.itemsize
            rows = f" in blocks of {block_nbytes}" if chunk in self._rows else ""
            digest = hashlib.sha256(f"{nbytes} bytes{rows}".encode())
            for view in self._views(chunk, values):
                digest.update(view)
            old = self._files.get(chunk)
            if old is not None and old.digest == digest.hexdigest():
                return
            self._files[chunk] = SharedBlocks(
                self._folder,
                digest.hexdigest(),
                [min(block_nbytes, nbytes - start) for start in range(0, nbytes, block_nbytes)],
                self._engine,
                partial(self._views, chunk, values),
                what=self._names[chunk],
            )  # fmt: skip
            self.file_bytes += self._files[chunk].file_bytes
            if old is not None:
                self.file_bytes -= old.file_bytes
                old.close()
        written = self._files[chunk].written_bytes
        self._meter.written_bytes += written
        self._traffic += Traffic(nvme_write=written)

    def take_in(self, tensors: Mapping[ChunkId, Flat]) -> None:
        """These shards come too; each is written by `replace`."""
        self._tensors.update(tensors)
        if self._pool is not None and self._pool.buffer_nbytes < self._buffer_nbytes:
            self._end_reads()
            self._pool = BufferPool(self._pool.count, self._buffer_nbytes, self._pin)

    def forget(self, chunks: Collection[ChunkId]) -> None:
        """These shards live elsewhere from now on."""
        self._end_reads()
        for chunk in chunks:
            del self._tensors[chunk]
            if chunk in self._files:  # else it was never written
                gone = self._files.pop(chunk)
                self.file_bytes -= gone.file_bytes
                gone.close()

    def close(self) -> None:
        """Wait for reads, and let all files go; nothing in a forked child."""
        if os.getpid() != self._pid:
            return
        self._end_reads()
        self._reader.shutdown()
        for blocks in self._files.values():
            blocks.close()
        self._files.clear()
        self.file_bytes = 0
        self._engine.close()

    # -- inside --

    def _views(self, chunk: ChunkId, values: Tensor) -> Iterator[memoryview]:
        """Memory with a shard's blocks, each until the next one is asked for."""
        parts = values.detach().split(self.block_numel(chunk))
        if self._pool is None:
            yield from map(_memory_of, parts)
            return
        buffer, move = self._pool.take(), self._memory.mover()
        try:
            for part in parts:
                move(torch.frombuffer(buffer.view, dtype=part.dtype, count=part.numel()), part)
                yield buffer.view[: part.nbytes]
        finally:
            self._pool.give(buffer)

    def _end_reads(self) -> None:
        """Wait for them, whatever becomes of them."""
        wait(self._reads)
        self._reads.clear()


def _read(blocks: SharedBlocks, block: BlockId, buffer: Buffer) -> Ticket[None]:
    return blocks.read(block, buffer.view)


def _memory_of(part: Tensor) -> memoryview:
    """Memory of a tensor on the host, without an array of NumPy, which would keep its storage from
    changing."""
    assert part.device.type == "cpu" and part.is_contiguous()
    return memoryview((ctypes.c_char * part.nbytes).from_address(part.data_ptr())).cast("B")
