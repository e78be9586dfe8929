"""Version of state: the blocks of one commit, as a pinned checkpoint names them for any process.

They are shown as one stream of bytes: block after block, plane after plane, with whole masters and
in what updates are computed in. So an index of a checkpoint points into a file that nobody wrote.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from dataclasses import asdict, dataclass, field
from itertools import accumulate, groupby
from pathlib import Path

from torch import Tensor

from gemini.nvme import (
    BufferPool,
    ChecksumError,
    Index,
    Recovered,
    StoreFormatError,
    ThreadEngine,
    Transfer,
    open_direct,
)
from gemini.optim.rules.state_layout import (
    ALL_COLUMNS,
    KIND_OF,
    Columns,
    Plane,
    StateLayout,
)
from gemini.optim.state.pieces import Planes
from gemini.optim.state.space import Block, BlockSegment
from gemini.units import PARAM_ALIGN_NUMEL, BlockId

from .records import FilePart, Records

_TEXT_BYTES = 1 << 16  # of names and planes, at most
_LOGICAL_DTYPES = ("float32", "float64")  # of logical planes
_KIND_IN_FILES = {kind.in_files or name: name for name, kind in KIND_OF.items()}


@dataclass(frozen=True, slots=True)
class StateVersion:
    """Blocks of a store at one commit, and their layout.

    Raises ValueError for values that no state has.
    """

    paths: tuple[str, ...]  # of the store's files, in order
    index: Index
    layout: StateLayout  # the logical one
    blocks: tuple[tuple[int, bool], ...]  # of each: elements, and whether its masters are split
    has_undo: bool  # see `Records`
    columns: Columns = ALL_COLUMNS  # which planes a block has, by its position
    starts: tuple[int, ...] = field(init=False, compare=False)  # bytes; of each block, and the end

    def __post_init__(self) -> None:
        kinds = {plane.dtype for plane in self.layout.planes} - set(_LOGICAL_DTYPES)
        wrong = [numel for numel, _ in self.blocks if numel < 1 or numel % PARAM_ALIGN_NUMEL]
        if kinds or wrong or not self.blocks or len(self.blocks) > len(self.index.entries):
            raise ValueError(f"planes of {sorted(kinds)}, blocks of {wrong[:3]} elements")
        pairs = enumerate(self.blocks)
        sizes = (self.layout_of(i).block_nbytes(numel) for i, (numel, _) in pairs)
        object.__setattr__(self, "starts", tuple(accumulate(sizes, initial=0)))

    @property
    def nbytes(self) -> int:
        """Bytes of the stream."""
        return self.starts[-1]

    def layout_of(self, i: int) -> StateLayout:
        """Layout of the logical planes of a block."""
        return self.columns.of({i}, self.layout)

    def records(self) -> Records:
        """Records of the blocks, by position."""
        split = {BlockId(i) for i, (_, is_split) in enumerate(self.blocks) if is_split}
        return Records(
            self.all_blocks(), self.layout, split, undo=self.has_undo, columns=self.columns
        )

    def all_blocks(self) -> list[Block]:
        """Blocks in order, each as that of a parameter of its own."""
        return [self.block(i) for i in range(len(self.blocks))]

    def block(self, i: int) -> Block:
        """Block i as that of a parameter of its own."""
        numel = self.blocks[i][0]
        return Block(BlockId(i), 0, 0, 0, numel, (BlockSegment(i, 0, numel, 0),))

    def block_at(self, at: int) -> int:
        """Block that has byte `at` of the stream. Raises ValueError if none has."""
        i = bisect_right(self.starts, at) - 1
        if not 0 <= i < len(self.blocks):
            raise ValueError(f"byte {at} of {self.nbytes}")
        return i

    def place(self, i: int, plane: str, element: int) -> int:
        """Byte of an element that block i has of a plane."""
        layout, numel = self.layout_of(i), self.blocks[i][0]
        which = layout.names.index(plane)
        first = self.starts[i] + layout.offsets(numel)[which]
        return first + element * layout.planes[which].itemsize

    def encode(self) -> bytes:
        """Bytes of the version: a line of JSON, and the index as a store writes it."""
        said = {
            "paths": self.paths,
            "kind": KIND_OF[self.layout.kind].in_files or self.layout.kind,
            "planes": [asdict(plane) for plane in self.layout.planes],
            "blocks": [[*block, len(list(run))] for block, run in groupby(self.blocks)],
            "columns": [
                [None if names is None else sorted(names), len(list(run))]
                for names, run in groupby(self.columns.of_param)
            ],
            "has_undo": self.has_undo,
        }
        return json.dumps(said, separators=(",", ":")).encode() + b"\n" + self.index.encode()

    @classmethod
    def decode(cls, data: bytes) -> StateVersion:
        """Version of bytes of `encode`. Raises ValueError for others."""
        text, _, rest = data.partition(b"\n")
        if len(text) > _TEXT_BYTES + 4 * len(rest):  # a run takes some 20, and an entry 8
            raise ValueError("it says more than there are blocks")
        try:
            said = json.loads(text)
            runs = [(int(n), bool(is_split), int(count)) for n, is_split, count in said["blocks"]]
            planes = tuple(Plane(**plane) for plane in said["planes"])
            paths = tuple(map(str, said["paths"]))
            kept = [
                (None if names is None else frozenset(map(str, names)), int(count))
                for names, count in said.get("columns", ())
            ]
            has_undo = bool(said["has_undo"])
            layout = StateLayout(planes, _KIND_IN_FILES[said["kind"]])
        except (KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"no state: {error!r:.200}") from error
        # Runs are small in text and large as lists: nothing is made of them before their counts are
        # known to fit the bytes of the index, of which an entry has more than one.
        most = len(rest)
        if min((count for *_, count in runs), default=0) < 1 or sum(c for *_, c in runs) > most:
            raise ValueError("more blocks than it has places for")
        blocks = tuple((n, is_split) for n, is_split, count in runs for _ in range(count))
        if min((n for _, n in kept), default=1) < 1 or sum(n for _, n in kept) not in (
            0,
            len(blocks),
        ):
            raise ValueError("it has planes of other blocks")
        columns = Columns(tuple(names for names, count in kept for _ in range(count)))
        num_entries = len(blocks) + sum(is_split or has_undo for _, is_split in blocks)
        index = Index.decode(rest, num_entries, 1 << 16)
        if index is None:
            raise ValueError("its index is not whole")
        return cls(paths, index, layout, blocks, has_undo, columns)


class VersionReader:
    """Reader of the values of a version from its files, directly; one block is in memory."""

    def __init__(self, version: StateVersion, files: Recovered) -> None:
        """Raises StoreFormatError where files have other blocks, OSError where they cannot be
        opened."""
        self._version, self._files, self._records = version, files, version.records()
        if tuple(self._records.nbytes) != files.layout.block_nbytes:
            raise StoreFormatError(f"{version.paths[0]} has other blocks than are pinned in it")
        # not through the page cache: a load may write to other extents of the same file meanwhile
        self._open = [open_direct(Path(path)) for path in version.paths]
        self._engine = ThreadEngine()
        self._buffer = BufferPool(1, self._records.buffer_nbytes(version.all_blocks())).take()
        self._logical: tuple[int, Planes] | None = None

    def close(self) -> None:
        """Close the files: no block is read any more."""
        self._engine.close()
        for file in self._open:
            file.close()

    def block(self, i: int) -> Planes:
        """Logical planes of block i; good until the next call. Raises NvmeError."""
        if self._logical is None or self._logical[0] != i:
            record = self._records[self._version.block(i)]
            self._logical = None
            tickets = [self._engine.read(self._transfer(part)) for part in record.committed]
            for part, ticket in zip(record.committed, tickets, strict=True):
                if ticket.wait() != self._files.index.entries[part.block].checksum:
                    raise ChecksumError(f"block {part.block} of a recovered store does not verify")
            self._logical = i, record.logical_planes(self._buffer)
        return self._logical[1]

    def _transfer(self, part: FilePart) -> Transfer:
        extent = self._files.extent(part.block)
        view = self._buffer.view[part.start : part.start + extent.nbytes]
        return Transfer(self._open[extent.file], extent.offset, view, True)

    def read(self, at: int, numel: int) -> Tensor:
        """[numel] of one plane of one block; good until the next call. Raises ValueError for bytes
        that are not all of one plane."""
        version = self._version
        i = version.block_at(at)
        layout = version.layout_of(i)
        offsets = layout.offsets(version.blocks[i][0])
        which = bisect_right(offsets, at - version.starts[i]) - 1
        plane = layout.planes[which]
        first, rest = divmod(at - version.starts[i] - offsets[which], plane.itemsize)
        if rest or first + numel > version.blocks[i][0]:
            raise ValueError(f"{numel} elements at byte {at} are not of one plane")
        return self.block(i)[plane.name][first : first + numel]
