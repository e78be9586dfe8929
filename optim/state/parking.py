"""`optimizer.parked`: lend the memory of parameters, gradients and state for a while.

[Note: parking] Storages are parked, not tensors: their bytes are copied away, the storage is freed
with `resize_(0)` and refilled on the way back. Every view into it (parameters, segments of a slab,
what autograd saved) is valid again then. No storage is freed before all bytes are away, so an error
on the way out, a full disk, loses nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor, UntypedStorage

from gemini.nvme import (
    BlockStore,
    Buffer,
    BufferPool,
    WriteBehind,
    read_ahead,
)
from gemini.optim.rules.config import NvmeConfig
from gemini.tickets import Ticket
from gemini.units import PAGE_BYTES, BlockId, align_up

from .disk.records import open_store
from .pinning import pages_of

Where = Literal["nvme", "host"]
RUN_BYTES = 12 << 20  # of one transfer, as a block of fp32 Adam state


class Parked(Protocol):
    """Bytes of storages that were copied away."""

    def bring_back(self) -> None:
        """Refill every storage. May be called again after an error."""
        ...

    def close(self) -> None: ...


def park(tensors: Iterable[Tensor], where: Where, config: NvmeConfig) -> Parked:
    """Copy the storages of `tensors` to `where` and free them. On an error nothing has changed.

    To the host go those of other devices only. A storage that cannot be freed (memory of numpy, a
    mapped file) stays as it is.
    """
    found = {t.untyped_storage()._cdata: t.untyped_storage() for t in tensors}
    storages = [s for s in found.values() if s.nbytes() and _can_be_freed(s)]
    if where == "host":
        return OnHost([s for s in storages if s.device.type != "cpu"])
    return OnDisk(storages, config)


class OnHost:
    """Copies in host memory."""

    def __init__(self, storages: Sequence[UntypedStorage]) -> None:
        # all are copied before one is freed: an error on the way loses nothing ([Note: parking])
        self._copies = [(storage, _bytes_of(storage).cpu()) for storage in storages]
        for storage in storages:
            _free(storage)

    def bring_back(self) -> None:
        for storage, copy in self._copies:
            _refill(storage, copy.numel())
            _bytes_of(storage).copy_(copy)

    def close(self) -> None:
        self._copies.clear()


@dataclass(frozen=True, slots=True)
class _StorageRange:
    """Bytes [start, end) of a storage, one block of the store."""

    block: BlockId
    storage: int
    start: int
    end: int


class OnDisk:
    """Copies on disk: one committed block for every run of at most RUN_BYTES, checksums as
    configured."""

    def __init__(self, storages: Sequence[UntypedStorage], config: NvmeConfig) -> None:
        self._storages = storages
        self._nbytes = [storage.nbytes() for storage in storages]
        self._runs = list(_cut(self._nbytes))
        self._store: BlockStore | None = None
        if not self._runs:
            return
        lengths = [run.end - run.start for run in self._runs]
        self._store = open_store("parked", lengths, config, "parked-")
        self._depth, self._buffer_nbytes = config.depth + 2, max(lengths)
        try:
            self._store.check_step(sum(align_up(n, PAGE_BYTES) for n in lengths), "parking")
            self._write(self._store)
        except BaseException:
            self._store.close()
            raise
        for storage in storages:
            _free(storage)

    def _write(self, store: BlockStore) -> None:
        writes = WriteBehind(self._staging())
        for run in self._runs:
            buffer = writes.take()
            _tensor(buffer, run).copy_(self._memory_of(run))
            writes.add(store.write(run.block, buffer.view), buffer)
        store.commit(1)

    def bring_back(self) -> None:
        store = self._store
        if store is None:
            return
        for storage, nbytes in zip(self._storages, self._nbytes, strict=True):
            _refill(storage, nbytes)

        def read(run: _StorageRange, buffer: Buffer) -> Ticket[None]:
            return store.read(run.block, buffer.view)

        for run, buffer, _ in read_ahead(self._staging(), self._runs, read):
            self._memory_of(run).copy_(_tensor(buffer, run))

    def _staging(self) -> BufferPool:
        return BufferPool(min(self._depth, len(self._runs)), self._buffer_nbytes)

    def _memory_of(self, run: _StorageRange) -> Tensor:
        """uint8 [end - start], the memory of a range."""
        return _bytes_of(self._storages[run.storage])[run.start : run.end]

    def close(self) -> None:
        if self._store is not None:
            self._store.close()


def _cut(nbytes: Sequence[int]) -> Iterator[_StorageRange]:
    block = 0
    for storage, length in enumerate(nbytes):
        for start in range(0, length, RUN_BYTES):
            yield _StorageRange(BlockId(block), storage, start, min(start + RUN_BYTES, length))
            block += 1


def _can_be_freed(storage: UntypedStorage) -> bool:
    return storage.resizable() or pages_of(storage.data_ptr()) is not None


def _free(storage: UntypedStorage) -> None:
    pages = pages_of(storage.data_ptr())
    if pages is not None:
        pages.give_back()
    else:
        storage.resize_(0)


def _refill(storage: UntypedStorage, nbytes: int) -> None:
    # an earlier call may have refilled it before an error: it is left as it is then
    if storage.nbytes() != nbytes:
        storage.resize_(nbytes)
    elif (pages := pages_of(storage.data_ptr())) is not None:
        pages.take_back()


def _bytes_of(storage: UntypedStorage) -> Tensor:
    """uint8 [nbytes], the memory of a storage."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # type: ignore[call-overload,no-any-return]


def _tensor(buffer: Buffer, run: _StorageRange) -> Tensor:
    return torch.frombuffer(buffer.view, dtype=torch.uint8, count=run.end - run.start)
