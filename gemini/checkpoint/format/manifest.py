"""Manifest of a checkpoint, index of its tensors, and the errors of this package.

`manifest.json` has two lines: a JSON object, and the crc32 of its bytes. A data file is a sequence
of units, each written by one transfer and read whole, so that every byte is verified when it is
read. The index maps each part of a tensor to bytes of a file. It comes from the manifest or from
torch's `.metadata` (`foreign/metadata.py`), and both may be a stranger's: `check` compares an index
with the files before memory is taken for a tensor.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import zlib
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch

from gemini import strangers
from gemini.nvme import cause_of
from gemini.units import PAGE_BYTES

FORMAT_VERSION = 1
PINNED_VERSION = 2  # of a checkpoint that is pinned to state in other files
NAME = "manifest.json"
METADATA = ".metadata"  # of torch.distributed.checkpoint
JSON_BYTES = 1 << 20  # most bytes of a manifest or an index,
JSON_SHARE = 4096  # plus one for each 4096 bytes of the data that it describes
MAX_UNIT_BYTES = 16 << 20  # of a file of any version: a reader takes memory for a few units
ROOM_BYTES = 32 << 20  # of memory, for the objects of a small file
_OBJECTS_SHARE = 16  # bytes of memory for each byte of a pickle
_MOST = 1 << 62  # bytes or elements
_DESCRIBED = 256 << 30  # bytes of data above which what describes them grows no more
_METADATA_SHARE = 256  # bytes of data for one of a pickle
_ITEM_ROOM = 1 << 20  # bytes of an item beside its elements
_PRIME = (1 << 61) - 1
_DTYPES = {
    str(kind).removeprefix("torch."): kind
    for kind in vars(torch).values()
    if isinstance(kind, torch.dtype)
}


class CheckpointError(RuntimeError):
    """Base of every error of this package; the same text on every rank."""


class MismatchError(CheckpointError, ValueError):
    """A checkpoint of another model or optimizer; the text lists every difference."""


class CorruptError(CheckpointError):
    """A file that is missing or has other bytes than were written; the text names the file."""


class FormatError(CheckpointError, ValueError):
    """A path without a checkpoint, or a checkpoint of a format that this code does not read."""


@contextmanager
def on_disk(what: str, path: Path) -> Iterator[None]:
    """Context in which an OSError becomes a CheckpointError: "cannot `what` `path`: reason"."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"cannot {what} {path}: {cause_of(error)}") from error


@contextmanager
def reading(path: Path, how: str = "read") -> Iterator[None]:
    """Context in which an OSError becomes a CorruptError."""
    try:
        yield
    except OSError as error:
        raise CorruptError(f"{path} cannot be {how}: {cause_of(error)}") from error


# -- small files, which may come from anybody --


def memory_limit(pickle_bytes: int, data_bytes: int) -> int:
    """Bytes of memory that a pickle may take, with `data_bytes` for its tensors."""
    return ROOM_BYTES + _OBJECTS_SHARE * pickle_bytes + data_bytes


def read_file(path: Path, limit: int) -> bytes:
    """Content of a file of at most `limit` bytes. Raises CorruptError."""
    with reading(path):
        return strangers.read_bytes(path, limit)


def folder_bytes(folder: Path) -> int:
    """Bytes of all files in a folder. Raises CorruptError."""
    with reading(folder), os.scandir(folder) as entries:
        return sum(entry.stat().st_size for entry in entries if entry.is_file())


def most_bytes(data_bytes: int, room: int = JSON_BYTES, share: int = JSON_SHARE) -> int:
    """Most bytes of a file that describes `data_bytes` of others, which may be sparse."""
    return room + min(data_bytes, _DESCRIBED) // share


def read_json(path: Path) -> bytes:
    """Content of a manifest or an index. Raises CorruptError if it is missing or too large.

    The limit grows with the files that it describes: parsed, JSON takes about 30 times its size in
    memory.
    """
    return read_file(path, most_bytes(folder_bytes(path.parent)))


def read_manifest(folder: Path) -> Manifest | None:
    """Manifest of a folder, None if it has no such file. Raises FormatError or CorruptError."""
    path = folder / NAME
    if not os.path.lexists(path):
        return None
    return Manifest.decode(read_json(path), str(path))


# -- the manifest --


