"""Files of processes that died: found by their lock, kept where they hold a step.

A live file is held by an exclusive `flock`, so a file whose lock can be had belongs to a process
that died. Nothing in a folder is touched but this user's files that match our name *and* begin with
our magic, or with nothing.

[Note: newborn files] Between its creation and its lock a file looks like an orphan. Who removes
one holds its lock meanwhile, and who creates one looks, once it has the lock, whether it is there.

[Note: pins] Beside a file with a version that a checkpoint is pinned to lies another, which names
the witnesses of its pins. While one of them is there, nobody removes the file.

[Note: kept files] A file with a committed step may be all that is left of that step, so a new store
leaves it where it is and says so; `remove_orphans` is for who wants the space. What never held a
step (gradients, probes, stores that were still being filled) a new store removes by itself.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shlex
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from gemini.nvme.errors import FolderError, cause_of
from gemini.nvme.layout import HEADER_LIMIT, MAGIC, NUM_VERSIONS, Header, Index, StoreFormatError
from gemini.units import format_bytes

from . import calls

log = logging.getLogger("gemini.nvme")

PREFIX = "gemini-"
SUFFIX = ".blocks"
PINS_SUFFIX = ".pins"
_said: set[Path] = set()  # kept files that this process has spoken of


@dataclass(frozen=True, slots=True)
class Left:
    """File of ours whose process died."""

    path: Path  # its name begins with that of the model
    step: int | None  # the last one that it holds, 0 for none; None: this process cannot tell
    nbytes: int  # on disk
    written: float  # seconds since the epoch


@dataclass(frozen=True, slots=True)
class _Orphan:
    path: Path
    fd: int  # holds the lock

    @property
    def store(self) -> str:
        return store_name(self.path)

    def last_step(self) -> int | None:
        """Last committed step; 0 without one, None where this file cannot say."""
        beginning = os.pread(self.fd, HEADER_LIMIT, 0)
        if not beginning.startswith(MAGIC):
            return 0  # it died before it had written its header
        try:
            header = Header.decode(beginning)
        except StoreFormatError:
            return None
        if header.num_versions < NUM_VERSIONS:
            return 0
        if header.file:
            return None  # the first file of the store has the index
        try:
            header.check_size(os.fstat(self.fd).st_size)
        except StoreFormatError:
            return None
        slots = [
            os.pread(self.fd, header.index_slot_nbytes, header.index_offset(slot))
            for slot in range(NUM_VERSIONS)
        ]
        return max(Index.step_in(slot, header.num_blocks) or 0 for slot in slots)


def store_name(path: Path) -> str:
    """Name with which all files of one store begin."""
    return path.name.rpartition("-")[0]


def write_pins(path: Path, witnesses: Sequence[Path], *, is_closed: bool) -> None:
    """Write the file of pins of a store's file ([Note: pins]). Raises OSError.

    is_closed: its process has ended well, so that the file is nobody's when the witnesses are gone.
    """
    pins, new = path.with_suffix(PINS_SUFFIX), path.with_suffix(f"{PINS_SUFFIX}.new")
    with contextlib.suppress(FileNotFoundError):
        calls.unlink(new)
    # Written under another name and renamed: whoever reads in between finds the pins of before, and
    # a file is removed only where its pins say that it may be.
    if witnesses:
        said = {"witnesses": [str(witness) for witness in witnesses], "closed": is_closed}
        calls.write_whole(new, json.dumps(said).encode())
        calls.rename(new, pins)
        calls.sync_folder(path.parent)
    else:
        with contextlib.suppress(FileNotFoundError):
            calls.unlink(pins)


def is_gone(path: Path) -> bool:
    """Whether there is no such name; False where that cannot be told."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False
    return False


def pins_of(path: Path) -> tuple[tuple[Path, ...], bool]:
    """Witnesses that exist, of the pins of a store's file; and whether its process has ended well
    and left it for others."""
    try:
        said = json.loads(path.with_suffix(PINS_SUFFIX).read_bytes())
        witnesses = tuple(Path(str(witness)) for witness in said["witnesses"])
        is_closed = bool(said["closed"])
    except FileNotFoundError:
        return (), False
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.warning("%s cannot be read: %s", path.with_suffix(PINS_SUFFIX), error)
        return (path.with_suffix(PINS_SUFFIX),), False  # so the file stays
    return tuple(witness for witness in witnesses if not is_gone(witness)), is_closed


def orphans(folder: str | os.PathLike[str]) -> tuple[Path, ...]:
    """Our files in `folder` whose process is dead, by name order."""
    return tuple(left.path for left in left_in(folder))


def left_in(folder: str | os.PathLike[str]) -> tuple[Left, ...]:
    """Our files in `folder` whose process is dead, by name. Raises FolderError without one."""
    if not Path(folder).is_dir():
        raise FolderError(f"{folder} is no folder")
    with _locked([Path(folder)]) as files:
        return _left(files)


