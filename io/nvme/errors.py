"""What can go wrong on a disk, as types."""

from __future__ import annotations

import errno as errno_module


class NvmeError(RuntimeError):
    """Base of every error of this package."""


class FolderError(NvmeError, ValueError):
    """A folder that cannot hold a store: missing, not writable, RAM, a file."""


class DiskFullError(NvmeError):
    """The store does not fit: no space, or a limit on the size of files."""


class TransferError(NvmeError):
    """A read or a write that failed or came up short."""

    def __init__(
        self, kind: str, path: str, offset: int, nbytes: int, errno: int, done: int = 0
    ) -> None:
        cause = errno_module.errorcode.get(errno, str(errno)) if errno else "it came up short"
        super().__init__(
            f"{kind} of {nbytes} bytes at offset {offset} of {path} failed after {done}: {cause}"
        )
        self.kind, self.path, self.offset, self.nbytes, self.errno = (
            kind, path, offset, nbytes, errno,
        )  # fmt: skip


class ChecksumError(NvmeError):
    """A block that does not read back as it was written."""


class WriteBudgetError(NvmeError):
    """The next step would write more than `nvme_write_budget` allows."""


FULL_ERRNOS = frozenset({errno_module.ENOSPC, errno_module.EFBIG, errno_module.EDQUOT})
