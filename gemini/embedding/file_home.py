"""Home of records in one file: cells in place, and a journal of the steps since they were whole.

    header | mark slot 0 | mark slot 1 | cell 0 | cell 1 ... | journal

A cell is whole pages: some records and a crc32. The header never changes. A mark (sequence,
epoch, step) is written alternately into its slots. A step is one entry of the journal, the records
of its rows packed: its bytes are in proportion to the rows it touched, not to their pages.

[Note: redo] Cells are written in place, after the step that made their values is confirmed. A
write that is torn by a kill or a power failure leaves the old or the new bytes of each sector, and
differs from the old cell in rows of the journal alone: whoever recovers writes those again.
`rebase` begins a new epoch, which makes the entries void, once all changed rows are in their cells
and synced.

[Note: one step apart] Ranks prepare a step, vote, and confirm it. No rank begins the next before
all have confirmed it, and cells are written and epochs begun only after that. So files of ranks
that were killed are at most one step apart, and each can be opened at the least of their steps.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import struct
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gemini.nvme.engines import Transfer
from gemini.nvme.engines.threads import ThreadEngine
from gemini.nvme.errors import ChecksumError, check_process
from gemini.nvme.files import calls
from gemini.nvme.files.file import OpenFile, check_folder, create_direct
from gemini.nvme.layout import StoreFormatError
from gemini.nvme.pipeline import read_ahead
from gemini.nvme.pool import Buffer, BufferPool
from gemini.strangers import open_regular, parsed
from gemini.units import PAGE_BYTES, align_up

from .homes import RowTraffic

FORMAT = 1
SUFFIX = ".rows"
_MAGIC, _ENTRY_MAGIC = b"GEMROWS1", b"GEMSTEP1"
_HEADER = struct.Struct("<8sII")  # magic, length and crc32 of the JSON that follows
_MARK = struct.Struct("<QQQI")  # sequence, epoch, step, crc32 of these
_ENTRY = struct.Struct("<8sQQQQII")  # magic, epoch, number, step, rows, crc32 of rows and of this
_CRC_BYTES = 4
_NO_EPOCH = 0  # of a file whose cells are being filled; else the sequence number of its mark
_BUFFERS = 32
_JOURNAL_STEPS = 4  # of the largest kind, before cells are written


@dataclass(frozen=True, slots=True)
class RowLayout:
    """Places in the file. Pure."""

    num_rows: int
    width: int  # fp32 elements of a record
    most_rows: int  # of one step
    what: str  # of whom the records are: only the same may open them

    @property
    def record_bytes(self) -> int:
        return 4 * self.width

    @property
    def cell_bytes(self) -> int:
        """Bytes of a cell, whole pages."""
        return align_up(self.record_bytes + _CRC_BYTES, PAGE_BYTES)

    @property
    def rows_per_cell(self) -> int:
        return (self.cell_bytes - _CRC_BYTES) // self.record_bytes

    @property
    def num_cells(self) -> int:
        return -(-self.num_rows // self.rows_per_cell)

    @property
    def journal_offset(self) -> int:
        return 3 * PAGE_BYTES + self.num_cells * self.cell_bytes

    @property
    def file_bytes(self) -> int:
        return self.journal_offset + _JOURNAL_STEPS * self.entry_bytes(self.most_rows)

    def cell_offset(self, cell: int) -> int:
        return 3 * PAGE_BYTES + cell * self.cell_bytes

    def entry_bytes(self, count: int) -> int:
        """Bytes of a step of `count` rows in the journal, whole pages."""
        return align_up(_ENTRY.size + count * (8 + self.record_bytes), PAGE_BYTES)

    def header(self) -> bytes:
        fields = {"format": FORMAT, "num_rows": self.num_rows, "width": self.width}
        text = json.dumps({**fields, "most_rows": self.most_rows, "what": self.what}).encode()
        return _HEADER.pack(_MAGIC, len(text), zlib.crc32(text)) + text


class FileHome:
    """Home in a file of `path`, locked by this process. See `RowHome`."""

    def __init__(self, path: Path, layout: RowLayout, *, opens: bool) -> None:
        """opens: take the file as an ended process left it, not yet at a step (`recover`); else
        make it, in place of one that holds no step.

        Raises StoreFormatError for a file that is not this table's, FolderError, DiskFullError, and
        ValueError for a file that is open elsewhere or, unless `opens`, holds a step.
        """
        check_folder(path.parent)
        self.layout, self.path = layout, path
        self.traffic = RowTraffic()
        self._pid = os.getpid()
        self._sequence, self._epoch, self.step = 0, _NO_EPOCH, 0
        self._at = self._number = 0  # of the next entry: its place in the journal, its number
        self._prepared: tuple[int, int] | None = None  # step, bytes
        self._pool = BufferPool(_BUFFERS, layout.cell_bytes)
        self._engine = ThreadEngine()
        try:
            self._file = self._open() if opens else self._create()
        except BaseException:
            self._engine.close()
            raise

    # -- opening --

    def _create(self) -> OpenFile:
        if os.path.lexists(self.path):
            left = self._open_left()
            try:
                held = self._last_mark(left)
            except StoreFormatError:
                held = None
            if held is not None and held[1] != _NO_EPOCH:
                left.close()
                raise ValueError(
                    f"{self.path} holds rows of a run that ended; expected recover=True to go on "
                    "with it, another nvme_dir or name, or the file to be removed"
                )
            left.unlink()
            left.close()
        file = create_direct(self.path)
        try:
            calls.lock(file.fd, calls.LOCK_EX | calls.LOCK_NB)
            file.reserve([(0, self.layout.file_bytes)])
            file.write_pages(PAGE_BYTES, bytes(2 * PAGE_BYTES))
            file.write_pages(0, self.layout.header())
            file.sync()
            file.sync_name()
        except BaseException:
            file.unlink()
            file.close()
            raise
        return file

    def _open_left(self) -> OpenFile:
        """File of this path, with its lock."""
        try:
            try:
                file = OpenFile(
                    self.path, open_regular(self.path, os.O_RDWR | calls.O_DIRECT), True
                )
            except OSError as error:
                if error.errno != errno.EINVAL:  # where direct I/O is refused
                    raise
                file = OpenFile(self.path, open_regular(self.path, os.O_RDWR), False)
        except OSError as error:
            raise StoreFormatError(f"{self.path} cannot be opened: {error}") from error
        try:
            calls.lock(file.fd, calls.LOCK_EX | calls.LOCK_NB)
        except OSError as error:
            file.close()
            raise ValueError(
                f"{self.path} is open in another process or table; expected another nvme_dir or "
                "name for this one"
            ) from error
        return file

    def _open(self) -> OpenFile:
        file = self._open_left()
        try:
            data = self._pages(file, 0, PAGE_BYTES)
            self._check_header(data, os.fstat(file.fd).st_size)
            mark = self._last_mark(file)
            if mark is None or mark[1] == _NO_EPOCH:
                raise StoreFormatError(
                    f"{self.path} holds no step: its rows were not all written when its process "
                    "ended; make or load the table again without recover=True"
                )
            self._sequence, self._epoch, self.step = mark
        except BaseException:
            file.close()
            raise
        return file

    def _check_header(self, data: bytes, nbytes: int) -> None:
        """Raise StoreFormatError unless the file is of this layout, which a stranger may have
        written: nothing is believed but what equals it."""
        layout = self.layout
        magic, length, crc = _HEADER.unpack_from(data)
        text = data[_HEADER.size : _HEADER.size + length]
        if magic != _MAGIC or len(text) != length or zlib.crc32(text) != crc:
            raise StoreFormatError(f"{self.path}: the header is damaged, or of no file of rows")
        try:
            found: Any = parsed(text)
            expected = parsed(layout.header()[_HEADER.size :])
        except ValueError as error:
            raise StoreFormatError(f"{self.path}: its header cannot be read: {error}") from error
        if found != expected:
            raise StoreFormatError(
                f"{self.path} is of another table: it says {found!r:.300}, expected {expected}"
            )
        if nbytes < layout.file_bytes:
            raise StoreFormatError(f"{self.path} was cut: {nbytes} bytes of {layout.file_bytes}")

    def _last_mark(self, file: OpenFile) -> tuple[int, int, int] | None:
        found = []
        for slot in (1, 2):
            data = self._pages(file, slot * PAGE_BYTES, PAGE_BYTES)
            *values, crc = _MARK.unpack_from(data)
            if values[0] and zlib.crc32(data[: _MARK.size - 4]) == crc:
                found.append((values[0], values[1], values[2]))
        return max(found, default=None)

    def _pages(self, file: OpenFile, offset: int, nbytes: int) -> bytes:
        if os.fstat(file.fd).st_size < offset + nbytes:
            raise StoreFormatError(f"{self.path} was cut")
        with mmap.mmap(-1, nbytes) as pages, memoryview(pages) as view:
            file.move("read", view, offset)
            return bytes(view)

    def _set_mark(self, *, holds: bool) -> None:
        """Write and sync a mark in the slot that is not the last one's; entries before it are void.

        holds: whether the cells are those of `step`.
        """
        epoch = self._sequence + 1 if holds else _NO_EPOCH
        head = struct.pack("<QQQ", self._sequence + 1, epoch, self.step)
        data = head + struct.pack("<I", zlib.crc32(head))
        self._file.write_pages((1 + (self._sequence + 1) % 2) * PAGE_BYTES, data)
        self._file.sync()
        self._sequence, self._epoch = self._sequence + 1, epoch
        self._at = self._number = 0

    # -- recovery --

    @property
    def last_step(self) -> int:
        """Step of the last entry, in an opened file; that of the cells if there is none."""
        steps = [step for step, _, _ in self._entries()]
        return steps[-1] if steps else self.step

    def recover(self, step: int) -> None:
        """Bring the cells to `step`, the last one of all ranks' files, and begin with it."""
        changed: dict[int, Tensor] = {}
        entries = [entry[0] for entry in self._entries()]
        count = max((i + 1 for i, at in enumerate(entries) if at == step), default=0)
        if not count and step != self.step:
            raise StoreFormatError(
                f"{self.path} does not hold step {step} of the other ranks' files; expected files "
                "of one run"
            )
        for i, (_, rows, records) in enumerate(self._entries()):
            if i < count:
                changed.update(zip(rows.tolist(), records, strict=True))
        rows = torch.tensor(sorted(changed), dtype=torch.int64)
        if len(rows):
            records = torch.stack([changed[row] for row in rows.tolist()])
            self._write(rows, records, verifies=False)
        self.step = step
        self.rebase()
        self.traffic = RowTraffic()

    def _entries(self) -> Iterator[tuple[int, Tensor, Tensor]]:
        """(step, rows, records) of every whole entry of this epoch, in order."""
        at, number, layout = 0, 0, self.layout
        while layout.journal_offset + at + PAGE_BYTES <= layout.file_bytes:
            head = self._pages(self._file, layout.journal_offset + at, PAGE_BYTES)[: _ENTRY.size]
            magic, epoch, found, step, count, crc, own = _ENTRY.unpack(head)
            is_next = (magic, epoch, found) == (_ENTRY_MAGIC, self._epoch, number)
            nbytes = layout.entry_bytes(count) if count <= layout.most_rows else 1 << 62
            if not is_next or zlib.crc32(head[:-4]) != own:
                return
            if layout.journal_offset + at + nbytes > layout.file_bytes:
                return
            data = self._pages(self._file, layout.journal_offset + at, nbytes)[_ENTRY.size :]
            body = data[: count * (8 + layout.record_bytes)]
            if zlib.crc32(body) != crc:
                return
            rows = torch.frombuffer(bytearray(body[: 8 * count]), dtype=torch.int64)
            records = torch.frombuffer(bytearray(body[8 * count :]), dtype=torch.float32)
            if bool(((rows < 0) | (rows >= layout.num_rows)).any()):
                raise StoreFormatError(f"{self.path}: its journal names rows that it does not have")
            yield step, rows, records.view(count, layout.width)
            at, number = at + nbytes, number + 1

    # -- cells --

    def fill(self, parts: Iterable[Tensor], step: int) -> None:
        self._check()
        self._set_mark(holds=False)
        layout, left, cell = self.layout, torch.empty(0, self.layout.width), 0
        for part in parts:
            left = torch.cat([left, part])
            whole = len(left) // layout.rows_per_cell * layout.rows_per_cell
            for start in range(0, whole, layout.rows_per_cell):
                self._put(cell, left[start : start + layout.rows_per_cell])
                cell += 1
            left = left[whole:]
        if len(left):
            self._put(cell, left)
            cell += 1
        assert cell == layout.num_cells
        self.traffic.planned_written += cell * layout.cell_bytes
        self.step = step
        self.rebase()

    def _put(self, cell: int, records: Tensor) -> None:
        buffer = self._pool.take()
        try:
            self._values(buffer).view(-1)[: records.numel()] = records.reshape(-1)
            self._write_cell(cell, buffer)
        finally:
            self._pool.give(buffer)

    def _values(self, buffer: Buffer) -> Tensor:
        """Records of a cell, [rows_per_cell, width], in its buffer."""
        count = self.layout.rows_per_cell * self.layout.width
        values = torch.frombuffer(buffer.view, dtype=torch.float32, count=count)
        return values.view(self.layout.rows_per_cell, self.layout.width)

    def _write_cell(self, cell: int, buffer: Buffer) -> None:
        view = buffer.view[: self.layout.cell_bytes]
        view[-_CRC_BYTES:] = struct.pack("<I", zlib.crc32(view[:-_CRC_BYTES]))
        offset = self.layout.cell_offset(cell)
        self._engine.write(Transfer(self._file, offset, view, False)).wait()
        self.traffic.written += view.nbytes

    def _cells(self, rows: Tensor, verifies: bool) -> Iterator[tuple[int, Buffer, Tensor]]:
        """(cell, its buffer, places of its rows in `rows`) of every cell that `rows` lie in."""
        layout = self.layout
        cells, where = torch.unique(rows // layout.rows_per_cell, return_inverse=True)
        order = torch.argsort(where, stable=True)
        places = order.split(torch.bincount(where, minlength=len(cells)).tolist())

        def begin(item: tuple[int, Tensor], buffer: Buffer) -> Any:
            offset, view = layout.cell_offset(item[0]), buffer.view[: layout.cell_bytes]
            return self._engine.read(Transfer(self._file, offset, view, False))

        items = zip(cells.tolist(), places, strict=True)
        for (cell, inner), buffer, _ in read_ahead(self._pool, items, begin):
            view = buffer.view[: layout.cell_bytes]
            self.traffic.read += view.nbytes
            (crc,) = struct.unpack_from("<I", view, layout.cell_bytes - _CRC_BYTES)
            if verifies and zlib.crc32(view[:-_CRC_BYTES]) != crc:
                raise ChecksumError(
                    f"rows from {cell * layout.rows_per_cell} at offset "
                    f"{layout.cell_offset(cell)} of {self.path} do not verify: the file was "
                    "changed or the disk is failing"
                )
            yield cell, buffer, inner

    def read(self, rows: Tensor) -> Tensor:
        self._check()
        records = torch.empty(len(rows), self.layout.width)
        for cell, buffer, inner in self._cells(rows, verifies=True):
            local = rows[inner] - cell * self.layout.rows_per_cell
            records[inner] = self._values(buffer)[local]
        return records

    def write(self, rows: Tensor, records: Tensor) -> None:
        self._check()
        self._write(rows, records, verifies=True)

    def _write(self, rows: Tensor, records: Tensor, *, verifies: bool) -> None:
        if self.layout.rows_per_cell == 1:  # nothing else lies in the cell
            for row, record in zip(rows.tolist(), records, strict=True):
                self._put(row, record)
            return
        for cell, buffer, inner in self._cells(rows, verifies):
            local = rows[inner] - cell * self.layout.rows_per_cell
            self._values(buffer)[local] = records[inner]
            self._write_cell(cell, buffer)

    def cost(self, read: Tensor, written: Tensor) -> tuple[int, int]:
        per, nbytes = self.layout.rows_per_cell, self.layout.cell_bytes
        come, go = (len(torch.unique(rows // per)) * nbytes for rows in (read, written))
        return come + (go if per > 1 else 0), go

    # -- steps --

    def has_room(self, count: int) -> bool:
        end = self.layout.journal_offset + self._at + self.layout.entry_bytes(count)
        return end <= self.layout.file_bytes

    def rebase(self) -> None:
        self._file.sync()
        self._set_mark(holds=True)

    def prepare(self, step: int, rows: Tensor, records: Tensor) -> None:
        self._check()
        self._prepared = None
        count, layout = len(rows), self.layout
        assert count <= layout.most_rows and self.has_room(count)
        nbytes = layout.entry_bytes(count)
        self.traffic.planned_written += nbytes
        body = rows.numpy().tobytes() + records.contiguous().numpy().tobytes()
        fields = (_ENTRY_MAGIC, self._epoch, self._number, step, count, zlib.crc32(body))
        head = _ENTRY.pack(*fields, 0)[:-4]
        view = memoryview(mmap.mmap(-1, nbytes))  # given back when an error lets go of it, too
        view[: _ENTRY.size] = head + struct.pack("<I", zlib.crc32(head))
        view[_ENTRY.size : _ENTRY.size + len(body)] = body
        offset = layout.journal_offset + self._at
        self._engine.write(Transfer(self._file, offset, view, False)).wait()
        self._file.sync()
        self.traffic.written += nbytes
        self._prepared = step, nbytes

    def confirm(self) -> None:
        assert self._prepared is not None
        self.step, nbytes = self._prepared
        self._at, self._number, self._prepared = self._at + nbytes, self._number + 1, None

    def close(self) -> None:
        """Close the file, which stays: `recover=True` opens it."""
        self._engine.close()
        self._file.close()

    def _check(self) -> None:
        check_process(self._pid)
