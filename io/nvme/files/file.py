"""Files of a store: checking folders, creating, locking, removing."""

from __future__ import annotations

import contextlib
import errno
import logging
import mmap
import os
import re
import secrets
import shlex
import socket
import stat
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gemini.nvme.errors import (
    FULL_ERRNOS,
    DiskFullError,
    FolderError,
    NvmeError,
    TransferError,
    cause_of,
    transfer_error,
)
from gemini.strangers import open_regular
from gemini.units import PAGE_BYTES, align_up, format_bytes

from . import calls
from .orphan_files import PREFIX, SUFFIX, left_in

log = logging.getLogger("gemini.nvme")

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

_FIELD = re.compile(r"\{(?P<name>[^{}/]*)\}")
_VARIABLE = re.compile(r"\$\{?(?P<name>\w+)\}?")
_NUMBERS = {  # a field -> variables of a launcher
    "rank": ("RANK", "SLURM_PROCID"),
    "local_rank": ("LOCAL_RANK", "SLURM_LOCALID"),
}


@dataclass(slots=True)
class OpenFile:
    """Open, locked, preallocated file.

    A transfer holds its file, so the descriptor's number is not given to another file before the
    last transfer has ended, even if the store is collected meanwhile.
    """

    path: Path
    fd: int  # with O_DIRECT where the file system takes it
    direct: bool
    keeps_cache: bool = False  # pages that were read stay in memory, for other processes

    def close(self) -> None:
        """Close it. Raises TransferError: on a network the last bytes may be refused as late as
        now."""
        # The number is forgotten first: Linux frees it also where close fails, and a second close
        # could end another file.
        fd, self.fd = self.fd, -1
        if fd >= 0:
            try:
                calls.close(fd)
            except OSError as error:
                raise transfer_error("close", str(self.path), 0, 0, error.errno or 0) from error

    __del__ = close

    def move(self, kind: str, piece: memoryview, offset: int) -> None:
        """Read or write a whole piece, by as many calls as it takes. A call that moves nothing, or
        errs, is a TransferError."""
        call, done = calls.preadv if kind == "read" else calls.pwritev, 0
        while done < piece.nbytes:
            try:
                moved = call(self.fd, [piece[done:]], offset + done)
            except OSError as error:
                code = error.errno or 0
                raise transfer_error(
                    kind, str(self.path), offset, piece.nbytes, code, done
                ) from error
            if moved == 0:
                raise transfer_error(kind, str(self.path), offset, piece.nbytes, 0, done)
            done += moved
        if kind == "read" and not (self.direct or self.keeps_cache):
            os.posix_fadvise(self.fd, offset, piece.nbytes, os.POSIX_FADV_DONTNEED)

    def write_pages(self, offset: int, data: bytes) -> None:
        """Write a few bytes through page-aligned memory, as O_DIRECT wants. Raises
        TransferError."""
        nbytes, path = align_up(len(data), PAGE_BYTES), str(self.path)
        with mmap.mmap(-1, nbytes) as pages, memoryview(pages) as view:
            view[: len(data)] = data
            try:
                done = calls.pwritev(self.fd, [view], offset)
            except OSError as error:
                raise transfer_error("write", path, offset, nbytes, error.errno or 0) from error
            if done != nbytes:
                raise transfer_error("write", path, offset, nbytes, 0, done)

    def sync(self) -> None:
        """Sync data to the disk; where they went through the page cache, the cache is dropped.
        Raises TransferError."""
        try:
            calls.fdatasync(self.fd)
            if not self.direct:
                os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_DONTNEED)
        except OSError as error:
            raise transfer_error("sync", str(self.path), 0, 0, error.errno or 0) from error

    def sync_name(self) -> None:
        """Sync the folder that has its name. Raises FolderError."""
        try:
            calls.sync_folder(self.path.parent)
        except OSError as error:
            raise FolderError(
                f"cannot sync {self.path.parent}: {cause_of(error.errno)}; name another nvme folder"
            ) from error

    def reserve(self, runs: Sequence[tuple[int, int]]) -> None:
        """Allocate runs of it, (offset, bytes) of each. Raises DiskFullError with what would help,
        or FolderError."""
        folder, nbytes = self.path.parent, sum(nbytes for _, nbytes in runs)
        try:
            calls.reserve(self.fd, runs)
        except OSError as error:
            if error.errno not in FULL_ERRNOS:
                raise explained(self.path, error) from error
            raise DiskFullError(
                f"{folder} cannot hold {format_bytes(nbytes)} "
                f"({format_bytes(free_bytes(folder))} free, {cause_of(error.errno)}"
                f"{_said_of_orphans(folder)}); "
                "free some space, name another folder, or offload a smaller fraction"
            ) from error

    def punch(self, offset: int, nbytes: int) -> bool:
        """Give whole pages back to the file system; False where it does not take them."""
        return calls.punch(self.fd, offset, nbytes)

    def unlink(self) -> None:
        """Remove the name. A name that is gone is fine, and one that another file took is left
        alone."""
        with contextlib.suppress(OSError):
            if os.path.samestat(self.path.lstat(), os.fstat(self.fd)):
                calls.unlink(self.path)


def file_system(folder: Path) -> str:
    """Type of the file system that holds `folder` (`ext4`, `tmpfs`, ...), or `unknown`."""
    device = folder.stat().st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines():
            fields = line.split()
            if fields[2] == wanted:
                return fields[fields.index("-") + 1]
    return "unknown"


