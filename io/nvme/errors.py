"""What can go wrong on a disk, as types."""

from __future__ import annotations

import errno as errno_module
import os

FULL_ERRNOS = frozenset({errno_module.ENOSPC, errno_module.EFBIG, errno_module.EDQUOT})


def cause_of(errno: int | None) -> str:
    """An errno for people: `ENOSPC, No space left on device`."""
    if not errno:
        return "it came up short"
    return f"{errno_module.errorcode.get(errno, str(errno))}, {os.strerror(errno)}"


class NvmeError(RuntimeError):
    """Base of every error of this package."""


class FolderError(NvmeError, ValueError):
    """A folder that cannot hold a store: missing, not writable, RAM, a file."""


class DiskFullError(NvmeError):
    """The store does not fit: no space, or a limit on the size of files."""


class TransferError(NvmeError):
    """A read or a write that failed or came up short, or a file that could not be synced or
    closed."""

    def __init__(
        self, kind: str, path: str, offset: int, nbytes: int, errno: int, done: int = 0
    ) -> None:
        where = f"{nbytes} bytes at offset {offset} of {path} failed after {done}"
        super().__init__(f"{kind} of {where if nbytes else path + ' failed'}: {cause_of(errno)}")
        self.kind, self.path, self.offset, self.nbytes, self.errno = (
            kind, path, offset, nbytes, errno,
        )  # fmt: skip


class FullTransferError(TransferError, DiskFullError):
    """What is written has no space, or a limit on the size of files forbids it."""


def transfer_error(
    kind: str, path: str, offset: int, nbytes: int, errno: int, done: int = 0
) -> TransferError:
    """The TransferError that fits `errno`."""
    full = kind != "read" and errno in FULL_ERRNOS
    error = FullTransferError if full else TransferError
    return error(kind, path, offset, nbytes, errno, done)


class ChecksumError(NvmeError):
    """A block that does not read back as it was written."""


class WriteBudgetError(NvmeError):
    """The next step would write more than `nvme_write_budget` allows."""


class RollbackError(NvmeError):
    """A step failed, and the disk did not give back what was needed to undo it."""


def check_process(pid: int) -> None:
    """Raise NvmeError where this is a forked child of `pid`, whose threads it does not have."""
    if os.getpid() != pid:
        raise NvmeError(
            f"this store belongs to process {pid}; its threads are not in the forked "
            f"process {os.getpid()}. Make the optimizer in the process that trains"
        )
