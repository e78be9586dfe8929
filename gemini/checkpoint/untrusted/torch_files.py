"""torch.load of a stranger's file: it runs no code, and takes little memory beyond its bytes.

`weights_only` ensures the first. It does not ensure the second: a zip file may be a thousand times
larger when it is read than on disk, and sixty bytes can ask for `bytearray(10**10)`. So the memory
that torch will take is counted before it loads.
"""

from __future__ import annotations

import io
import zipfile
from pathlib import Path
from typing import Any, BinaryIO

import torch

from gemini import strangers
from gemini.checkpoint.format.manifest import ROOM_BYTES, CorruptError, memory_limit

from .pickles import ENTRY, PickleError, PickleMachine

_ZIP = b"PK\3\4"
_PICKLE_BYTES = 256 << 20  # most of the pickles of a file
_ENTRY_BYTES = 600  # of memory for one file of a zip file
_LEGACY_PICKLES = 5  # magic number, version, system, object, keys of storages
_ITEMSIZES = {
    "": 4, "Double": 8, "Float": 4, "Half": 2, "BFloat16": 2, "Long": 8, "Int": 4, "Short": 2,
    "ComplexFloat": 8, "ComplexDouble": 16,
}  # fmt: skip


def safe_load(file: BinaryIO, what: str) -> Any:
    """Load tensors, numbers, strings and containers by torch.load, and nothing else.

    Raises CorruptError, whose text begins with `what`.
    """
    try:
        check(file)
        file.seek(0)
        return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # damaged zip files and pickles fail in any way
        raise CorruptError(f"{what} cannot be read: {first_line(error)}") from error


def safe_tensor(
    file: Any, what: str, dtype: torch.dtype | None, sizes: tuple[int, ...]
) -> torch.Tensor:
    """Load one strided tensor as `safe_load`. Raises CorruptError for another dtype or shape."""
    found = safe_load(file, what)
    if not isinstance(found, torch.Tensor) or (found.layout, found.dtype, tuple(found.shape)) != (
        torch.strided, dtype, sizes,
    ):  # fmt: skip
        raise CorruptError(f"{what} cannot be read: it is another tensor than its list says")
    return found


def load_mapped(path: Path) -> Any:
    """Load a file as `safe_load` does, its tensors mapped. Raises ValueError and torch's errors."""
    with strangers.opened(path) as file:
        if file.read(4) != _ZIP:  # which torch does not map
            raise ValueError("it is no zip file, expected a file of torch.save")
        check(file)
    return torch.load(path, map_location="cpu", weights_only=True, mmap=True)


class FileSlice(io.RawIOBase):
    """File of the bytes [offset, offset + nbytes) of another file."""

    def __init__(self, file: BinaryIO, offset: int, nbytes: int) -> None:
        self._file, self._offset, self._nbytes, self._at = file, offset, nbytes, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._nbytes}[whence]
        if start + offset < 0:
            raise ValueError("a place before the beginning")
        self._at = start + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        self._file.seek(self._offset + self._at)
        data = self._file.read(max(0, min(view.nbytes, self._nbytes - self._at)))
        view[: len(data)] = data
        self._at += len(data)
        return len(data)


def has_own_bytes(tensor: torch.Tensor) -> bool:
    """Whether every element has bytes of its own."""
    if tensor.layout != torch.strided or tensor.device.type != "cpu":
        return False
    return tensor.untyped_storage().nbytes() >= tensor.numel() * tensor.itemsize


def first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def check(file: BinaryIO) -> None:
    """Raise ValueError if loading `file` would take far more memory than it has bytes."""
    nbytes = file.seek(0, io.SEEK_END)
    file.seek(0)
    if file.read(4) != _ZIP:
        file.seek(0)
        gauge = _Gauge(file.read(), memory_limit(nbytes, 0), nbytes)
        for _ in range(_LEGACY_PICKLES):
            gauge.load()
        return
    for pickled in _pickles_of_zip(file, nbytes):
        _Gauge(pickled, memory_limit(len(pickled), 0), nbytes).load()