def local_folder(folder: str | os.PathLike[str]) -> Path:
    """Absolute path of a folder whose name may differ by host and rank, as it is in this process.

    folder: `~`, `$NAME` of an environment variable, and `{node}` (the host's name), `{rank}` and
        `{local_rank}` (as torchrun or SLURM number this process; 0 without either) are replaced.

    Raises FolderError for a variable that is not set, and for another word in braces.
    """
    text = os.path.expandvars(os.fspath(folder))
    unset = _VARIABLE.search(text)
    if unset is not None:
        raise FolderError(
            f"nvme folder {folder} names ${unset['name']}, which this process does not have; set "
            "it on every host, or name a folder without it"
        )
    return Path(_FIELD.sub(_value_of, text)).expanduser().absolute()


def _value_of(field: re.Match[str]) -> str:
    name = field["name"]
    if name == "node":
        return socket.gethostname()
    if name not in _NUMBERS:
        raise FolderError(
            f"nvme folder {field.string} has {{{name}}}; expected {{node}}, {{rank}} or "
            "{local_rank} in braces"
        )
    return next((os.environ[key] for key in _NUMBERS[name] if key in os.environ), "0")


def check_folder(folder: str | os.PathLike[str], *, allow_ram: bool = False) -> Path:
    """Folder as an absolute path; see `local_folder`. One with `{rank}` and its like is made, in a
    folder that is there. Raises FolderError with what is wrong and what to do."""
    path = local_folder(folder)
    if _FIELD.search(os.fspath(folder)) and path.parent.is_dir():
        with contextlib.suppress(OSError):  # said below
            path.mkdir(exist_ok=True)
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
    """Parent of temporary folders that is on a disk: TMPDIR, /var/tmp, /tmp, then here.

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
    folders: Sequence[Path],
    nbytes: Sequence[int],
    label: str = "",
    runs: Sequence[Sequence[tuple[int, int]]] | None = None,
) -> tuple[OpenFile, ...]:
    """Create, lock and preallocate one file in each folder; on an error none is left.

    runs: of each file, those to allocate, (offset, bytes); the rest are holes. None: no holes.
    """
    name = f"{PREFIX}{label}{os.getpid()}-{secrets.token_hex(8)}"
    opened: list[OpenFile] = []
    # Allocated now, so that no step fails for want of space: a full disk is told before training.
    try:
        for i, (folder, length) in enumerate(zip(folders, nbytes, strict=True)):
            whole = [(0, length)] if runs is None else runs[i]
            opened.append(_create(folder / f"{name}-{i}{SUFFIX}", length, whole))
    except BaseException:
        remove_files(opened)
        raise
    return tuple(opened)


def _create(path: Path, nbytes: int, runs: Sequence[tuple[int, int]]) -> OpenFile:
    opened = _open_locked(path)
    try:
        if not runs or sum(runs[-1]) < nbytes:  # it ends with a hole
            try:
                calls.truncate(opened.fd, nbytes)
            except OSError as error:
                raise explained(path, error) from error
        opened.reserve(runs)
    except BaseException:
        remove_files([opened])
        raise
    return opened


def _said_of_orphans(folder: Path) -> str:
    nbytes = sum(left.nbytes for left in left_in(folder))
    if not nbytes:
        return ""
    return (
        f", and {format_bytes(nbytes)} in files of processes that died, which "
        f"python -m gemini clean --remove {shlex.quote(str(folder))} removes"
    )


def _open_locked(path: Path) -> OpenFile:
    """Create `path` and hold its lock. See [Note: newborn files] in `orphan_files`."""
    while True:
        opened = _open_new(path)
        try:
            # whoever looks for orphans may hold the lock, for as long as a removal takes
            calls.lock(opened.fd, calls.LOCK_EX)
            if os.fstat(opened.fd).st_nlink:
                return opened
        except OSError as error:
            remove_files([opened])
            raise explained(path, error) from error
        opened.close()


def create_direct(path: Path) -> OpenFile:
    """Create `path` for direct I/O, neither locked nor preallocated, for readers of files.

    Raises FolderError or DiskFullError.
    """
    return _open_new(path, 0o666)


def open_direct(path: Path) -> OpenFile:
    """Open a regular file to read it with direct I/O, where its file system has that. Raises
    OSError."""
    try:
        return OpenFile(path, open_regular(path, calls.O_DIRECT), True)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return OpenFile(path, open_regular(path), False)


def _open_new(path: Path, mode: int = 0o600) -> OpenFile:
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    direct = True
    try:
        fd = calls.open_file(path, flags | calls.O_DIRECT, mode)
    except OSError as error:
        if error.errno == errno.EINVAL:  # the file system refuses O_DIRECT, and made the file
            with contextlib.suppress(FileNotFoundError):
                calls.unlink(path)
            direct = False
            fd = _open_or_explain(path, flags, mode)
            log.warning("%s refuses O_DIRECT: buffered I/O, pages dropped behind", path.parent)
        else:
            raise explained(path, error) from error
    return OpenFile(path, fd, direct)


def _open_or_explain(path: Path, flags: int, mode: int) -> int:
    try:
        return calls.open_file(path, flags, mode)
    except OSError as error:
        raise explained(path, error) from error


def explained(path: Path, error: OSError) -> NvmeError:
    """DiskFullError or FolderError for a file that cannot be made."""
    kind = DiskFullError if error.errno in FULL_ERRNOS else FolderError
    return kind(f"cannot create {path}: {cause_of(error)}; name another nvme folder")


def free_bytes(folder: Path) -> int:
    """Bytes an unprivileged process may still allocate there."""
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


def remove_files(files: Sequence[OpenFile]) -> None:
    """Unlink and close. Errors of the disk are ignored: nobody will read the files."""
    for file in files:
        file.unlink()
        with contextlib.suppress(TransferError):
            file.close()
