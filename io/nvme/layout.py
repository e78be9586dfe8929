"""Places of blocks in the files of a store, and the bytes of header and index. Pure.

A file of format version 1, all offsets and lengths multiples of PAGE_BYTES:

    header | index slot 0 | index slot 1 | block 0 version 0 | block 0 version 1 | block 1 ...

The header says what the file is and never changes. The index says which version of each block is
the committed one; it is written alternately into its two slots with a growing sequence number, so
that a torn write leaves the slot before it. Only file 0 of a striped store has a live index: one
write commits the whole store.

The checksum of a block is a crc32 of those of its pieces, each computed while it is in cache: by
isal where it is installed (some 25 GB/s a core), else by zlib (3 to 6): the same numbers. Both
release the interpreter lock.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from gemini.units import NUM_VERSIONS as NUM_VERSIONS
from gemini.units import PAGE_BYTES, align_up

try:
    from isal.isal_zlib import crc32 as crc32
except ImportError:
    from zlib import crc32 as crc32

FORMAT_VERSION = 1
MAGIC = b"GEMINIBS"
MOST_VERSIONS = 66  # of a block: what is written, what counts, and 64 that are kept
PIECE_BYTES = 4 << 20  # large transfers are split into pieces of this size

_HEADER = struct.Struct("<8sIII")  # magic, format version, length and crc32 of the JSON after it
_INDEX = struct.Struct("<QQII")  # sequence number, step, number of blocks, crc32 of what follows
_ENTRY = struct.Struct("<II")  # version, checksum


HEADER_LIMIT = 1 << 20  # bytes: blocks in runs take a few each
Runs = tuple[tuple[int, int], ...]  # (value, how many in a row)


class StoreFormatError(ValueError):
    """File that is not a store of this format."""


def checksum_of(data: bytes | memoryview) -> int:
    """Checksum of bytes in memory, as the engines compute it over pieces."""
    pieces = [data[i : i + PIECE_BYTES] for i in range(0, len(data), PIECE_BYTES)]
    return combine([crc32(piece) for piece in pieces])


def combine(checksums: Sequence[int]) -> int:
    """One crc32 for a transfer from those of its pieces."""
    if not any(checksums):
        return 0
    return zlib.crc32(struct.pack(f"<{len(checksums)}I", *checksums))


@dataclass(frozen=True, slots=True)
class IndexEntry:
    """Committed version of one block."""

    version: int
    checksum: int  # of the block's pieces, see `combine`; 0 where checksums are off


@dataclass(frozen=True, slots=True)
class Index:
    """Index of one commit: the version of every block."""

    sequence: int
    step: int  # the owner's step count, 0 before the first commit
    entries: tuple[IndexEntry, ...]

    def encode(self) -> bytes:
        """Bytes that `decode` reads."""
        body = b"".join([_ENTRY.pack(e.version, e.checksum) for e in self.entries])
        head = _INDEX.pack(self.sequence, self.step, len(self.entries), zlib.crc32(body))
        return head + body

    @classmethod
    def decode(cls, data: bytes, num_blocks: int, num_versions: int = NUM_VERSIONS) -> Index | None:
        """Index of a slot; None where it was never written, was cut, or its write was torn."""
        step = cls.step_in(data, num_blocks)
        if step is None:
            return None
        (sequence,) = struct.unpack_from("<Q", data)
        entries = tuple(
            IndexEntry(*_ENTRY.unpack_from(data, _INDEX.size + i * _ENTRY.size))
            for i in range(num_blocks)
        )
        if any(entry.version >= num_versions for entry in entries):
            return None
        return cls(sequence, step, entries)

    @staticmethod
    def step_in(data: bytes, num_blocks: int) -> int | None:
        """Step of a slot, or None as for `decode`; its entries take no memory."""
        if len(data) < _INDEX.size:
            return None
        sequence, step, count, crc = _INDEX.unpack_from(data)
        body = memoryview(data)[_INDEX.size : _INDEX.size + num_blocks * _ENTRY.size]
        whole = count == num_blocks and body.nbytes == num_blocks * _ENTRY.size
        return int(step) if sequence and whole and zlib.crc32(body) == crc else None


@dataclass(frozen=True, slots=True)
class Extent:
    """Place of one version of one block."""

    file: int
    offset: int  # bytes
    nbytes: int  # whole pages; the payload may end before


def joined(extents: Iterable[Extent]) -> list[tuple[int, int]]:
    """Runs of one file, (offset, bytes), that these extents make up, in order."""
    runs: list[tuple[int, int]] = []
    for extent in sorted(extents, key=lambda extent: extent.offset):
        if runs and sum(runs[-1]) == extent.offset:
            runs[-1] = runs[-1][0], runs[-1][1] + extent.nbytes
        else:
            runs.append((extent.offset, extent.nbytes))
    return runs


@dataclass(frozen=True, slots=True)
class StoreLayout:
    """Layout of a store: the extents of its blocks in its files.

    `digest` is whatever its owner uses to recognise its own layout.
    """

    digest: str
    block_nbytes: tuple[int, ...]  # payload of every block
    file_of_block: tuple[int, ...]
    num_files: int
    num_versions: int = NUM_VERSIONS  # 1: nothing is ever committed; more: versions are kept

    @classmethod
    def plan(
        cls,
        digest: str,
        block_nbytes: Sequence[int],
        weights: Sequence[float] = (1.0,),
        num_versions: int = NUM_VERSIONS,
    ) -> StoreLayout:
        """Stripe blocks over `len(weights)` files in proportion to their measured speed.

        Each block goes to the file whose share is furthest behind its weight, so neighbouring
        blocks land on different disks.

        Raises ValueError for a weight or a block that is not positive.
        """
        if not weights or any(not w > 0 for w in weights):
            raise ValueError(f"weights {list(weights)} must be positive, one for each directory")
        if any(n <= 0 for n in block_nbytes):
            raise ValueError("a block must hold at least one byte")
        filled = [0.0] * len(weights)
        file_of_block: list[int] = []
        for nbytes in block_nbytes:
            file = min(range(len(weights)), key=lambda i: ((filled[i] + nbytes) / weights[i], i))
            filled[file] += nbytes
            file_of_block.append(file)
        return cls(digest, tuple(block_nbytes), tuple(file_of_block), len(weights), num_versions)

    @property
    def num_blocks(self) -> int:
        """Number of blocks over all files."""
        return len(self.block_nbytes)

    @property
    def index_slot_nbytes(self) -> int:
        """Bytes of one of the two slots of the index, whole pages."""
        return align_up(_INDEX.size + self.num_blocks * _ENTRY.size, PAGE_BYTES)

    def header(self, file: int) -> bytes:
        """Header of one file, whole pages."""
        fields: dict[str, object] = {
            "digest": self.digest,
            "file": file,
            "num_files": self.num_files,
            "block_nbytes": _run_lengths(self.block_nbytes),
            "file_of_block": _run_lengths(self.file_of_block),
        }
        if self.num_versions != NUM_VERSIONS:
            fields["num_versions"] = self.num_versions
        text = json.dumps(fields, separators=(",", ":")).encode()
        data = _HEADER.pack(MAGIC, FORMAT_VERSION, len(text), zlib.crc32(text)) + text
        return data.ljust(align_up(len(data), PAGE_BYTES), b"\0")

    def header_nbytes(self, file: int) -> int:
        """Bytes of the header of one file, whole pages."""
        return len(self.header(file))

    def index_offset(self, slot: int) -> int:
        """Byte in the first file where a slot of the index begins."""
        return self.header_nbytes(0) + slot * self.index_slot_nbytes

    def blocks_offset(self, file: int) -> int:
        """Byte of a file where its blocks begin, behind header and index."""
        return self.header_nbytes(file) + NUM_VERSIONS * self.index_slot_nbytes

    def extents(self) -> tuple[tuple[Extent, ...], ...]:
        """Extents of the versions of every block; twice the same where it has one."""
        ends = [self.blocks_offset(f) for f in range(self.num_files)]
        table: list[tuple[Extent, ...]] = []
        for payload, file in zip(self.block_nbytes, self.file_of_block, strict=True):
            nbytes = align_up(payload, PAGE_BYTES)
            table.append(
                tuple(
                    Extent(file, ends[file] + v % self.num_versions * nbytes, nbytes)
                    for v in range(max(NUM_VERSIONS, self.num_versions))
                )
            )
            ends[file] += self.num_versions * nbytes
        return tuple(table)

    def file_nbytes(self) -> tuple[int, ...]:
        """Length of every file."""
        ends = [self.blocks_offset(f) for f in range(self.num_files)]
        for payload, file in zip(self.block_nbytes, self.file_of_block, strict=True):
            ends[file] += self.num_versions * align_up(payload, PAGE_BYTES)
        return tuple(ends)


@dataclass(frozen=True, slots=True)
class Header:
    """Header of one file, as it stands there: no memory for its blocks is taken before `check_size`
    has found them in the file.

    Files come from anywhere, so every field is checked: `decode` and `layout` raise
    StoreFormatError.
    """

    file: int
    num_files: int
    digest: str
    block_nbytes: Runs
    file_of_block: Runs
    num_versions: int
    nbytes: int  # of the header, whole pages

    @classmethod
    def decode(cls, data: bytes) -> Header:
        """data: the first HEADER_LIMIT bytes of a file, or all that it has."""
        if len(data) < _HEADER.size or data[:8] != MAGIC:
            raise StoreFormatError(
                f"no block store: it begins with {data[:8]!r}, expected {MAGIC!r}"
            )
        _, version, length, crc = _HEADER.unpack_from(data)
        if version != FORMAT_VERSION:
            raise StoreFormatError(f"format version {version}; this code reads {FORMAT_VERSION}")
        text = data[_HEADER.size : _HEADER.size + length]
        if len(text) != length or zlib.crc32(text) != crc:
            raise StoreFormatError("the header is damaged: its checksum does not match")
        try:
            fields = json.loads(text)
            header = cls(
                _whole(fields["file"], 0, 1 << 16),
                _whole(fields["num_files"], 1, 1 << 16),
                _text(fields["digest"]),
                _runs(fields["block_nbytes"], 1, 1 << 62),
                _runs(fields["file_of_block"], 0, fields["num_files"] - 1),
                _whole(fields.get("num_versions", NUM_VERSIONS), 1, MOST_VERSIONS),
                align_up(_HEADER.size + length, PAGE_BYTES),
            )
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise StoreFormatError(f"the header says what no store has: {error!r}") from error
        if header.num_blocks != sum(count for _, count in header.file_of_block):
            raise StoreFormatError("the header says what no store has: blocks without a file")
        return header

    @property
    def num_blocks(self) -> int:
        """Number of blocks over all files."""
        return sum(count for _, count in self.block_nbytes)

    @property
    def index_slot_nbytes(self) -> int:
        """Bytes of a slot, as `StoreLayout.index_slot_nbytes`."""
        return align_up(_INDEX.size + self.num_blocks * _ENTRY.size, PAGE_BYTES)

    def index_offset(self, slot: int) -> int:
        """Byte in this file where a slot of the index begins; live in the first file."""
        return self.nbytes + slot * self.index_slot_nbytes

    def check_size(self, nbytes: int) -> None:
        """Raise StoreFormatError where a file of `nbytes` does not hold what its header says."""
        # A header of a few bytes may say 2^62 blocks. Runs are added up without a list of them, and
        # only a file that is as long as its header says has its blocks expanded.
        needed = self.index_offset(NUM_VERSIONS)
        for payload, file, count in _together(self.block_nbytes, self.file_of_block):
            if file == self.file:
                needed += count * self.num_versions * align_up(payload, PAGE_BYTES)
        if nbytes < needed:
            raise StoreFormatError(f"it was cut: {nbytes} bytes of {needed}")

    def layout(self) -> StoreLayout:
        """Layout with one entry for every block: only after `check_size` of all files."""
        layout = StoreLayout(
            self.digest,
            _expand(self.block_nbytes),
            _expand(self.file_of_block),
            self.num_files,
            self.num_versions,
        )
        if layout.header_nbytes(self.file) != self.nbytes:
            raise StoreFormatError(
                "the header says what no store has: it was written by another hand"
            )
        return layout


def _whole(value: object, least: int, most: int) -> int:
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{value!r:.40} is no number from {least} to {most}")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r:.40} is no digest")
    return value


def _runs(value: object, least: int, most: int) -> Runs:
    if not isinstance(value, list):
        raise ValueError(f"{value!r:.40} is no list of runs")
    return tuple((_whole(v, least, most), _whole(count, 1, 1 << 62)) for v, count in value)


def _together(one: Runs, other: Runs) -> Iterator[tuple[int, int, int]]:
    """(value of one, value of the other, how many) of two columns in runs."""
    others = iter(other)
    second, left = next(others, (0, 0))
    for value, count in one:
        while count:
            if not left:
                second, left = next(others)
            both = min(count, left)
            yield value, second, both
            count, left = count - both, left - both


def _run_lengths(values: Iterable[int]) -> list[list[int]]:
    return [[value, len(list(run))] for value, run in groupby(values)]


def _expand(runs: Runs) -> tuple[int, ...]:
    return tuple(value for value, count in runs for _ in range(count))
