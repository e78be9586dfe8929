"""`optimizer.parked`, `model.park`: lend the memory of parameters, gradients and state for a while.

[Note: parking] Storages are parked, not tensors: their bytes are copied away, the storage is freed
with `resize_(0)` and refilled on the way back. Every view into it (parameters, segments of a slab,
what autograd saved) is valid again then. No storage is freed before all bytes are away, so an error
on the way out, a full disk, loses nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

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
from .memory import StreamMark
from .pinning import pages_of, pin_slab, pinned

Where = Literal["nvme", "host"]
RUN_BYTES = 12 << 20  # of one transfer, as a block of fp32 Adam state


def park(tensors: Iterable[Tensor], where: Where, config: NvmeConfig) -> Parked:
    """Copy the storages of `tensors` to `where` and free them. On an error nothing has changed.

    To the host go those of other devices only. A storage that cannot be freed (memory of numpy, a
    mapped file) stays as it is.
    """
    return Parked(storages_of(tensors, where), config if where == "nvme" else None)


def storages_of(tensors: Iterable[Tensor], where: Where) -> list[UntypedStorage]:
    """Storages that `park` moves, each once."""
    found = {t.untyped_storage()._cdata: t.untyped_storage() for t in tensors}
    storages = [s for s in found.values() if s.nbytes() and _can_be_freed(s)]
    return storages if where == "nvme" else [s for s in storages if s.device.type != "cpu"]


class Parked:
    """Copies of storages that were freed: on disk, one committed block for every run of at most
    RUN_BYTES, checksums as configured; or in host memory."""

    def __init__(self, storages: Sequence[UntypedStorage], config: NvmeConfig | None) -> None:
        """config: of the disk; None: host memory."""
        self._storages = [(storage, storage.nbytes()) for storage in storages]
        self._store: BlockStore | None = None
        self._copies: list[Tensor] = []
        self._runs = list(self._cut())
        # all are copied before one is freed: an error on the way loses nothing ([Note: parking])
        if config is None:
            self._copies = _copied_to_host(storages)
        elif self._runs:
            lengths = [end - start for *_, start, end in self._runs]
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

    def _cut(self) -> Iterator[_Run]:
        block = 0
        for storage, nbytes in self._storages:
            for start in range(0, nbytes, RUN_BYTES):
                yield BlockId(block), storage, start, min(start + RUN_BYTES, nbytes)
                block += 1

    def _write(self, store: BlockStore) -> None:
        writes = WriteBehind(self._staging())
        for run in self._runs:
            buffer = writes.take()
            _tensor(buffer, run).copy_(_memory_of(run))
            writes.add(store.write(run[0], buffer.view), buffer)
        store.commit(1)

    def bring_back(self) -> None:
        """Refill every storage. May be called again after an error."""
        for storage, nbytes in self._storages:
            _refill(storage, nbytes)
        for (storage, _), copy in zip(self._storages, self._copies, strict=False):
            _bytes_of(storage).copy_(copy, non_blocking=True)
        _settle([storage for storage, _ in self._storages])
        if (store := self._store) is None:
            return

        def read(run: _Run, buffer: Buffer) -> Ticket[None]:
            return store.read(run[0], buffer.view)

        for run, buffer, _ in read_ahead(self._staging(), self._runs, read):
            _memory_of(run).copy_(_tensor(buffer, run))

    def _staging(self) -> BufferPool:
        pin = pin_slab if any(storage.is_cuda for storage, _ in self._storages) else None
        return BufferPool(min(self._depth, len(self._runs)), self._buffer_nbytes, pin)

    def close(self) -> None:
        self._copies.clear()
        if self._store is not None:
            self._store.close()


_Run = tuple[BlockId, UntypedStorage, int, int]  # of the store; bytes [start, end) of a storage


def _can_be_freed(storage: UntypedStorage) -> bool:
    return storage.resizable() or pages_of(storage.data_ptr()) is not None


def _copied_to_host(storages: Sequence[UntypedStorage]) -> list[Tensor]:
    """Copies of a device's storages, pinned if it is one of CUDA; the host waits once for all."""
    copies = []
    for storage in storages:
        values = _bytes_of(storage)
        if values.is_cuda:
            copies.append(pinned(values.numel(), values.dtype).copy_(values, non_blocking=True))
        else:
            copies.append(values.cpu())
    _settle(storages)
    return copies


def _settle(storages: Sequence[UntypedStorage]) -> None:
    """Wait for copies of storages: any stream, and the host, may use either end next."""
    for device in dict.fromkeys(storage.device for storage in storages if storage.is_cuda):
        StreamMark(torch.cuda.current_stream(device)).settle()


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


def _memory_of(run: _Run) -> Tensor:
    """uint8 [end - start], the memory of a run."""
    _, storage, start, end = run
    return _bytes_of(storage)[start:end]


def _tensor(buffer: Buffer, run: _Run) -> Tensor:
    *_, start, end = run
    return torch.frombuffer(buffer.view, dtype=torch.uint8, count=end - start)
