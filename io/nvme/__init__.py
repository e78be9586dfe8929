"""Blocks of optimizer state on NVMe: direct I/O, two versions of every block, checksums.

Imported as `nvme`; `io/` is a source root, not a package (docs/adr/0001). No torch in here.
"""

from .engine import PIECE_BYTES, Engine, Transfer
from .engines.threads import ThreadEngine
from .errors import (
    ChecksumError,
    DiskFullError,
    FolderError,
    NvmeError,
    TransferError,
    WriteBudgetError,
)
from .file import check_folder, default_folder, orphans, remove_orphans
from .layout import FORMAT_VERSION, FormatError, StoreLayout
from .pool import Buffer, BufferPool
from .store import BlockStore, recover

__all__ = [
    "FORMAT_VERSION",
    "PIECE_BYTES",
    "BlockStore",
    "Buffer",
    "BufferPool",
    "ChecksumError",
    "DiskFullError",
    "Engine",
    "FolderError",
    "FormatError",
    "NvmeError",
    "StoreLayout",
    "ThreadEngine",
    "Transfer",
    "TransferError",
    "WriteBudgetError",
    "check_folder",
    "default_folder",
    "orphans",
    "recover",
    "remove_orphans",
]
