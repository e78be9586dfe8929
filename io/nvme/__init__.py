"""Blocks of optimizer state on NVMe: direct I/O, two versions of every block, checksums.

Imported as `nvme`; `io/` is a source root, not a package (docs/adr/0001). No torch in here.
"""

from nvme.files.file import OpenFile, check_folder, create_direct, default_folder, open_direct
from nvme.files.orphan_files import Left, left_in, orphans, remove_orphans
from nvme.files.recovery import Recovered, recover

from .checksum import PIECE_BYTES, checksum_of
from .engine import Engine, Transfer
from .engines.threads import ThreadEngine
from .errors import (
    ChecksumError,
    DiskFullError,
    FolderError,
    NvmeError,
    RollbackError,
    TransferError,
    WriteBudgetError,
    cause_of,
    transfer_error,
)
from .files import calls
from .layout import FORMAT_VERSION, FormatError, StoreLayout
from .pinned import PinnedVersions
from .pipeline import WriteBehind, read_ahead, settle
from .pool import Buffer, BufferPool, Pin
from .probe import CANDIDATES, Probe, Speed, make_engine, probe
from .store import BlockStore, WriteMeter

__all__ = [
    "CANDIDATES",
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
    "Left",
    "NvmeError",
    "OpenFile",
    "Pin",
    "PinnedVersions",
    "Probe",
    "Recovered",
    "RollbackError",
    "Speed",
    "StoreLayout",
    "ThreadEngine",
    "Transfer",
    "TransferError",
    "WriteBehind",
    "WriteBudgetError",
    "WriteMeter",
    "calls",
    "cause_of",
    "check_folder",
    "checksum_of",
    "create_direct",
    "default_folder",
    "left_in",
    "make_engine",
    "open_direct",
    "orphans",
    "probe",
    "read_ahead",
    "recover",
    "remove_orphans",
    "settle",
    "transfer_error",
]
