"""Checkpoints of rows: a folder with a file for each rank, read by any number of ranks.

rows.json             what they are, and of each file the checksums of its parts
rows-00000.bin        records of rank 0's rows, in their order
"""

from __future__ import annotations

import json
import os
import shutil
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gemini import strangers
from gemini.checkpoint.format.manifest import CheckpointError, CorruptError, MismatchError
from gemini.nvme.errors import NvmeError
from gemini.nvme.files import calls

from .exchange import RowExchange
from .rules import settings_of
from .table import PART_BYTES, RowTable

FORMAT = 1
MANIFEST = "rows.json"
_MOST_RANKS, _MOST_ROWS = 1 << 16, 1 << 48


def save(table: RowTable, exchange: RowExchange, folder: Path) -> None:
    """Write `folder`, which must not be there: under another name first, renamed when it is whole.

    Collective. Raises CheckpointError on every rank.
    """
    comm, temporary = exchange.comm, folder.with_name(f".{folder.name}.saving")
    fault = ""
    try:
        if comm.rank == 0:
            if os.path.lexists(folder):
                fault = "it is there; expected a new folder"
            elif temporary.is_dir() and not temporary.is_symlink():  # of a save that was killed
                shutil.rmtree(temporary)
            if not fault:
                calls.make_folders(temporary)
    except OSError as error:
        fault = str(error)
    _raise_first(exchange, fault, folder)
    checksums: list[int] = []
    try:
        checksums = _write(table, temporary / _name(comm.rank))
    except (OSError, NvmeError) as error:
        fault = str(error)
    _raise_first(exchange, fault, folder)
    files = comm.gather_objects(checksums)
    try:
        if comm.rank == 0:
            manifest = {
                "format": FORMAT,
                "num_rows": exchange.num_rows,
                "dim": table.dim,
                "width": table.width,
                "rule": settings_of(table.rule),
                "step": table.home.step,
                "files": files,
            }
            calls.write_whole(temporary / MANIFEST, json.dumps(manifest).encode())
            calls.sync_folder(temporary)
            calls.rename(temporary, folder)
            calls.sync_folder(folder.parent)
    except OSError as error:
        fault = str(error)
    _raise_first(exchange, fault, folder)


def _raise_first(exchange: RowExchange, fault: str, folder: Path) -> None:
    faults = [found for found in exchange.comm.gather_objects(fault) if found]
    if faults:
        raise CheckpointError(f"rows cannot be saved to {folder}: {faults[0]}")


def _name(rank: int) -> str:
    return f"rows-{rank:05}.bin"


