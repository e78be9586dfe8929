"""Files of one rank: its data, a stream of items, and a small file that names its pinned state.

Data is written and read by nvme's engine: direct I/O, several pieces at a time, checksummed in the
transfer, in two or three staging buffers. An item has torch.save's format from before zip files:
the header comes first, so that elements can be streamed after it, and DCP's own reader can read it.

A pinned file names the store's files that have the state. Its name is unique to the checkpoint, and
the store keeps the version while that file exists (`nvme.versions`): until the checkpoint is
deleted, or another replaces it.
"""

from __future__ import annotations

import functools
import io
import pickle
import secrets
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from operator import mul
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.serialization import MAGIC_NUMBER, PROTOCOL_VERSION

from gemini import nvme, strangers
from gemini.nvme import (
    Buffer,
    BufferPool,
    Engine,
    NvmeError,
    OpenFile,
    ThreadEngine,
    Transfer,
    WriteBehind,
    create_direct,
    open_direct,
    settle,
    transfer_error,
)
from gemini.nvme.files import calls
from gemini.optim.state.deferred_signals import DeferredSignals
from gemini.optim.state.disk.state_version import StateVersion, VersionReader
from gemini.optim.state.memory import copy_alone
from gemini.tickets import Ticket
from gemini.units import BLOCK_NUMEL, PAGE_BYTES, align_up

from .manifest import (
    ROOM_BYTES,
    CorruptError,
    DataFile,
    PinnedFile,
    Unit,
    most_bytes,
    on_disk,
    read_file,
    reading,
)

ITEM_ALIGN = 64  # of raw elements in a file, so that a buffer can be looked at as a tensor
HEADER_BYTES = 512  # no header is larger
# a block of Adam's state with its master, and room for the headers of its planes
BUFFER_BYTES = align_up(12 * BLOCK_NUMEL + 16 * HEADER_BYTES, PAGE_BYTES)
WRITE_BUFFERS = 2
READ_BUFFERS = 3
_STORAGES = {
    torch.float64: torch.DoubleStorage,
    torch.float32: torch.FloatStorage,
    torch.bfloat16: torch.BFloat16Storage,
    torch.float16: torch.HalfStorage,
    torch.uint8: torch.ByteStorage,
    torch.int8: torch.CharStorage,
    torch.int16: torch.ShortStorage,
    torch.int32: torch.IntStorage,
    torch.int64: torch.LongStorage,
    torch.bool: torch.BoolStorage,
}


# -- an item --


class _Reduced:
    """An object whose pickle is a call of a function."""

    def __init__(self, *call: Any) -> None:
        self._call = call

    def __reduce__(self) -> tuple[Any, ...]:
        return self._call


class _Pickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> Any:
        return obj if type(obj) is tuple and obj[:1] == ("storage",) else None


def can_be_raw(dtype: torch.dtype) -> bool:
    """Whether `tensor_header` knows this dtype."""
    return dtype in _STORAGES


@functools.lru_cache(maxsize=4096)
def tensor_header(dtype: torch.dtype, sizes: tuple[int, ...]) -> bytes:
    """Bytes before raw elements with which `torch.load(weights_only=True)` reads a tensor."""
    numel = prod(sizes)
    strides = tuple(accumulate(reversed(sizes[1:]), mul, initial=1))[::-1][: len(sizes)]
    storage = ("storage", _STORAGES[dtype], "0", "cpu", numel, None)
    hooks: OrderedDict[str, Any] = OrderedDict()
    arguments = (storage, 0, sizes, strides, False, hooks)
    kinds = {"short": 2, "int": 4, "long": 4}
    system = {"protocol_version": PROTOCOL_VERSION, "little_endian": True, "type_sizes": kinds}
    out = io.BytesIO()
    for value in (MAGIC_NUMBER, PROTOCOL_VERSION, system):
        pickle.dump(value, out, 2)
    _Pickler(out, 2).dump(_Reduced(torch._utils._rebuild_tensor_v2, arguments))
    pickle.dump(["0"], out, 2)
    out.write(numel.to_bytes(8, "little"))
    return out.getvalue()


# -- data --


@dataclass(slots=True)
class _OpenUnit:
    """The unit that is being filled."""

    buffer: Buffer
    offset: int  # of the unit in the file
    used: int = 0  # bytes


