"""The files of a store: checking folders, creating, locking, finding orphans, removing.

A live file is held by an exclusive `flock`, so a file whose lock can be had belongs to a process
that died. Nothing in a folder is touched but files that match our name *and* begin with our magic.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import secrets
import stat
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gemini.units import format_bytes

from .errors import FULL_ERRNOS, DiskFullError, FolderError
from .layout import MAGIC

log = logging.getLogger("gemini.nvme")

PREFIX = "gemini-"
SUFFIX = ".blocks"
RAM_FILESYSTEMS = frozenset({"tmpfs", "ramfs", "devtmpfs"})
NETWORK_FILESYSTEMS = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "9p", "ceph", "lustre", "glusterfs"}
)


@dataclass(frozen=True, slots=True)
class OpenFile:
    """One open, locked, preallocated file."""

    path: Path
    fd: int  # with O_DIRECT where the file system takes it
    direct: bool


def file_system(folder: Path) -> str:
    """Type of the file system that holds `folder` (`ext4`, `tmpfs`, ...), or `unknown`."""
    device = folder.stat().st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            fields = line.split()
            if fields[2] == wanted:
                return fields[fields.index("-") + 1]
    return "unknown"


def check_folder(folder: str | os.PathLike[str], *, allow_ram: bool = False) -> Path:
    """The folder as an absolute path, or FolderError with what is wrong and what to do."""
    path = Path(folder).expanduser().absolute()
    if not path.exists():
        raise FolderError(f"nvme folder {path} does not exist; create it or name another")
    if not path.is_dir():
        raise FolderError(f"nvme folder {path} is a file; expected a folder")
    if not os.access(path, os.W_OK | os.X_OK):
        raise FolderError(f"nvme folder {path} is not writable by this process; name another")
    kind = file_system(path)
    if kind in RAM_FILESYSTEMS and not allow_ram:
        raise FolderError(
            f"nvme folder {path} is on {kind}, which is RAM: offloading there frees nothing; "
            "name a folder on a disk, or pass allow_ram=True"
        )
    if kind in NETWORK_FILESYSTEMS:
        log.warning("nvme folder %s is on %s, a network file system; expect its speed", path, kind)
    return path


def default_folder() -> Path:
    """A temporary folder's parent that is on a disk: TMPDIR, /var/tmp, /tmp, then here."""
    candidates = [os.environ.get("TMPDIR"), "/var/tmp", tempfile.gettempdir(), os.getcwd()]
    for candidate in candidates:
        if candidate:
            with contextlib.suppress(FolderError):
                return check_folder(candidate)
    raise FolderError(
        f"none of {', '.join(str(c) for c in candidates if c)} is a writable folder on a disk; "
        "pass nvme_offload_dir"
    )


def create_files(
    folders: Sequence[Path], nbytes: Sequence[int], label: str = ""
) -> tuple[OpenFile, ...]:
    """Create, lock and preallocate one file in each folder; on an error none is left behind."""
    name = f"{PREFIX}{label}{os.getpid()}-{secrets.token_hex(8)}"
    opened: list[OpenFile] = []
    try:
        for i, (folder, length) in enumerate(zip(folders, nbytes, strict=True)):
            opened.append(_create(folder / f"{name}-{i}{SUFFIX}", length))
    except BaseException:
        remove_files(opened)
        raise
    return tuple(opened)


def _create(path: Path, nbytes: int) -> OpenFile:
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    direct = True
    try:
        fd = os.open(path, flags | os.O_DIRECT, 0o600)
    except OSError as error:
        if error.errno == errno.EINVAL:  # the file system refuses O_DIRECT, and made the file
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            direct = False
            fd = _open_or_explain(path, flags)
            log.warning("%s refuses O_DIRECT: buffered I/O, pages dropped behind", path.parent)
        else:
            raise _explain(path, error) from error
    opened = OpenFile(path, fd, direct)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.posix_fallocate(fd, 0, nbytes)
    except OSError as error:
        remove_files([opened])
        if error.errno in FULL_ERRNOS:
            raise DiskFullError(
                f"{path.parent} cannot hold {format_bytes(nbytes)} "
                f"({format_bytes(free_bytes(path.parent))} free, {os.strerror(error.errno)}); "
                "free some space, name another folder, or offload a smaller fraction"
            ) from error
        raise _explain(path, error) from error
    return opened


def _open_or_explain(path: Path, flags: int) -> int:
    try:
        return os.open(path, flags, 0o600)
    except OSError as error:
        raise _explain(path, error) from error


def _explain(path: Path, error: OSError) -> FolderError:
    return FolderError(f"cannot create {path}: {error.strerror}; name another nvme folder")


def free_bytes(folder: Path) -> int:
    """Bytes an unprivileged process may still allocate there."""
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


def remove_files(files: Sequence[OpenFile]) -> None:
    """Unlink and close; whatever is gone already is fine."""
    for file in files:
        with contextlib.suppress(OSError):
            os.unlink(file.path)
        with contextlib.suppress(OSError):
            os.close(file.fd)


def orphans(folder: Path) -> tuple[Path, ...]:
    """Our files in `folder` whose process is dead, by name order."""
    found = []
    for path in sorted(folder.glob(f"{PREFIX}*{SUFFIX}")):
        try:
            if not stat.S_ISREG(path.lstat().st_mode):
                continue
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            beginning = os.pread(fd, len(MAGIC), 0)
            if beginning in (MAGIC, b"", bytes(len(MAGIC))):  # died before or after the header
                found.append(path)
        except OSError:  # locked: its owner lives
            pass
        finally:
            os.close(fd)
    return tuple(found)


def remove_orphans(folder: Path) -> tuple[Path, ...]:
    """Remove what dead processes left in `folder`; says what it removed."""
    removed = orphans(folder)
    for path in removed:
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        log.warning("removed %s, left by a process that died", path)
    return removed