def _write(table: RowTable, path: Path) -> list[int]:
    """Write this rank's records, synced. Returns the checksums of the parts."""
    fd = calls.open_file(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        at, checksums = 0, []
        for part in table.parts():
            data = memoryview(part.contiguous().numpy().tobytes())
            checksums.append(zlib.crc32(data))
            done = 0
            while done < len(data):
                moved = calls.pwritev(fd, [data[done:]], at + done)
                if not moved:
                    raise OSError(f"a write to {path} came up short")
                done += moved
            at += done
        calls.fsync(fd)
        return checksums
    finally:
        calls.close(fd)


def load(table: RowTable, exchange: RowExchange, folder: Path) -> None:
    """Replace all rows, their state and the step by those of a folder, of any number of ranks.

    The rule's settings stay as they are; its kind must be the folder's. A folder may come from
    anybody: nothing in it is executed, and every file is verified before the first row is replaced.
    Collective. Raises MismatchError or CorruptError on every rank.
    """
    comm = exchange.comm
    found: CheckpointError | None = None
    try:
        manifest = _manifest(table, exchange, folder)
        for rank, checksums in enumerate(manifest["files"]):
            for _ in _parts(folder, rank, manifest, checksums):
                pass
    except CheckpointError as error:
        found = error
    faults = [fault for fault in comm.gather_objects(str(found or "")) if fault]
    if found is not None:
        raise found
    if faults:
        raise CorruptError(faults[0])
    table.fill(_own_parts(exchange, folder, manifest), manifest["step"])


def _own_parts(exchange: RowExchange, folder: Path, manifest: dict[str, Any]) -> Iterator[Tensor]:
    """Records of this rank's rows in order, from those of all saved ranks, a part of each open."""
    comm, saved = exchange.comm, len(manifest["files"])
    readers = [
        _Reader(_parts(folder, rank, manifest, checksums))
        for rank, checksums in enumerate(manifest["files"])
    ]
    block = max(1, PART_BYTES // (4 * manifest["width"]))
    own = range(comm.rank, exchange.num_rows, comm.world_size)
    for start in range(0, len(own), block):
        ids = torch.tensor(own[start : start + block])
        records = torch.empty(len(ids), manifest["width"])
        for rank, reader in enumerate(readers):
            here = ids % saved == rank
            records[here] = reader.take(ids[here] // saved)
        yield records


class _Reader:
    """Reader of rows in ascending order, from parts in order."""

    def __init__(self, parts: Iterator[Tensor]) -> None:
        self._parts, self._part, self._start = parts, torch.empty(0, 0), 0

    def take(self, rows: Tensor) -> Tensor:
        """Records [n, width] of rows, ascending, none before one that was taken."""
        found = []
        while len(rows):
            end = self._start + len(self._part)
            count = int((rows < end).sum())
            if count:
                found.append(self._part[rows[:count] - self._start])
                rows = rows[count:]
            else:
                self._start, self._part = end, next(self._parts)
        return torch.cat(found) if found else torch.empty(0, self._part.shape[1] or 1)


def _manifest(table: RowTable, exchange: RowExchange, folder: Path) -> dict[str, Any]:
    """What the folder says, all of it checked, and equal to the table."""
    path = folder / MANIFEST
    try:
        body = strangers.read_json(path)
    except (OSError, ValueError) as error:
        raise CorruptError(f"{path} cannot be read: {strangers.said(error)}") from error
    try:
        sizes = {
            name: _whole(body[name], most)
            for name, most in (("format", FORMAT), ("num_rows", _MOST_ROWS), ("dim", _MOST_ROWS),
                               ("width", _MOST_ROWS), ("step", 1 << 62))
        }  # fmt: skip
        rule, files = body["rule"]["name"], body["files"]
        if not isinstance(files, list) or not 1 <= len(files) <= _MOST_RANKS:
            raise ValueError("files; expected a list, one for each rank")
        count = max(1, PART_BYTES // (4 * max(1, sizes["width"])))
        for rank, checksums in enumerate(files):
            owned = len(range(rank, sizes["num_rows"], len(files)))
            if not isinstance(checksums, list) or len(checksums) != -(-owned // count):
                raise ValueError(f"file {rank}; expected a checksum for each part of its rows")
            for checksum in checksums:
                _whole(checksum, 1 << 32)
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptError(f"{path} says what no checkpoint has: {error!r:.200}") from error
    there = {**sizes, "rule": rule}
    here = {
        "num_rows": exchange.num_rows,
        "dim": table.dim,
        "width": table.width,
        "rule": settings_of(table.rule)["name"],
    }
    unlike = [f"{name} {there[name]!r:.80}, here {here[name]}" for name in here
              if there[name] != here[name]]  # fmt: skip
    if unlike:
        raise MismatchError(f"{folder} has rows of another table: {'; '.join(unlike)}")
    return {**sizes, "files": files}


def _whole(value: object, most: int) -> int:
    if type(value) is not int or not 0 <= value <= most:
        raise ValueError(f"{value!r:.40}; expected a number up to {most}")
    return value


def _parts(
    folder: Path, rank: int, manifest: dict[str, Any], checksums: list[int]
) -> Iterator[Tensor]:
    """Records of one file, part after part. Raises CorruptError."""
    path, width = folder / _name(rank), manifest["width"]
    owned = len(range(rank, manifest["num_rows"], len(manifest["files"])))
    count = max(1, PART_BYTES // (4 * width))
    try:
        with strangers.opened(path) as file:
            nbytes, expected = os.fstat(file.fileno()).st_size, owned * 4 * width
            if nbytes != expected:
                raise CorruptError(
                    f"{path} has {nbytes} bytes, expected {expected}: it was cut or replaced"
                )
            for number, checksum in enumerate(checksums):
                rows = min(count, owned - number * count)
                data = bytearray(file.read(rows * 4 * width))
                if len(data) != rows * 4 * width or zlib.crc32(data) != checksum:
                    raise CorruptError(
                        f"{path}, part {number}, is damaged: its checksum does not match"
                    )
                yield torch.frombuffer(data, dtype=torch.float32).view(rows, width)
    except OSError as error:
        raise CorruptError(f"{path} cannot be read: {strangers.said(error)}") from error
