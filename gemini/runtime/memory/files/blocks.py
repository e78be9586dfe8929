"""Blocks of flat tensors on disk, in staging buffers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from gemini.nvme import BlockStore, Buffer, BufferPool, Pin, WriteBehind, settle
from gemini.tickets import Ticket
from gemini.units import BlockId, ChunkId


@dataclass(frozen=True, slots=True)
class Flat:
    """A tensor [numel] to be."""

    numel: int
    dtype: torch.dtype


@dataclass(slots=True)
class Staged:
    """One block of one tensor in a staging buffer; `wait` ends its transfer, if there is one."""

    buffer: Buffer
    values: Tensor  # [n], a view of the buffer
    ticket: Ticket[object] | None

    def wait(self) -> Tensor:
        if self.ticket is not None:
            self.ticket.wait()
            self.ticket = None
        return self.values


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


class FileBlocks:
    """Blocks of one store, all or some, in staging buffers; one thread at a time.

    Two objects over one store may be in two threads if neither writes what the other reads: a
    versioned block that is written is not read before it counts.

    versioned: reads see the committed version; else what was written.
    reads_latest: reads of a versioned block see what was written and is to count.
    """

    reads_latest = False

    def __init__(
        self, places: Places, store: BlockStore, pool: BufferPool, *, versioned: bool
    ) -> None:
        self.store = store
        self._places = places
        self._versioned = versioned
        self._pool = pool
        self._writes = WriteBehind(pool)

    def with_own_staging(self, count: int, pin: Pin | None) -> FileBlocks:
        """Make the same for another thread, with `count` buffers of its own."""
        pool = BufferPool(count, self._pool.buffer_nbytes, pin)
        return FileBlocks(self._places, self.store, pool, versioned=self._versioned)

    @property
    def staging_bytes(self) -> int:
        return self._pool.nbytes

    def block_to_fill(self, chunk: ChunkId, index: int) -> Staged:
        """Take a staging buffer for one block, with anything in it."""
        self._writes.reap()
        self._make_room()
        buffer, dtype = self._writes.take(), self._places.tensors[chunk].dtype
        count = self._places.numel_of(chunk, index)
        return Staged(buffer, torch.frombuffer(buffer.view, dtype=dtype, count=count), None)

    def read_block(self, chunk: ChunkId, index: int) -> Staged:
        """Begin to read one block."""
        staged = self.block_to_fill(chunk, index)
        block = self._places.id_of(chunk, index)
        staged.ticket = self._begin_read(block, staged.buffer, latest=self.reads_latest)
        return staged

    def write_block(self, chunk: ChunkId, index: int, staged: Staged) -> None:
        """Begin to write a staged block; its buffer is taken back."""
        block = self._places.id_of(chunk, index)
        view = staged.buffer.view[: self.store.buffer_nbytes(block)]
        self._writes.add(self.store.write(block, view), staged.buffer)

    def give(self, staged: Staged) -> None:
        """Return the buffer of a staged block that is not needed any more."""
        settle(staged.ticket)
        self._pool.give(staged.buffer)

    @property
    def can_read_ahead(self) -> bool:
        """Whether `read_block` would find a buffer and leave one for `block_to_fill`."""
        self._writes.reap()
        return self._pool.num_free > 1

    @property
    def has_buffer(self) -> bool:
        """Whether `read_block` would find a buffer."""
        self._writes.reap()
        return self._pool.num_free > 0

    # -- versions; see `optim.step.driver.Versions` --

    @property
    def written_bytes_per_step(self) -> int:
        """Bytes of a step that writes every tensor once."""
        return sum(map(self._written_bytes, self._places.tensors))

    def check_step(self, also_bytes: int) -> None:
        """Raise WriteBudgetError where a step must not begin that writes every tensor once, and so
        many bytes more."""
        self.store.check_step(self.written_bytes_per_step + also_bytes)

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

    def _written_bytes(self, chunk: ChunkId) -> int:
        return sum(map(self.store.buffer_nbytes, self._places.ids_of(chunk)))

    # -- inside --

    def _make_room(self) -> None:
        """End whatever else than writes has the buffers."""

    def _begin_read(self, block: BlockId, buffer: Buffer, *, latest: bool) -> Ticket[None]:
        view = buffer.view[: self.store.buffer_nbytes(block)]
        if latest:
            return self.store.read_latest(block, view)
        if self._versioned:
            return self.store.read(block, view)
        return self.store.read_uncommitted(block, view)
