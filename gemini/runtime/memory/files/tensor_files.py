"""Flat tensors on disk, in blocks that pass through a few staging buffers.

Parameter shards and gradients whose home is NVMe, and fp32 originals until an optimizer takes them.
Memory of the device is not page-aligned, as direct I/O wants it, hence the staging buffers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gemini.nvme import (
    BlockStore,
    Buffer,
    BufferPool,
    StoreLayout,
    WriteBehind,
    WriteMeter,
    read_ahead,
)
from gemini.optim.state.deferred_signals import DeferredSignals
from gemini.optim.state.memory import Mover
from gemini.ranges import named
from gemini.tickets import Ticket
from gemini.units import BlockId, ChunkId

from .blocks import Flat, Places

if TYPE_CHECKING:
    from gemini.runtime.memory.backend import FileConfig


@dataclass(frozen=True, slots=True)
class ReadTicket:
    """A ticket: a tensor is being read, by another thread. It is in place when `wait` returns, and
    left alone from then on, also where `wait` was interrupted."""

    future: Future[None]
    behind: Ticket[None] | None

    def ready(self) -> bool:
        return self.future.done()

    def wait(self) -> None:
        try:
            if self.behind is not None:  # it counts who waits for it
                self.behind.wait()
            self.future.result()
        finally:
            wait([self.future])


@dataclass(frozen=True, slots=True)
class TensorFill:
    """A tensor to be filled from a file, as if by the thread that asks: in its inference mode."""

    chunk: ChunkId
    blocks: Sequence[BlockId]
    parts: Sequence[Tensor]  # [n] each
    behind: Ticket[None] | None  # an update of these blocks
    in_inference: bool
    move: Mover  # into `parts`, behind what the device was given when this was asked for

    @staticmethod
    def of(
        chunk: ChunkId,
        places: Places,
        into: Tensor,
        behind: Ticket[None] | None,
        move: Mover,
        first: int,
    ) -> TensorFill:
        parts = into.detach().split(places.block_numel)
        blocks = places.ids_of(chunk)[first : first + len(parts)]
        return TensorFill(chunk, blocks, parts, behind, torch.is_inference_mode_enabled(), move)

    def run(self, pool: BufferPool, begin: Callable[[BlockId, Buffer], Ticket[None]]) -> None:
        """Fill the tensor with as many reads under way as there are buffers. Raises NvmeError when
        none is under way any more."""
        parts = iter(self.parts)
        if self.behind is not None:
            self.behind.wait()
        with named("read", "chunk", self.chunk), torch.inference_mode(self.in_inference):
            for _, buffer, _ in read_ahead(pool, self.blocks, begin):
                there = next(parts)
                dtype, count = there.dtype, there.numel()
                self.move(there, torch.frombuffer(buffer.view, dtype=dtype, count=count))


class TensorFiles:
    """Tensors by chunk, written whole or by block. One thread at a time; see `acquire_buffers`.

    Each tensor has a place in the file, and may come and leave (`take_in`, `forget`).

    A thread of its own reads whole tensors, one after the other, through the buffers that blocks
    pass through else: so what comes behind a read, and asks for a buffer, waits for all of them.

    versioned: a write counts at `commit` and reads see the last commit; else it counts at once,
        and is gone after `rollback`.
    reads_latest: whole reads see what was written and is to count.
    """

    reads_latest = False

    def __init__(
        self,
        tensors: Mapping[ChunkId, Flat],
        config: FileConfig,
        *,
        versioned: bool,
        there: Collection[ChunkId] | None = None,
    ) -> None:
        """tensors: those that have a place. there: those of them that are there; None: all."""
        places, nbytes = Places.of(tensors, config.block_numel)
        digest = hashlib.sha256(repr(places.tensors).encode()).hexdigest()[:16]
        plan = StoreLayout.plan(digest, nbytes, num_versions=2 if versioned else 1)
        self._tensors = dict(tensors)
        for chunk in tensors:
            if there is not None and chunk not in there:
                del places.tensors[chunk]
        blocks = [block for chunk in places.tensors for block in places.ids_of(chunk)]
        self.store = BlockStore(
            [config.checked_folder()], plan, blocks=blocks, label=config.label, meter=config.meter
        )
        self._places, self._versioned = places, versioned
        self._memory, self._pin = config.memory, config.pin
        self._pool = BufferPool(config.depth + 2, _largest(places), config.pin)
        self._writes = WriteBehind(self._pool)
        self._of_steps: BufferPool | None = None  # more buffers, for steps alone
        self._acquired: list[tuple[BufferPool, Buffer]] = []
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="files")  # starts when it is used
        self._reads: list[Future[None]] = []

    def configure(self, depth: int, meter: WriteMeter | None) -> None:
        """Read `depth` blocks ahead from now on, and count what is written, and was, in `meter`."""
        if meter is not None:
            meter.written_bytes += self.store.meter.written_bytes
            self.store.meter = meter
        if depth + 2 != self._pool.count:
            self._set_pool(depth + 2, self._pool.buffer_nbytes)

    def _set_pool(self, count: int, nbytes: int) -> None:
        self._end_reads()
        self._writes.drain()
        self._pool.empty()  # two pools of staging would pass the host's budget
        self._of_steps = None
        self._pool = BufferPool(count, nbytes, self._pin)
        self._writes = WriteBehind(self._pool)

    def release_staging(self) -> None:
        """End what is under way, and release the memory of staging until it is used again."""
        self._end_reads()
        self._writes.drain()
        self._pool.empty()
        if self._of_steps is not None and not self._acquired:
            self._of_steps.empty()

    def __iter__(self) -> Iterator[ChunkId]:
        return iter(self._places.tensors)

    def __contains__(self, chunk: ChunkId) -> bool:
        return chunk in self._places.tensors

    def forget(self, chunks: Collection[ChunkId]) -> None:
        """Forget tensors that live elsewhere from now on: their space on disk is given back."""
        self._end_reads()
        for chunk in chunks:
            self.store.forget(self._places.ids_of(chunk))
            del self._places.tensors[chunk]

    def has_place_for(self, chunks: Collection[ChunkId]) -> bool:
        """Whether tensors are among those that this was made for."""
        return all(chunk in self._tensors for chunk in chunks)

    def take_in(self, tensors: Mapping[ChunkId, Tensor], step: int) -> None:
        """Write tensors that lived elsewhere, and only these; they count as of `step`.

        On an error nothing has changed.
        """
        places = self._places
        before = len(places.tensors)
        try:
            for chunk in tensors:
                places.tensors[chunk] = self._tensors[chunk]
                self.store.remember(places.ids_of(chunk))
            if before < len(places.tensors) and _largest(places) > self._pool.buffer_nbytes:
                self._set_pool(self._pool.count, _largest(places))
            nbytes = sum(map(self._written_bytes, tensors))
            self.store.check_step(nbytes, "parameters that leave memory")
            for chunk, values in tensors.items():
                self.write(chunk, values)
            self.commit(step)
        except BaseException:
            with DeferredSignals():
                self.rollback()
                self.forget([chunk for chunk in tensors if chunk in places.tensors])
            raise

    @property
    def file_bytes(self) -> int:
        return self.store.file_bytes

    @property
    def staging_bytes(self) -> int:
        return self._pool.nbytes + (0 if self._of_steps is None else self._of_steps.nbytes)

    @property
    def written_bytes_per_step(self) -> int:
        """Bytes of a step that writes every tensor once."""
        return sum(map(self._written_bytes, self._places.tensors))

    def _written_bytes(self, chunk: ChunkId) -> int:
        return sum(map(self.store.buffer_nbytes, self._places.ids_of(chunk)))

    # -- blocks of a step, in buffers that it has until its end --

    def acquire_buffers(self, num_more: int, *, to_thread: bool) -> list[Buffer]:
        """Acquire staging buffers for a step until `release_buffers`: `num_more`, and those for all
        else, which the thread that trains needs meanwhile if the step is `to_thread` of its own.

        The step reads nothing that anyone writes meanwhile: a version that is written is not read
        before it counts.
        """
        assert not self._acquired
        if self._of_steps is None or self._of_steps.count != num_more:
            self._of_steps = None  # two pools would pass the host's budget
        if num_more and self._of_steps is None:
            self._of_steps = BufferPool(num_more, self._pool.buffer_nbytes, self._pin)
        pools = [] if self._of_steps is None else [self._of_steps]
        if not to_thread:
            self._end_reads()
            self._writes.drain()
            pools.append(self._pool)
        for pool in pools:
            self._acquired += [(pool, pool.take()) for _ in range(pool.count)]
        return [buffer for _, buffer in self._acquired]

    def release_buffers(self) -> None:
        """Release what was acquired; nothing of the step is under way."""
        while self._acquired:
            pool, buffer = self._acquired.pop()
            pool.give(buffer)

    def values(self, chunk: ChunkId, index: int, buffer: Buffer) -> Tensor:
        """[n], a view: one block in a staging buffer."""
        count = self._places.numel_of(chunk, index)
        dtype = self._places.tensors[chunk].dtype
        return torch.frombuffer(buffer.view, dtype=dtype, count=count)

    def begin_read(self, chunk: ChunkId, index: int, buffer: Buffer) -> Ticket[None]:
        """Begin to read one block, as it counts."""
        return self._begin_read(self._places.id_of(chunk, index), buffer, latest=False)

    def begin_write(self, chunk: ChunkId, index: int, buffer: Buffer) -> Ticket[int]:
        """Begin to write one block."""
        block = self._places.id_of(chunk, index)
        return self.store.write(block, buffer.view[: self.store.buffer_nbytes(block)])

    # -- versions --

    def flush(self) -> None:
        """Wait for all writes. Raises what went wrong."""
        self._writes.drain()
        self.store.flush()

    def commit(self, step: int) -> None:
        """Make what was written count. Raises only what `flush` would have."""
        self.flush()
        self.store.commit(step)

    def rollback(self) -> None:
        """Forget what was written since the last commit."""
        self._writes.abandon()
        self.store.rollback()

    # -- whole tensors --

    def read(
        self, chunk: ChunkId, into: Tensor, behind: Ticket[None] | None = None, first: int = 0
    ) -> Ticket[None]:
        """Begin to fill `into`, which must be left alone until the ticket is done.

        behind: an update by another thread, of what is read then. first: block of the tensor with
        which `into` begins.
        """
        self.store.check_process()  # the thread that reads is not in a forked child
        # The pool is no queue: a reader's thread that found no buffer would raise.
        self._writes.drain()  # it has the buffers to itself
        self._reads = [read for read in self._reads if not read.done()]
        fill = TensorFill.of(chunk, self._places, into, behind, self._memory.mover(), first)
        begin = partial(self._begin_read, latest=self.reads_latest)
        with DeferredSignals():  # a handler that raised in `submit` would leave its locks taken
            self._reads.append(self._reader.submit(fill.run, self._pool, begin))
        return ReadTicket(self._reads[-1], behind)

    def block_numel(self, chunk: ChunkId) -> int:
        """Elements of a block of a tensor."""
        return self._places.block_numel

    def write(self, chunk: ChunkId, values: Tensor) -> None:
        """Write a whole tensor; `values` is free on return. Raises WriteBudgetError first."""
        self.store.check_step(self._written_bytes(chunk), "a tensor that leaves memory")
        move = self._memory.mover()
        with (
            named("write", "chunk", chunk),
            DeferredSignals(),
        ):  # else Ctrl-C may lose a staging buffer
            for i, part in enumerate(values.detach().split(self._places.block_numel)):
                self._write_part(chunk, i, part, move)

    def write_part(self, chunk: ChunkId, index: int, values: Tensor) -> None:
        """Write one block of a tensor, as `write` does all of it."""
        nbytes = self.store.buffer_nbytes(self._places.id_of(chunk, index))
        self.store.check_step(nbytes, "a part of a tensor that leaves memory")
        with named("write", "chunk", chunk), DeferredSignals():
            self._write_part(chunk, index, values.detach(), self._memory.mover())

    def _write_part(self, chunk: ChunkId, index: int, values: Tensor, move: Mover) -> None:
        self._writes.reap()
        self._end_reads()
        buffer = self._writes.take()
        move(self.values(chunk, index, buffer), values)
        self._writes.add(self.begin_write(chunk, index, buffer), buffer)

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
            self._end_reads()
            self._reader.shutdown()
        self.store.close()

    # -- inside --

    def _begin_read(self, block: BlockId, buffer: Buffer, *, latest: bool) -> Ticket[None]:
        view = buffer.view[: self.store.buffer_nbytes(block)]
        if latest:
            return self.store.read_latest(block, view)
        if self._versioned:
            return self.store.read(block, view)
        return self.store.read_uncommitted(block, view)

    def _end_reads(self) -> None:
        """Wait for all reads; their tickets raise what went wrong."""
        wait(self._reads)
        self._reads.clear()


def _largest(places: Places) -> int:
    """Bytes of the largest block that is there."""
    return max(
        (places.numel_of(chunk, 0) * flat.dtype.itemsize for chunk, flat in places.tensors.items()),
        default=0,
    )