@dataclass(frozen=True, slots=True)
class Unit:
    """Bytes of a data file that were written, and are read, together."""

    offset: int  # a multiple of the page size
    nbytes: int  # whole pages
    checksum: int  # of nvme's engines


@dataclass(frozen=True, slots=True)
class DataFile:
    """One data file, which one rank wrote."""

    name: str
    nbytes: int
    units: tuple[Unit, ...]  # in order, without gaps

    def units_of(self, offset: int, nbytes: int) -> range:
        """Indices of the units with bytes [offset, offset + nbytes)."""
        first = bisect_right(self.units, offset, key=lambda unit: unit.offset) - 1
        last = bisect_right(self.units, offset + nbytes - 1, key=lambda unit: unit.offset)
        return range(first, max(first, last))


@dataclass(frozen=True, slots=True)
class PinnedFile:
    """A small file that names the files of one rank's pinned state."""

    name: str
    nbytes: int  # of the state, as one stream
    file_nbytes: int
    crc32: int  # of the small file


@dataclass(frozen=True, slots=True)
class Manifest:
    """Content of `manifest.json`: the files of a checkpoint with their checksums."""

    world_size: int
    sequence: int  # one more than the largest in the parent folder
    metadata_nbytes: int
    metadata_crc32: int
    files: tuple[DataFile, ...] = ()
    about: dict[str, Any] = field(default_factory=dict)  # for people: versions, time
    # "metadata": crc32 of the `.metadata` with the same index; "tensors": see `encode_index`
    index: dict[str, Any] | None = None
    pinned: tuple[PinnedFile, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of the folder's files, without the manifest."""
        pinned = sum(file.file_nbytes for file in self.pinned)
        return sum(file.nbytes for file in self.files) + self.metadata_nbytes + pinned

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes that an index may point into, by file."""
        pinned = {file.name: file.nbytes for file in self.pinned}
        return {file.name: file.nbytes for file in self.files} | pinned

    @property
    def digest(self) -> str:
        """Hash of the content of all files, 16 hexadecimal digits."""
        units = [(f.name, [u.checksum for u in f.units]) for f in self.files]
        units += [(f.name, [f.crc32]) for f in self.pinned]
        return hashlib.sha256(repr((self.metadata_crc32, units)).encode()).hexdigest()[:16]

    def encode(self) -> bytes:
        """Bytes of the manifest; the index is left out if with it a reader would find the manifest
        too large for its files."""
        body: dict[str, Any] = {
            "format": PINNED_VERSION if self.pinned else FORMAT_VERSION,
            "world_size": self.world_size,
            "sequence": self.sequence,
            "metadata": [self.metadata_nbytes, self.metadata_crc32],
            "files": {
                file.name: {
                    "nbytes": file.nbytes,
                    "units": [[u.offset, u.nbytes, u.checksum] for u in file.units],
                }
                for file in self.files
            },
            "about": self.about,
        }
        if self.pinned:
            body["pinned"] = {f.name: [f.nbytes, f.file_nbytes, f.crc32] for f in self.pinned}
        for more in ({} if self.index is None else {"index": self.index}, {}):
            text = json.dumps(body | more, separators=(",", ":")).encode()
            data = text + b"\n" + f"crc32 {zlib.crc32(text):08x}\n".encode()
            if len(data) <= most_bytes(self.nbytes):
                break
        return data

    @classmethod
    def decode(cls, data: bytes, path: str) -> Manifest:
        """Parse and check a manifest. Raises FormatError for another version, CorruptError for a
        wrong checksum or wrong content."""
        text, _, rest = data.partition(b"\n")
        if rest != f"crc32 {zlib.crc32(text):08x}\n".encode():
            raise CorruptError(f"{path} is damaged: its checksum does not match")
        try:
            body = strangers.parsed(text)
        except ValueError as error:
            raise CorruptError(f"{path} says what no checkpoint has: {error}") from error
        version = body.get("format") if isinstance(body, dict) else None
        if version not in (FORMAT_VERSION, PINNED_VERSION):
            raise FormatError(
                f"{path} is of checkpoint format {version!r:.40}, this code reads up to "
                f"{PINNED_VERSION}; load it with the version that wrote it"
            )
        try:
            return cls(
                world_size=_whole(body["world_size"]),
                sequence=_whole(body["sequence"]),
                metadata_nbytes=_whole(body["metadata"][0]),
                metadata_crc32=_whole(body["metadata"][1]),
                files=tuple(_file(name, one) for name, one in body["files"].items()),
                about=dict(body["about"]),
                index=dict(body["index"]) if "index" in body else None,
                pinned=tuple(_pinned(*one) for one in body.get("pinned", {}).items()),
            )
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise CorruptError(f"{path} says what no checkpoint has: {error}") from error


def is_plain_name(name: object) -> bool:
    """Whether a name stays inside its folder and is one line of text: no slash, no backslash, no
    NUL, not `.` or `..`."""
    inside = isinstance(name, str) and name not in ("", ".", "..") and not set("/\\") & set(name)
    return inside and str(name).isprintable()


def _whole(value: object) -> int:
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise ValueError(f"{value!r:.40} is no number of bytes or files")
    return value


def _pinned(name: str, body: Any) -> PinnedFile:
    if not is_plain_name(name):
        raise ValueError(f"{name!r:.80} is no file of the folder")
    nbytes, file_nbytes, crc32 = map(_whole, body)
    return PinnedFile(name, nbytes, file_nbytes, crc32)


def _file(name: str, body: Any) -> DataFile:
    """A file of a manifest. Raises ValueError for a bad name, gaps between units, or a unit that is
    larger than any version writes."""
    if not is_plain_name(name):
        raise ValueError(f"{name!r:.80} is no file of the folder")
    units = tuple(Unit(*map(_whole, unit)) for unit in body["units"])
    end = 0
    for unit in units:
        whole_pages = 0 < unit.nbytes <= MAX_UNIT_BYTES and unit.nbytes % PAGE_BYTES == 0
        if unit.offset != end or not whole_pages:
            raise ValueError(f"{name} has a unit of {unit.nbytes} bytes at byte {unit.offset}")
        end += unit.nbytes
    if end != _whole(body["nbytes"]):
        raise ValueError(f"{name} has {end} bytes of units, expected {body['nbytes']!r:.40}")
    return DataFile(name, end, units)


# -- the index --


class SavedPart(NamedTuple):
    """One item of a file: a box of a tensor, or all of a value."""

    file: str
    at: int  # first byte
    nbytes: int  # with the header before the elements
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class SavedValue(NamedTuple):
    """A tensor, or a value that torch.save wrote."""

    dtype: torch.dtype | None  # None: a value, which is one part
    size: torch.Size
    parts: tuple[SavedPart, ...]


Index = Mapping[str, SavedValue]


def encode_index(index: Index, files: Sequence[str]) -> dict[str, Any]:
    """Index as JSON: key -> [dtype, size, parts]. All parts are one flat list: for each its file's
    number, first byte, bytes, offsets and sizes."""
    numbers = {name: number for number, name in enumerate(files)}
    return {
        key: [
            None if entry.dtype is None else str(entry.dtype).removeprefix("torch."),
            list(entry.size),
            [
                number
                for part in entry.parts
                for number in (
                    numbers[part.file], part.at, part.nbytes, *part.offsets, *part.sizes
                )
            ],
        ]
        for key, entry in index.items()
    }  # fmt: skip


def decode_index(body: Any, files: Mapping[str, int]) -> dict[str, SavedValue]:
    """Parse and check an index. `files`: bytes by name, in order. Raises CorruptError."""
    names, index = list(files), {}
    try:
        for key, (kind, size, numbers) in body.items():
            # Exactly int: a float or a bool of JSON would pass as a number until it is an index.
            dtype, every = None if kind is None else _DTYPES[kind], [0, *size, *numbers]
            if set(map(type, every)) != {int} or min(every) < 0 or max(every) >= _MOST:
                raise ValueError(f"{key:.80} has a place that is none")
            n, parts = len(size), []
            for i in range(0, len(numbers), 3 + 2 * n):
                file, at, nbytes, *box = numbers[i : i + 3 + 2 * n]
                if len(box) != 2 * n:
                    raise ValueError(f"{key:.80} has half a place")
                parts.append(SavedPart(names[file], at, nbytes, tuple(box[:n]), tuple(box[n:])))
            index[key] = SavedValue(dtype, torch.Size(size), tuple(parts))
    except (TypeError, ValueError, AttributeError, LookupError, RuntimeError) as error:
        raise CorruptError(f"its index says what no checkpoint has: {error!r:.200}") from error
    check(index, files)
    return index


def check(index: Index, files: Mapping[str, int]) -> None:
    """Raise CorruptError for an item outside of its file, or a tensor whose items do not hold every
    element once.

    files: bytes by name.
    """
    for key, entry in index.items():
        whole, held = prod(entry.size), 0
        if entry.dtype is None and len(entry.parts) != 1:
            raise CorruptError(f"{key} has no place in any file")
        for part in entry.parts:
            end = part.at + part.nbytes
            if end > files[part.file]:
                raise CorruptError(
                    f"{key} lies at bytes {part.at} to {end} of {part.file}, which has "
                    f"{files[part.file]}"
                )
            if entry.dtype is None:
                continue
            if not len(part.offsets) == len(part.sizes) == len(entry.size):
                raise CorruptError(f"a part of {key} lies outside of it")
            for offset, count, size in zip(part.offsets, part.sizes, entry.size, strict=True):
                if offset < 0 or count < 0 or offset + count > size:
                    raise CorruptError(f"a part of {key} lies outside of it")
            numel = prod(part.sizes)
            held += numel
            if part.nbytes < numel * entry.dtype.itemsize:
                raise CorruptError(
                    f"{key} has {part.nbytes} bytes in {part.file}, fewer than its {numel} elements"
                    f" of {entry.dtype} take"
                )
            if part.nbytes > numel * entry.dtype.itemsize + _ITEM_ROOM:
                raise CorruptError(
                    f"{key} has {part.nbytes} bytes in {part.file}, far more than its {numel} "
                    f"elements of {entry.dtype} take"
                )
        if entry.dtype is not None and held != whole:
            raise CorruptError(f"{key} has {whole} elements, of which {held} were saved")
        if len(entry.parts) > 1 and not _holds_each_once(entry):
            raise CorruptError(f"parts of {key} overlap: some of its elements were saved twice")


def _holds_each_once(entry: SavedValue) -> bool:
    """Whether the parts of a tensor hold every element once, whatever their order and cuts.

    Each coordinate at which a part begins or ends gets a random number. A box then weighs the
    product, over its dimensions, of the difference between its two: parts that cover a tensor once
    weigh as much as the whole. Others do by chance alone, once in 2^55, in time linear in them.
    """
    marks = [defaultdict[int, int](lambda: secrets.randbelow(_PRIME)) for _ in entry.size]

    def weight(offsets: Sequence[int], sizes: Sequence[int]) -> int:
        found = 1
        for mark, offset, count in zip(marks, offsets, sizes, strict=True):
            found = found * (mark[offset + count] - mark[offset]) % _PRIME
        return found

    parts = sum(weight(part.offsets, part.sizes) for part in entry.parts)
    return parts % _PRIME == weight([0] * len(entry.size), entry.size)


def check_kind(key: str, saved: torch.dtype, wanted: torch.dtype) -> None:
    """Raise CorruptError for flags or complex numbers in the place of numbers."""
    alike = (saved == torch.bool) == (
        wanted == torch.bool
    ) and saved.is_complex == wanted.is_complex
    if not alike:
        raise CorruptError(f"{key} cannot be read: it is of {saved}, expected {wanted}")


def own_index(folder: Path, manifest: Manifest | None) -> Index | None:
    """Index in the manifest of a folder. Raises CorruptError.

    None for a folder of an older version or of another program, or if `.metadata` was replaced.
    """
    own = None if manifest is None else manifest.index
    if manifest is None or own is None or own.get("metadata") != manifest.metadata_crc32:
        return None
    try:
        return decode_index(own.get("tensors"), manifest.sizes)
    except CorruptError as error:
        raise CorruptError(f"{folder / NAME}: {error}") from error


def metadata_of(folder: Path, manifest: Manifest | None) -> bytes:
    """Content of `.metadata`, a pickle. Raises CorruptError if it does not match the manifest."""
    path = folder / METADATA
    data = read_file(path, most_bytes(folder_bytes(folder), ROOM_BYTES, _METADATA_SHARE))
    if manifest is not None and (
        len(data) != manifest.metadata_nbytes or zlib.crc32(data) != manifest.metadata_crc32
    ):
        raise CorruptError(f"{path} is damaged: its checksum does not match")
    return data
