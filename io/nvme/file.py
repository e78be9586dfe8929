"""The files of a store: checking folders, creating, locking, finding orphans, removing.

A live file is held by an exclusive `flock`, so a file whose lock can be had belongs to a process
that died. Nothing in a folder is touched but files that match our name *and* begin with our magic.

[Note: newborn files] Between its creation and its lock a file looks like an orphan. Who removes
one holds its lock meanwhile, and who creates one looks, once it has the lock, whether it is there.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import logging
import os
import secrets
import stat
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from gemini.units import format_bytes

from .errors import FULL_ERRNOS, DiskFullError, FolderError, NvmeError
from .layout import MAGIC

log = logging.getLogger("gemini.nvme")


PREFIX = "gemini-"
SUFFIX = ".blocks"
RAM_FILESYSTEMS = frozenset({"tmpfs", "ramfs", "devtmpfs"})
NETWORK_FILESYSTEMS = frozenset(
    {
        "nfs",
        "nfs4",
        "cifs",
        "smb3",
        "9p",
        "ceph",
        "lustre",
        "fuse.glusterfs",
        "fuse.sshfs",
        "beegfs",
    }
)

_libc = ctypes.CDLL(None, use_errno=True)
_FALLOC_FL_KEEP_SIZE, _FALLOC_FL_PUNCH_HOLE = 0x01, 0x02


@dataclass(slots=True)
class OpenFile:
    """One open, locked, preallocated file.

    A transfer holds its file, so the descriptor's number is not given to another file before the
    last transfer has ended, even if the store is collected meanwhile.
    """

    path: Path
    fd: int  # with O_DIRECT where the file system takes it
    direct: bool

    def close(self) -> None:
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    __del__ = close

    def unlink(self) -> None:
        """Remove the name; what is gone already is fine, what took its place is left alone."""
        with contextlib.suppress(OSError):
            if os.path.samestat(self.path.lstat(), os.fstat(self.fd)):
                os.unlink(self.path)


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
    try:
        mode = path.stat().st_mode
    except OSError as error:
        said = "does not exist" if error.errno == errno.ENOENT else f"is out of reach ({error})"
        raise FolderError(f"nvme folder {path} {said}; create it or name another") from error
    if not stat.S_ISDIR(mode):
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
    """A temporary folder's parent that is on a disk: TMPDIR, /var/tmp, /tmp, then here.

    Raises FolderError where none of them can be used.
    """
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
    opened = _open_locked(path)
    try:
        os.posix_fallocate(opened.fd, 0, nbytes)
    except OSError as error:
        remove_files([opened])
        if error.errno not in FULL_ERRNOS:
            raise _explain(path, error) from error
        raise DiskFullError(
            f"{path.parent} cannot hold {format_bytes(nbytes)} "
            f"({format_bytes(free_bytes(path.parent))} free, {error.strerror}); "
            "free some space, name another folder, or offload a smaller fraction"
        ) from error
    return opened


def punch(file: OpenFile, offset: int, nbytes: int) -> bool:
    """Give whole pages of a file back to the file system; False where it does not take them."""
    mode = _FALLOC_FL_KEEP_SIZE | _FALLOC_FL_PUNCH_HOLE
    fallocate = getattr(_libc, "fallocate64", None) or getattr(_libc, "fallocate", None)
    if fallocate is None:
        return False
    at, length = ctypes.c_int64(offset), ctypes.c_int64(nbytes)
    return bool(fallocate(file.fd, mode, at, length) == 0)


def _open_locked(path: Path) -> OpenFile:
    """Create `path` and hold its lock. See [Note: newborn files]."""
    while True:
        opened = _open_new(path)
        try:
            fcntl.flock(opened.fd, fcntl.LOCK_EX)  # nobody holds it longer than a removal takes
            if os.fstat(opened.fd).st_nlink:
                return opened
        except OSError as error:
            remove_files([opened])
            raise _explain(path, error) from error
        opened.close()


def create_direct(path: Path) -> OpenFile:
    """Create `path` for direct I/O, neither locked nor preallocated, for whoever may read files.

    Raises FolderError or DiskFullError.
    """
    return _open_new(path, 0o666)


def open_direct(path: Path) -> OpenFile:
    """Open `path` to read it with direct I/O, where its file system has that. Raises OSError."""
    flags = os.O_RDONLY | os.O_CLOEXEC
    try:
        return OpenFile(path, os.open(path, flags | os.O_DIRECT), True)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return OpenFile(path, os.open(path, flags), False)


def _open_new(path: Path, mode: int = 0o600) -> OpenFile:
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    direct = True
    try:
        fd = os.open(path, flags | os.O_DIRECT, mode)
    except OSError as error:
        if error.errno == errno.EINVAL:  # the file system refuses O_DIRECT, and made the file
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            direct = False
            fd = _open_or_explain(path, flags, mode)
            log.warning("%s refuses O_DIRECT: buffered I/O, pages dropped behind", path.parent)
        else:
            raise _explain(path, error) from error
    return OpenFile(path, fd, direct)


def _open_or_explain(path: Path, flags: int, mode: int) -> int:
    try:
        return os.open(path, flags, mode)
    except OSError as error:
        raise _explain(path, error) from error


def _explain(path: Path, error: OSError) -> NvmeError:
    kind = DiskFullError if error.errno in FULL_ERRNOS else FolderError
    return kind(f"cannot create {path}: {error.strerror}; name another nvme folder")


def free_bytes(folder: Path) -> int:
    """Bytes an unprivileged process may still allocate there."""
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


def remove_files(files: Sequence[OpenFile]) -> None:
    """Unlink and close."""
    for file in files:
        file.unlink()
        file.close()


def orphans(folder: Path) -> tuple[Path, ...]:
    """Our files in `folder` whose process is dead, by name order."""
    return tuple(_locked_orphans(folder))


def remove_orphans(folder: Path) -> tuple[Path, ...]:
    """Remove what dead processes left in `folder`; says what it removed."""
    removed = []
    for path in _locked_orphans(folder):
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        log.warning("removed %s, left by a process that died", path)
        removed.append(path)
    return tuple(removed)


def _locked_orphans(folder: Path) -> Iterator[Path]:
    """Orphans one by one, each locked until the next is asked for."""
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
        except OSError:  # locked: its owner lives
            os.close(fd)
            continue
        try:
            if beginning in (MAGIC, b"", bytes(len(MAGIC))):  # died before or after the header
                yield path
        finally:
            os.close(fd)
