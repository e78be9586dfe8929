"""File of saved tensors: copies of storages in runs of one file that has no name.

Nothing in it outlives the process, however that ends: the name is removed once the file is there.
"""

from __future__ import annotations

import bisect
import ctypes
import os
import weakref
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from gemini.nvme import (
    PIECE_BYTES,
    Buffer,
    BufferPool,
    NvmeError,
    OpenFile,
    ThreadEngine,
    Transfer,
    WriteMeter,
    check_process,
)
from gemini.nvme.files.file import create_files, remove_files
from gemini.placement.saved import NUM_PIECES
from gemini.tickets import Ticket
from gemini.units import PAGE_BYTES, align_up

NUM_THREADS = 2


@dataclass(slots=True, eq=False)
class FileCopy:
    """Copy of a storage in the file: `nbytes` at `offset`.

    num_pending: writes that have not ended. error: of the first that failed.
    """

    offset: int
    nbytes: int
    num_pending: int = 0
    error: NvmeError | None = None
    is_dropped: bool = False  # its run is free once nothing writes there


@dataclass(slots=True, eq=False)
class FileRead:
    """A read under way into `landing`, which it fills from its page-aligned begin."""

    landing: Tensor  # [n] uint8, host
    ticket: Ticket[int]

    def wait(self) -> None:
        """Wait for it. Raises NvmeError."""
        self.ticket.wait()


class SavedFile:
    """File of one engine's saved tensors, made with the first of them. One thread at a time.

    Writes go through a few buffers, and reads fill memory that the caller keeps.
    """

    def __init__(
        self,
        folder: Path,
        label: str = "",
        *,
        piece_bytes: int = PIECE_BYTES,
    ) -> None:
        """piece_bytes: of a buffer, whole pages."""
        self._folder, self._label = folder, label
        self._piece_bytes = align_up(piece_bytes, PAGE_BYTES)
        self._pid = os.getpid()
        self._file: OpenFile | None = None
        self._engine: ThreadEngine | None = None
        self._pool: BufferPool | None = None
        self._writes: deque[tuple[Ticket[int], Buffer, FileCopy]] = deque()
        self._space = FreeRuns()
        self._meter = WriteMeter()
        self.written_bytes = self.read_bytes = 0  # so far

    @property
    def staging_bytes(self) -> int:
        """Host memory of the buffers, while there is something to write."""
        return 0 if self._pool is None else self._pool.nbytes

    @property
    def in_flight_bytes(self) -> int:
        """The most that may be on its way to the disk."""
        return NUM_PIECES * self._piece_bytes

    @property
    def file_bytes(self) -> int:
        """Bytes that the file has of the disk."""
        return self._space.end

    @property
    def used_bytes(self) -> int:
        """Bytes of the file in which copies lie, whole pages."""
        while self._writes and self._writes[0][0].ready():
            self._end_one_write()
        return self._space.end - self._space.free_bytes

    def attach_meter(self, meter: WriteMeter) -> None:
        """Count in `meter` what is written from now on, and was."""
        meter.count(self.written_bytes)
        self._meter = meter

    def _opened(self) -> tuple[OpenFile, ThreadEngine]:
        check_process(self._pid)
        if self._file is None or self._engine is None:
            (file,) = create_files([self._folder], [0], f"{self._label}saved-", runs=[[]])
            file.unlink()
            self._remove = weakref.finalize(self, remove_files, [file])  # also as Python ends
            self._file, self._engine = file, ThreadEngine(NUM_THREADS)
        return self._file, self._engine

    def release_staging(self) -> None:
        """Give the buffers back until the next write. Waits for writes that are under way."""
        while self._writes:
            self._end_one_write()
        self._pool = None

    # -- writing --

    def write(self, address: int, nbytes: int) -> FileCopy:
        """Begin to write memory of the host, which must stay until `ended`.

        Before anything is written, raises DiskFullError where the disk has no room, and
        WriteBudgetError where the budget of writes has none.
        """
        self._meter.check(nbytes, "what this forward saves for backward")
        file, engine = self._opened()
        pool = self._pool = self._pool or BufferPool(NUM_PIECES, self._piece_bytes)
        copy = FileCopy(self._room(file, align_up(nbytes, PAGE_BYTES)), nbytes)
        try:
            for start in range(0, nbytes, self._piece_bytes):
                if not pool.num_free:
                    self._end_one_write()
                if copy.error is not None:
                    break
                size = min(self._piece_bytes, nbytes - start)
                buffer = pool.take()
                ctypes.memmove(_address(buffer), address + start, size)
                view = buffer.view[: align_up(size, PAGE_BYTES)]
                ticket = engine.write(Transfer(file, copy.offset + start, view, False))
                self._writes.append((ticket, buffer, copy))
                copy.num_pending += 1
        except BaseException:  # Ctrl-C, while it waits for a buffer
            self.drop(copy)
            raise
        self.written_bytes += nbytes
        self._meter.count(nbytes)
        return copy

    def _room(self, file: OpenFile, nbytes: int) -> int:
        offset = self._space.take(nbytes)
        if offset is None:
            offset = self._space.end
            file.reserve([(offset, nbytes)])
            self._space.end += nbytes
        return offset

    def _end_one_write(self) -> None:
        """Wait for the oldest write, and keep its error for whoever asks for its copy."""
        ticket, buffer, copy = self._writes[0]
        try:
            ticket.wait()
        except NvmeError as error:
            copy.error = copy.error or error
        del self._writes[0]
        assert self._pool is not None
        self._pool.give(buffer)
        copy.num_pending -= 1
        if copy.is_dropped and not copy.num_pending:
            self._give_back(copy)

    def ended(self, copy: FileCopy, *, wait: bool = False) -> bool:
        """Whether a copy is on the disk. Raises NvmeError where a write of it failed."""
        while copy.num_pending and (wait or self._writes[0][0].ready()):
            self._end_one_write()
        if copy.num_pending:
            return False
        if copy.error is not None:
            raise copy.error
        return True

    def drop(self, copy: FileCopy) -> None:
        """Give the room of a copy to others; it is read no more."""
        copy.is_dropped = True
        if not copy.num_pending:
            self._give_back(copy)

    def _give_back(self, copy: FileCopy) -> None:
        self._space.give(copy.offset, align_up(copy.nbytes, PAGE_BYTES))

    # -- reading --

    def read(self, copy: FileCopy, landing: Tensor | None = None) -> FileRead:
        """Begin to read a copy into whole pages of the host; None: fresh ones. Raises NvmeError
        where it was not written."""
        file, engine = self._opened()
        self.ended(copy, wait=True)
        if landing is None:
            landing = page_aligned(copy.nbytes)
        whole = landing[: align_up(copy.nbytes, PAGE_BYTES)]
        view = memoryview(whole.numpy())  # type: ignore[arg-type]
        self.read_bytes += copy.nbytes
        return FileRead(landing, engine.read(Transfer(file, copy.offset, view, False)))

    def close(self) -> None:
        """Wait for what is under way, and give disk, memory and threads back."""
        self.release_staging()
        if self._engine is not None:
            self._engine.close()
        if self._file is not None:
            self._remove()
        self._file = self._engine = None
        self._space = FreeRuns()


