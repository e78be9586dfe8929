"""Files of strangers: whoever reads one opens it here. Pure: no torch.

A checkpoint, a folder of weights or a config may come from anybody, and its names may lead
anywhere: to a pipe, which waits for ever, to a device, or by a link to a file of somebody else.
What is opened here is a regular file, and it lies in its folder. The hub's cache is the one
exception: files of `snapshots/REVISION/` are links into `blobs/` of the same model.

A hard link cannot be told from a file. Whoever changes a folder while it is read is not held off.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

SMALL_BYTES = 16 << 20  # most of a config: parsed, JSON takes about 30 times its size
TEXT_BYTES = 512 << 20  # most of any other file that is read whole, such as a tokenizer's
_TEXTS = (".json", ".jsonl", ".jinja", ".model", ".txt", ".py", ".yaml", ".yml")
_MOST_LEVELS = 8  # of folders in a folder of weights
_SNAPSHOTS, _BLOBS = "snapshots", "blobs"


class StrangerError(OSError):
    """Path that is not opened: no regular file, not in its folder, or too large."""


def said(error: Exception) -> str:
    """First line of what an error says, without its path."""
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return next(iter(text.strip().splitlines()), type(error).__name__)


def open_regular(path: str | os.PathLike[str], flags: int = 0) -> int:
    """Descriptor of a regular file in its folder, to read. Raises OSError.

    flags: of `os.open`, beside those to read.
    """
    there = _place(path)
    # looked at before it is opened: opening alone may wait, or rewind a tape
    if not stat.S_ISREG(os.lstat(there).st_mode):
        raise StrangerError("it is no file")
    reading = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW
    fd = os.open(there, reading | flags)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise StrangerError("it is no file")
    return fd


@contextlib.contextmanager
def opened(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Context of an open file. Raises OSError."""
    with os.fdopen(open_regular(path), "rb") as file:
        yield file


def size_of(path: str | os.PathLike[str]) -> int:
    """Bytes of a file, which was opened for that. Raises OSError."""
    with opened(path) as file:
        return os.fstat(file.fileno()).st_size


def read_bytes(path: str | os.PathLike[str], limit: int) -> bytes:
    """Content of a file of at most `limit` bytes. Raises OSError."""
    with opened(path) as file:
        nbytes = os.fstat(file.fileno()).st_size
        if nbytes > limit:
            raise StrangerError(
                f"it has {nbytes} bytes, expected at most {limit} for the files beside it"
            )
        data = file.read(nbytes + 1)
    if len(data) != nbytes:
        raise StrangerError("it was changed while it was read")
    return data


def read_text(path: str | os.PathLike[str], limit: int = SMALL_BYTES) -> str:
    """Text of a file, in utf-8. Raises OSError, and ValueError for other bytes."""
    return read_bytes(path, limit).decode("utf-8")


def read_json(path: str | os.PathLike[str], limit: int = SMALL_BYTES) -> Any:
    """Value of a file of JSON. Raises OSError or ValueError."""
    return parsed(read_bytes(path, limit))


def read_yaml(path: Path) -> dict[str, Any]:
    """Content of a YAML file, whose keys are names. Raises ValueError."""
    import yaml

    try:
        found = yaml.safe_load(str(read_bytes(path.resolve(), 1 << 20), "utf-8")) or {}
    except RecursionError:
        raise ValueError(f"{path} cannot be read as YAML: it is nested too deep") from None
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ValueError(f"{path} cannot be read as YAML: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} is a {type(found).__name__}; expected flags as keys")
    for name in found:
        if not isinstance(name, str):
            raise ValueError(f"{path} has a {type(name).__name__} as a key; expected names")
    return found


def parsed(text: bytes) -> Any:
    """Value of JSON, whose objects have each name once. Raises ValueError."""
    try:
        return json.loads(text, object_pairs_hook=_once)
    except RecursionError:
        raise ValueError("it is nested deeper than anything that was written") from None


def check_folder(folder: str | os.PathLike[str], levels: int = _MOST_LEVELS) -> None:
    """Raise OSError unless everything in a folder may be opened: others' code reads it by name.

    Hidden names are left out, and links to nothing.
    """
    with os.scandir(folder) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            if entry.name.startswith(".") or not os.path.exists(entry.path):
                continue  # a link to nothing gives nothing to read
            try:
                if is_folder := entry.is_dir():
                    _place(entry.path)
                nbytes = 0 if is_folder else size_of(entry.path)
            except OSError as error:
                raise StrangerError(f"{entry.name!r}: {said(error)}") from None
            if is_folder and levels and not entry.is_symlink():
                check_folder(entry.path, levels - 1)
            if nbytes > TEXT_BYTES and entry.name.endswith(_TEXTS):
                raise StrangerError(f"{entry.name!r} has {nbytes} bytes, and is to be read whole")
            if not is_folder and nbytes <= SMALL_BYTES and entry.name.endswith(".json"):
                _check_levels(entry)


def _check_levels(entry: os.DirEntry[str]) -> None:
    """Raise StrangerError for JSON whose depth ends its reader; other faults its reader says."""
    with contextlib.suppress(ValueError):
        try:
            json.loads(read_bytes(entry.path, SMALL_BYTES))
        except RecursionError:
            raise StrangerError(
                f"{entry.name!r} is nested deeper than anything that was written"
            ) from None


def _place(path: str | os.PathLike[str]) -> str:
    """Path without links. Raises StrangerError if it leaves the folder of `path`."""
    try:
        folder, there = os.path.realpath(os.path.dirname(path) or "."), os.path.realpath(path)
    except ValueError as error:  # a NUL
        raise StrangerError(f"its name is none ({error})") from None
    homes = [folder]
    for inner in (Path(folder), *Path(folder).parents):
        if inner.parent.name == _SNAPSHOTS:
            homes.append(str(inner.parent.parent / _BLOBS))
    if not any(Path(there).is_relative_to(home) for home in homes):
        raise StrangerError(
            f"it is a link to {there}, outside of its folder; give a copy of the file in its place"
        )
    return there


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        ((twice, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"it has {twice!r:.80} twice")
    return found