def _pickles_of_zip(file: BinaryIO, nbytes: int) -> list[bytes]:
    """Pickles of a zip file. Raises ValueError for entries that torch never writes, such as
    compressed ones."""
    # Counted before zipfile makes an object for each entry.
    if _num_entries(file, nbytes) * _ENTRY_BYTES > ROOM_BYTES + nbytes:
        raise ValueError("its list of files is too long")
    with zipfile.ZipFile(file) as archive:
        found = archive.infolist()
        if len({entry.filename for entry in found}) != len(found):
            raise ValueError("it has two files of one name")
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in found):
            raise ValueError("it is compressed, expected a file of torch.save")
        if sum(entry.file_size for entry in found) > nbytes:
            raise ValueError("its files are larger than it is")
        pickles = [entry for entry in found if entry.filename.endswith(".pkl")]
        if sum(entry.file_size for entry in pickles) > _PICKLE_BYTES:
            raise ValueError("its pickle is larger than any list of tensors")
        return [archive.read(entry) for entry in pickles]


def _num_entries(file: BinaryIO, nbytes: int) -> int:
    """Number of entries that the end of a zip file states. Raises ValueError without an end."""
    file.seek(max(0, nbytes - 98))
    end = file.read()
    last, last64 = end.rfind(b"PK\5\6"), end.rfind(b"PK\6\6")
    if last < 0:
        raise ValueError("its end is missing")
    if last64 >= 0:
        return int.from_bytes(end[last64 + 32 : last64 + 40], "little")
    return int.from_bytes(end[last + 10 : last + 12], "little")


class _NamedGlobal:
    """Name of a function or a class, in the place of the object."""

    def __init__(self, name: str) -> None:
        self.name = name


class _Sized:
    """Length of a container or of a call's result, in the place of the object."""

    def __init__(self, length: int = 0) -> None:
        self.length = length


class _Gauge(PickleMachine):
    """Counter of the memory that torch's own reader would take; makes no object itself."""

    def __init__(self, data: bytes, limit_bytes: int, storage_bytes: int) -> None:
        """limit_bytes: of memory for objects. storage_bytes: of the elements of tensors."""
        super().__init__(data, limit_bytes)
        self._storages: set[object] = set()
        self._storage_bytes_left = storage_bytes

    def named(self, module: str, name: str) -> Any:
        return _NamedGlobal(name)

    def made(self, kind: Any, arguments: tuple[Any, ...]) -> Any:
        return self.called(kind, arguments)

    def called(self, function: Any, arguments: tuple[Any, ...]) -> Any:
        """Count a copy of the arguments, and the zeros that numbers among them ask for."""
        if type(function) is not _NamedGlobal:
            self.wrong("a function", function)
        self.take(sum(map(_copied_bytes, arguments)))
        if function.name == "bytearray" or function.name.endswith(("Tensor", "Storage")):
            self.take(_itemsize(function.name) * _product(arguments))
        return _Sized(sum(map(_length, arguments)))

    def fill(self, made: Any, fields: Any) -> None:
        self.take(ENTRY * _length(fields))

    def extend(self, there: Any, values: list[Any]) -> None:
        self._grow(there, len(values))

    def update(self, there: Any, values: list[Any]) -> None:
        self.take_entries(_length(there), len(values) // 2)
        self._grow(there, len(values) // 2)

    def persistent(self, place: Any) -> Any:
        """Take the memory of a storage, once for each key."""
        if type(place) is not tuple or len(place) < 5 or type(place[4]) is not int:
            self.wrong("a storage", place)
        kind, key, numel = place[1], place[2], place[4]
        if type(kind) is not _NamedGlobal or type(key) not in (str, bytes, int):
            self.wrong("a storage", place)
        if key not in self._storages:
            self._storages.add(key)
            self.take(ENTRY)
            self._storage_bytes_left -= max(0, numel) * _itemsize(kind.name)
            if self._storage_bytes_left < 0:
                raise PickleError("it would take more memory than its files have bytes")
        return _Sized()

    def new_list(self) -> Any:
        return _Sized()

    def new_dict(self) -> Any:
        return _Sized()

    def _grow(self, there: Any, count: int) -> None:
        if type(there) is not _Sized:
            self.wrong("a container", there)
        there.length += count


def _length(value: Any) -> int:
    if type(value) is _Sized:
        return value.length
    return len(value) if isinstance(value, (tuple, str, bytes)) else 0


def _copied_bytes(value: Any) -> int:
    return (4 if isinstance(value, (str, bytes)) else ENTRY) * _length(value)


def _product(values: tuple[Any, ...]) -> int:
    numel = 0
    for value in values:
        if type(value) is int and value > 0:
            numel = max(numel, 1) * value
    return numel


def _itemsize(name: str) -> int:
    """Bytes of an element of `FloatStorage`, `FloatTensor` and the like; 1 for unknown names."""
    return _ITEMSIZES.get(name.removesuffix("Storage").removesuffix("Tensor"), 1)
