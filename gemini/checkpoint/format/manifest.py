"""`manifest.json`: what a checkpoint's files are and which checksums they have. Pure.

Two lines: a JSON object, and the crc32 of its bytes. A data file is a sequence of units, each
written by one transfer and read whole, so that whatever is read is verified.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from bisect import bisect_right
from dataclasses import dataclass, field
from typing import Any

from gemini.units import PAGE_BYTES

from .errors import CorruptError, FormatError

FORMAT_VERSION = 1
PINNED_VERSION = 2  # of a checkpoint that is pinned to state in other files
NAME = "manifest.json"
METADATA = ".metadata"  # of torch.distributed.checkpoint
JSON_BYTES = 1 << 20  # a manifest or an index is no larger, but for
JSON_SHARE = 4096  # one byte in so many of the data that it describes
MAX_UNIT_BYTES = 16 << 20  # of a file that any version wrote: what reads takes memory for a few


@dataclass(frozen=True, slots=True)
class Unit:
    """Bytes of a data file that were written, and are read, together."""

    offset: int  # a multiple of the page size
    nbytes: int  # whole pages
    checksum: int  # as nvme's engines make it


@dataclass(frozen=True, slots=True)
class DataFile:
    """One file that a rank wrote."""

    name: str
    nbytes: int
    units: tuple[Unit, ...]  # in order, without gaps

    def units_of(self, offset: int, nbytes: int) -> range:
        """Indices of the units that hold these bytes."""
        first = bisect_right(self.units, offset, key=lambda unit: unit.offset) - 1
        last = bisect_right(self.units, offset + nbytes - 1, key=lambda unit: unit.offset)
        return range(first, max(first, last))


@dataclass(frozen=True, slots=True)
class PinnedFile:
    """A small file that says where one rank's state is pinned; see `pinned_file.py`."""

    name: str
    nbytes: int  # of the state, as one stream
    file_nbytes: int
    crc32: int  # of the small file


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a checkpoint consists of."""

    world_size: int
    sequence: int  # grows with every checkpoint of a folder
    metadata_nbytes: int
    metadata_crc32: int
    files: tuple[DataFile, ...] = ()
    about: dict[str, Any] = field(default_factory=dict)  # for people: versions, time
    # "metadata": crc32 of the `.metadata` that says the same; "tensors": see `encode_index`
    index: dict[str, Any] | None = None
    pinned: tuple[PinnedFile, ...] = ()

    @property
    def nbytes(self) -> int:
        """Of the folder's files."""
        pinned = sum(file.file_nbytes for file in self.pinned)
        return sum(file.nbytes for file in self.files) + self.metadata_nbytes + pinned

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes that an index may point into, by file."""
        pinned = {file.name: file.nbytes for file in self.pinned}
        return {file.name: file.nbytes for file in self.files} | pinned

    @property
    def digest(self) -> str:
        """A name for the content of all files."""
        units = [(f.name, [u.checksum for u in f.units]) for f in self.files]
        units += [(f.name, [f.crc32]) for f in self.pinned]
        return hashlib.sha256(repr((self.metadata_crc32, units)).encode()).hexdigest()[:16]

    def encode(self) -> bytes:
        """Without the index where a reader would find the manifest too large for its files."""
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
            if len(data) <= JSON_BYTES + self.nbytes // JSON_SHARE:
                break
        return data

    @classmethod
    def decode(cls, data: bytes, path: str) -> Manifest:
        """Raises FormatError for another version, CorruptError where its checksum or what it says
        is wrong."""
        text, _, rest = data.partition(b"\n")
        if rest != f"crc32 {zlib.crc32(text):08x}\n".encode():
            raise CorruptError(f"{path} is damaged: its checksum does not match")
        try:
            body = json.loads(text)
        except (ValueError, RecursionError) as error:
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
    """Whether this is the name of a file of a folder, and of nothing outside of it."""
    return isinstance(name, str) and name not in ("", ".", "..") and not set("/\\\0") & set(name)


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
    """Units follow each other from the beginning to the end, none larger than is ever written."""
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