class UnitWriter:
    """Writer that appends items to a new file. One thread at a time.

    Memory: `buffers` staging buffers of `buffer_nbytes`.
    """

    def __init__(
        self, path: Path, *, buffer_nbytes: int = BUFFER_BYTES, buffers: int = WRITE_BUFFERS
    ) -> None:
        self._file = create_direct(path)
        self._engine: Engine = ThreadEngine()
        self._pool = BufferPool(buffers, buffer_nbytes)
        self._capacity = self._pool.buffer_nbytes
        self._units: list[tuple[int, int, Ticket[int]]] = []  # offset, bytes, checksum
        self._writes = WriteBehind(self._pool)
        self._now = _OpenUnit(self._pool.take(), 0)

    @property
    def staging_bytes(self) -> int:
        return self._pool.nbytes

    def reserve(self, nbytes: int) -> None:
        """Allocate `nbytes` on disk now. Raises nvme.DiskFullError if the disk has less."""
        try:
            calls.reserve(self._file.fd, [(0, max(nbytes, 1))])
        except OSError as error:
            path = str(self._file.path)
            raise transfer_error("write", path, 0, nbytes, error.errno or 0) from error

    def append(self, header: bytes, values: Tensor) -> tuple[int, int]:
        """Write `header` and then the elements; return (offset, length) of both together.

        `values` may be on any device and is copied before this returns.
        """
        flat = values.detach().reshape(-1)
        total = len(header) + flat.nbytes
        # An item that fits one unit is not cut in two, so that a read of it takes one unit; a
        # larger one begins in this unit only if its header fits.
        if total + ITEM_ALIGN > self._room and (
            total + ITEM_ALIGN <= self._capacity or len(header) + 2 * ITEM_ALIGN > self._room
        ):
            self._flush()
        start = align_up(self._now.used + len(header), ITEM_ALIGN) - len(header)
        self._put(bytes(start - self._now.used))
        offset = self._now.offset + self._now.used
        self._put(header)
        while flat.numel():
            if self._room < flat.itemsize:
                self._flush()
            count = min(flat.numel(), self._room // flat.itemsize)
            there = torch.frombuffer(
                self._now.buffer.view, dtype=flat.dtype, count=count, offset=self._now.used
            )
            copy_alone(there, flat[:count])
            self._now.used += count * flat.itemsize
            flat = flat[count:]
        return offset, total

    def append_bytes(self, data: bytes | memoryview) -> tuple[int, int]:
        """Write bytes as they are."""
        whole = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        return self.append(b"", whole)

    def finish(self) -> DataFile:
        """Wait for the disk and sync. The file is complete when this returns."""
        try:
            if self._now.used:
                self._flush()
            units = tuple(
                Unit(offset, nbytes, ticket.wait()) for offset, nbytes, ticket in self._units
            )
            end = units[-1].offset + units[-1].nbytes if units else 0
            try:
                calls.truncate(self._file.fd, end)
                calls.fsync(self._file.fd)
            except OSError as error:
                path = str(self._file.path)
                raise transfer_error("sync", path, 0, end, error.errno or 0) from error
            return DataFile(self._file.path.name, end, units)
        finally:
            self.close()

    def close(self) -> None:
        """Wait for the transfers under way; the file stays as it is. Raises TransferError."""
        self._writes.abandon()
        self._engine.close()
        self._file.close()

    @property
    def _room(self) -> int:
        return self._capacity - self._now.used

    def _put(self, data: bytes) -> None:
        self._now.buffer.view[self._now.used : self._now.used + len(data)] = data
        self._now.used += len(data)

    def _flush(self) -> None:
        """Send the unit to the disk and begin the next one in a free buffer."""
        now = self._now
        nbytes = align_up(now.used, PAGE_BYTES)
        # Direct I/O writes whole pages; the tail of the last one must not be what a unit before
        # left in this buffer.
        self._put(bytes(nbytes - now.used))
        with DeferredSignals():  # a signal in between would leave the engine's locks taken
            ticket = self._engine.write(
                Transfer(self._file, now.offset, now.buffer.view[:nbytes], True)
            )
            self._units.append((now.offset, nbytes, ticket))
            self._writes.add(ticket, now.buffer)
            self._now = _OpenUnit(self._writes.take(), now.offset + nbytes)


class UnitReader:
    """Reader of the units of several files, verified, some read ahead. One thread at a time."""

    def __init__(self, folder: Path, files: Sequence[DataFile]) -> None:
        """Raise CorruptError if a file has another size than in the manifest."""
        for file in files:
            check_there(folder / file.name, file.nbytes)
        self._folder = folder
        self._files = {file.name: file for file in files}
        self._open: dict[str, OpenFile] = {}
        largest = max((unit.nbytes for file in files for unit in file.units), default=1)
        self._pool = BufferPool(READ_BUFFERS, largest)
        self._engine: Engine = ThreadEngine()
        self._cache: OrderedDict[_Key, tuple[Ticket[int], Buffer]] = OrderedDict()  # oldest first
        self._order: list[_Key] = []
        self._next = 0  # of `_order`

    def will_read(self, ranges: Iterable[tuple[str, int, int]]) -> None:
        """Announce reads, (file, offset, bytes) in order: their units are read ahead."""
        order: list[_Key] = []
        for name, offset, nbytes in ranges:
            for number in self._file(name).units_of(offset, nbytes):
                if not order or order[-1] != (name, number):
                    order.append((name, number))
        self._order, self._next = order, 0

    def read(self, name: str, offset: int, nbytes: int) -> memoryview:
        """Bytes of a file, valid until the next call. Raises CorruptError."""
        if nbytes == 0:
            return memoryview(b"")
        file = self._file(name)
        numbers = file.units_of(offset, nbytes)
        if offset < 0 or nbytes < 0 or offset + nbytes > file.nbytes:
            raise CorruptError(f"{self._folder / name} has no bytes {offset} to {offset + nbytes}")
        if len(numbers) == 1:
            start = offset - file.units[numbers[0]].offset
            return self._unit(name, numbers[0])[start : start + nbytes]
        whole = bytearray(nbytes)
        for number in numbers:
            unit = file.units[number]
            first = max(offset, unit.offset)
            last = min(offset + nbytes, unit.offset + unit.nbytes)
            view = self._unit(name, number)[first - unit.offset : last - unit.offset]
            whole[first - offset : last - offset] = view
        return memoryview(whole)

    def verify(self, said: Callable[[str, int], None] = lambda name, nbytes: None) -> None:
        """Read every unit once. Raises CorruptError for the first file with another content."""
        self.will_read((file.name, 0, file.nbytes) for file in self._files.values())
        for file in self._files.values():
            for number in range(len(file.units)):
                self._unit(file.name, number)
            said(file.name, file.nbytes)

    def close(self) -> None:
        # A read under way writes into its buffer, which must not be freed before it ends.
        for ticket, _ in self._cache.values():
            settle(ticket)
        self._cache.clear()
        self._engine.close()
        for file in self._open.values():
            file.close()

    def _file(self, name: str) -> DataFile:
        if name not in self._files:
            raise CorruptError(f"{self._folder}: the manifest does not know the file {name}")
        return self._files[name]

    def _unit(self, name: str, number: int) -> memoryview:
        key = (name, number)
        if key not in self._cache:
            self._begin(key, keep=())
        self._read_ahead(key)
        ticket, buffer = self._cache[key]
        self._cache.move_to_end(key)
        unit = self._files[name].units[number]
        try:
            found = ticket.wait()
        except NvmeError as error:
            raise CorruptError(f"{self._folder / name} cannot be read: {error}") from error
        if found != unit.checksum:
            raise CorruptError(
                f"{self._folder / name} is damaged at bytes {unit.offset} to "
                f"{unit.offset + unit.nbytes}: checksum {found:#010x}, expected "
                f"{unit.checksum:#010x}"
            )
        return buffer.view[: unit.nbytes]

    def _read_ahead(self, key: _Key) -> None:
        """Begin the announced reads after `key`, as far as buffers allow."""
        try:
            here = self._order.index(key, self._next)
        except ValueError:
            return
        self._next = here
        coming = self._order[here : here + READ_BUFFERS - 1]
        for ahead in coming:
            if ahead not in self._cache:
                self._begin(ahead, keep=coming)

    def _begin(self, key: _Key, keep: Sequence[_Key]) -> None:
        """Begin to read a unit, in the buffer of the unit that was used longest ago.

        keep: units whose buffers are not taken.
        """
        if not self._pool.num_free:
            oldest = next(old for old in self._cache if old not in keep)
            ticket, buffer = self._cache.pop(oldest)
            settle(ticket)
            self._pool.give(buffer)
        name, number = key
        unit = self._files[name].units[number]
        buffer = self._pool.take()
        transfer = Transfer(self._opened(name), unit.offset, buffer.view[: unit.nbytes], True)
        self._cache[key] = (self._engine.read(transfer), buffer)

    def _opened(self, name: str) -> OpenFile:
        if name not in self._open:
            path = self._folder / name
            with reading(path, "opened"):
                self._open[name] = open_direct(path)
        return self._open[name]


_Key = tuple[str, int]  # file, number of the unit


def check_there(path: Path, nbytes: int) -> None:
    """Raise CorruptError unless `path` is a file of this many bytes."""
    with reading(path):
        found = strangers.size_of(path)
    if found != nbytes:
        raise CorruptError(f"{path} has {found} bytes, expected {nbytes}: it was cut or replaced")


# -- pinned state --


def pinned_name(rank: int) -> str:
    """Name of a rank's pinned file, which no other checkpoint has."""
    return f"__{rank}_0.{secrets.token_hex(4)}.pinned"


def write_pinned(path: Path, version: StateVersion) -> PinnedFile:
    """Write one rank's pinned file, synced. Raises CheckpointError."""
    data = version.encode()
    with on_disk("write", path):
        calls.write_whole(path, data)
    return PinnedFile(path.name, version.nbytes, len(data), zlib.crc32(data))


class PinnedStream:
    """Reader of the state that one rank has pinned, verified."""

    def __init__(self, folder: Path, file: PinnedFile, stack: ExitStack) -> None:
        """Open the store's files, which `stack` closes. Raises CorruptError."""
        self._path = folder / file.name
        data = read_file(self._path, most_bytes(file.nbytes, ROOM_BYTES))
        if len(data) != file.file_nbytes or zlib.crc32(data) != file.crc32:
            raise CorruptError(f"{self._path} is damaged: its checksum does not match")
        try:
            self._version = StateVersion.decode(data)
        except ValueError as error:
            raise CorruptError(f"{self._path} says what no state is: {error}") from error
        if self._version.nbytes != file.nbytes:
            raise CorruptError(f"{self._path} has other state than the manifest says")
        gone = [path for path in self._version.paths if not Path(path).exists()]
        if gone:
            raise CorruptError(
                f"{gone[0]} is gone, and {folder} is pinned to the state in it; load another "
                "checkpoint. Copy what is pinned out (save_checkpoint with async_save=True) "
                "before its files are removed"
            )
        try:
            files = stack.enter_context(
                nvme.recover(self._version.paths, pinned=self._version.index)
            )
            self._reader = VersionReader(self._version, files)
            stack.callback(self._reader.close)
        except (nvme.StoreFormatError, OSError) as error:
            raise CorruptError(f"{self._path}: {error}") from error

    def read(self, at: int, numel: int) -> Tensor:
        """Elements [numel] from byte `at`, valid until the next call. Raises CorruptError."""
        try:
            return self._reader.read(at, numel)
        except (nvme.NvmeError, ValueError) as error:
            self._refuse(error)

    def verify(self, places: Iterable[int] | None = None) -> None:
        """Read the blocks with the bytes at `places`, or every block, once. Raises CorruptError."""
        blocks: Iterable[int] = range(len(self._version.blocks))
        try:
            if places is not None:
                blocks = sorted({self._version.block_at(at) for at in places})
            for i in blocks:
                self._reader.block(i)
        except (nvme.NvmeError, ValueError) as error:
            self._refuse(error)

    def _refuse(self, error: Exception) -> NoReturn:
        raise CorruptError(
            f"{self._version.paths[0]}, which {self._path} is pinned to, was written over or is "
            f"damaged: {error}"
        ) from error


def verify_pinned(folder: Path, file: PinnedFile, say: Callable[[str, int], None]) -> None:
    """Read all state that a rank has pinned, once. Raises CorruptError."""
    with ExitStack() as stack:
        PinnedStream(folder, file, stack).verify()
        say(file.name, file.nbytes)
