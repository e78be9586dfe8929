"""Errors of disks, as types, and the meter of a budget of writes."""

from __future__ import annotations

import errno as errno_module
import os
import threading
from dataclasses import dataclass

from gemini.units import format_bytes

FULL_ERRNOS = frozenset({errno_module.ENOSPC, errno_module.EFBIG, errno_module.EDQUOT})


def cause_of(found: OSError | int | None) -> str:
    """Words for an error or its errno: `ENOSPC, No space left on device`."""
    if isinstance(found, OSError) and found.errno is None:
        return str(found)
    errno = found.errno if isinstance(found, OSError) else found
    if not errno:
        return "it came up short"
    said = getattr(found, "strerror", None) or os.strerror(errno)
    return f"{errno_module.errorcode.get(errno, str(errno))}, {said}"


class NvmeError(RuntimeError):
    """Base of every error of this package."""


class FolderError(NvmeError, ValueError):
    """Folder that cannot hold a store: missing, not writable, RAM, a file."""


class DiskFullError(NvmeError):
    """No space for the store, or a limit on the size of files forbids it."""


class TransferError(NvmeError):
    """Failed or short read or write, or a file that could not be synced or closed."""

    def __init__(
        self, kind: str, path: str, offset: int, nbytes: int, errno: int, done: int = 0
    ) -> None:
        where = f"{nbytes} bytes at offset {offset} of {path} failed after {done}"
        super().__init__(f"{kind} of {where if nbytes else path + ' failed'}: {cause_of(errno)}")
        self.kind, self.path, self.offset, self.nbytes, self.errno = (
            kind, path, offset, nbytes, errno,
        )  # fmt: skip


class FullTransferError(TransferError, DiskFullError):
    """No space for a write, or a limit on the size of files forbids it."""


def transfer_error(
    kind: str, path: str, offset: int, nbytes: int, errno: int, done: int = 0
) -> TransferError:
    """TransferError that fits `errno`."""
    full = kind != "read" and errno in FULL_ERRNOS
    error = FullTransferError if full else TransferError
    return error(kind, path, offset, nbytes, errno, done)


class ChecksumError(NvmeError):
    """Block that does not read back as it was written."""


class WriteBudgetError(NvmeError):
    """Budget that the next step would pass: `nvme_write_budget`."""


counting = threading.Lock()  # bytes: two threads may use one store, or share a meter


@dataclass(slots=True)
class WriteMeter:
    """Meter of all bytes that the files of one owner have written over a run, and may write."""

    budget: int | None = None  # bytes; None is no limit
    written_bytes: int = 0

    def count(self, nbytes: int) -> None:
        """Count bytes whose write begins."""
        with counting:
            self.written_bytes += nbytes

    def check(self, nbytes: int, what: str) -> None:
        """Raise WriteBudgetError if `what` writes `nbytes` and would pass the budget."""
        total = self.written_bytes + nbytes
        if self.budget is not None and total > self.budget:
            raise WriteBudgetError(
                f"{what} writes {format_bytes(nbytes)}, to {format_bytes(total)} in all; "
                f"nvme_write_budget is {format_bytes(self.budget)}. The weights are those of the "
                "last step: save them, then raise the budget or offload a smaller fraction"
            )


class RollbackError(NvmeError):
    """Failed step for whose undo the disk did not give back the state."""


def check_process(pid: int) -> None:
    """Raise NvmeError in a forked child of `pid`: it has none of its threads."""
    if os.getpid() != pid:
        raise NvmeError(
            f"this store belongs to process {pid}; its threads are not in the forked "
            f"process {os.getpid()}. Make the optimizer in the process that trains"
        )