@dataclass(slots=True)
class FreeRuns:
    """Free runs of a file by offset; neighbours are one. `end`: where the file ends."""

    end: int = 0
    _runs: list[tuple[int, int]] = field(default_factory=list)  # (offset, bytes)

    @property
    def free_bytes(self) -> int:
        return sum(nbytes for _, nbytes in self._runs)

    def take(self, nbytes: int) -> int | None:
        """Take the first free run that is long enough, or its begin. Returns its offset; None:
        none is."""
        for i, (offset, length) in enumerate(self._runs):
            if length >= nbytes:
                if length == nbytes:
                    del self._runs[i]
                else:
                    self._runs[i] = offset + nbytes, length - nbytes
                return offset
        return None

    def give(self, offset: int, nbytes: int) -> None:
        """Give a run back."""
        runs, i = self._runs, bisect.bisect(self._runs, (offset, nbytes))
        if i < len(runs) and runs[i][0] == offset + nbytes:
            nbytes += runs.pop(i)[1]
        if i and sum(runs[i - 1]) == offset:
            before, length = runs.pop(i - 1)
            offset, nbytes, i = before, length + nbytes, i - 1
        runs.insert(i, (offset, nbytes))


def page_aligned(nbytes: int) -> Tensor:
    """Uninitialised uint8 of the host for direct I/O: whole pages, from the begin of one."""
    size = align_up(nbytes, PAGE_BYTES)
    whole = torch.empty(size + PAGE_BYTES, dtype=torch.uint8)
    skipped = -whole.data_ptr() % PAGE_BYTES
    return whole[skipped : skipped + size]


def _address(buffer: Buffer) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer.view))