def _left(files: list[_Orphan]) -> tuple[Left, ...]:
    steps = [orphan.last_step() for orphan in files]
    known = {o.store: step for o, step in zip(files, steps, strict=True) if step is not None}
    facts = [os.fstat(orphan.fd) for orphan in files]
    return tuple(
        Left(orphan.path, known.get(orphan.store), fact.st_blocks * 512, fact.st_mtime)
        for orphan, fact in zip(files, facts, strict=True)
    )


def remove_orphans(folder: str | os.PathLike[str]) -> tuple[Path, ...]:
    """Remove all that dead processes of this user left in `folder`, with the steps that it holds,
    but for files that a checkpoint is pinned to.

    Returns what it removed, and logs it. Raises FolderError where the file system refuses.
    """
    with _locked([Path(folder)]) as files:
        removed = []
        for orphan in files:
            try:
                if _remove(orphan):
                    removed.append(orphan.path)
            except OSError as error:
                raise FolderError(
                    f"cannot remove {orphan.path}: {cause_of(error.errno)}"
                ) from error
        return tuple(removed)


def remove_stepless(folders: Iterable[Path]) -> None:
    """Remove what dead processes left and holds no step; says what is kept ([Note: kept files])."""
    with _locked(dict.fromkeys(folders)) as files:
        # File 0, which knows the step of its store, goes last: a process that dies in between
        # leaves files that still say what they are.
        for orphan, left in zip(reversed(files), reversed(_left(files)), strict=True):
            try:
                witnesses, is_closed = pins_of(orphan.path)
                if left.step == 0 or (is_closed and not witnesses):
                    _remove(orphan)
                    continue
                if witnesses:
                    continue
            except OSError as error:
                log.warning("%s was not removed: %s", orphan.path, cause_of(error.errno))
                continue
            if orphan.path not in _said:
                _said.add(orphan.path)
                log.warning(
                    "kept %s (%s), left by a process that died: it holds %s; nvme.recover reads "
                    "it, python -m gemini clean --remove %s removes it",
                    orphan.path,
                    format_bytes(left.nbytes),
                    f"step {left.step}" if left.step else "what this process cannot read",
                    shlex.quote(str(orphan.path.parent)),
                )


def remove_superseded(folders: Iterable[Path], last: Mapping[str, int]) -> frozenset[str]:
    """Remove what stores left when their processes died, where it holds no step after their `last`.

    last: by name of the store. Returns the names of those with files left, also of processes that
    live; what cannot be removed is left, which a warning says.
    """
    folders = tuple(dict.fromkeys(folders))
    with _locked(folders) as files:
        # in this order for the reason of `remove_stepless`
        for orphan, left in zip(reversed(files), reversed(_left(files)), strict=True):
            if left.step is not None and left.step <= last.get(orphan.store, -1):
                try:
                    _remove(orphan)
                except OSError as error:
                    log.warning("%s was not removed: %s", orphan.path, cause_of(error.errno))
    remaining = {store_name(path) for folder in folders for path in _ours_in(folder)}
    return frozenset(remaining.intersection(last))


def _ours_in(folder: Path) -> list[Path]:
    """Our files in a folder, by name."""
    return sorted(folder.glob(f"{PREFIX}*{SUFFIX}"))


def _remove(orphan: _Orphan) -> bool:
    """Remove an orphan. Returns whether it is gone: it stays while a checkpoint is pinned to it."""
    witnesses, _ = pins_of(orphan.path)
    if witnesses:
        log.warning(
            "kept %s: the checkpoint in %s is pinned to it; remove that first, or save it without "
            "pinned=True",
            orphan.path,
            witnesses[0].parent,
        )
        return False
    try:
        calls.unlink(orphan.path)
        log.warning("removed %s, left by a process that died", orphan.path)
    except FileNotFoundError:
        pass
    for suffix in (PINS_SUFFIX, f"{PINS_SUFFIX}.new"):
        with contextlib.suppress(FileNotFoundError):
            calls.unlink(orphan.path.with_suffix(suffix))
    return True


@contextmanager
def _locked(folders: Iterable[Path]) -> Iterator[list[_Orphan]]:
    """Orphans by folder and name, each locked for as long as the context lasts."""
    with ExitStack() as stack:
        files = []
        for folder in folders:
            for path in _ours_in(folder):
                fd = _lock(path)
                if fd is not None:
                    stack.callback(calls.close, fd)
                    files.append(_Orphan(path, fd))
        yield files


def _lock(path: Path) -> int | None:
    """Descriptor that holds the lock of an orphan; None for any other file."""
    try:
        status = path.lstat()
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            return None
        fd = calls.open_file(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        # empty or zeros: its process died before it had written the header
        calls.lock(fd, calls.LOCK_EX | calls.LOCK_NB)
        if os.pread(fd, len(MAGIC), 0) in (MAGIC, b"", bytes(len(MAGIC))):
            return fd
    except OSError:
        pass  # its owner lives
    calls.close(fd)
    return None
