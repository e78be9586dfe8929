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

from .errors import CorruptError, FormatError

FORMAT_VERSION = 1
NAME = "manifest.json"
METADATA = ".metadata"  # of torch.distributed.checkpoint


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
class Manifest:
    """What a checkpoint consists of."""

    world_size: int
    sequence: int  # grows with every checkpoint of a folder
    metadata_nbytes: int
    metadata_crc32: int
    files: tuple[DataFile, ...] = ()
    about: dict[str, Any] = field(default_factory=dict)  # for people: versions, time

    @property
    def nbytes(self) -> int:
        return sum(file.nbytes for file in self.files) + self.metadata_nbytes

    @property
    def digest(self) -> str:
        """A name for the content of all files."""
        units = [(f.name, [u.checksum for u in f.units]) for f in self.files]
        return hashlib.sha256(repr((self.metadata_crc32, units)).encode()).hexdigest()[:16]

    def encode(self) -> bytes:
        body = {
            "format": FORMAT_VERSION,
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
        text = json.dumps(body, separators=(",", ":")).encode()
        return text + b"\n" + f"crc32 {zlib.crc32(text):08x}\n".encode()

    @classmethod
    def decode(cls, data: bytes, path: str) -> Manifest:
        """Raises FormatError for another version, CorruptError where its checksum is wrong."""
        text, _, rest = data.partition(b"\n")
        if rest != f"crc32 {zlib.crc32(text):08x}\n".encode():
            raise CorruptError(f"{path} is damaged: its checksum does not match")
        body = json.loads(text)
        version = body.get("format")
        if version != FORMAT_VERSION:
            raise FormatError(
                f"{path} is of checkpoint format {version!r}, this code reads {FORMAT_VERSION}; "
                "load it with the version that wrote it"
            )
        return cls(
            world_size=body["world_size"],
            sequence=body["sequence"],
            metadata_nbytes=body["metadata"][0],
            metadata_crc32=body["metadata"][1],
            files=tuple(
                DataFile(name, one["nbytes"], tuple(Unit(*unit) for unit in one["units"]))
                for name, one in body["files"].items()
            ),
            about=body["about"],
        )
