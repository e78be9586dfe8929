"""Small files of a checkpoint that may come from anybody: read if they are files, and small."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from gemini.nvme import cause_of

from .errors import CorruptError
from .manifest import JSON_BYTES, JSON_SHARE, NAME, Manifest

ROOM_BYTES = 32 << 20  # of memory, for what is made of a small file
_OBJECTS_SHARE = 16  # bytes of memory that objects take for each that they have in a pickle


def memory_limit(pickle_bytes: int, data_bytes: int) -> int:
    """Bytes of memory that a pickle may take, with `data_bytes` of data beside it."""
    return ROOM_BYTES + _OBJECTS_SHARE * pickle_bytes + data_bytes


def read_file(path: Path, limit: int | None = None) -> bytes:
    """All of a regular file. Raises CorruptError for what is none, or has more than `limit`."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe would wait
    except OSError as error:
        raise CorruptError(f"{path} cannot be read: {cause_of(error.errno)}") from error
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        os.close(fd)
        raise CorruptError(f"{path} cannot be read: it is no file")
    with os.fdopen(fd, "rb") as file:
        if limit is not None and status.st_size > limit:
            raise CorruptError(
                f"{path} has {status.st_size} bytes, expected at most {limit} for the files beside "
                "it"
            )
        try:
            return file.read()
        except OSError as error:
            raise CorruptError(f"{path} cannot be read: {cause_of(error.errno)}") from error


def folder_bytes(folder: Path) -> int:
    """Of all files in a folder. Raises CorruptError."""
    try:
        with os.scandir(folder) as entries:
            return sum(entry.stat().st_size for entry in entries if entry.is_file())
    except OSError as error:
        raise CorruptError(f"{folder} cannot be read: {cause_of(error.errno)}") from error


def read_json(path: Path) -> bytes:
    """A manifest or an index, bounded by what it describes: as objects it takes some 30 times its
    size. Raises CorruptError."""
    return read_file(path, JSON_BYTES + folder_bytes(path.parent) // JSON_SHARE)


def read_manifest(folder: Path) -> Manifest | None:
    """None where the folder has none. Raises FormatError or CorruptError."""
    path = folder / NAME
    if not os.path.lexists(path):
        return None
    return Manifest.decode(read_json(path), str(path))
