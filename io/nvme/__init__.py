"""Blocks of optimizer state on NVMe: direct I/O, two versions of every block, checksums.

Imported as `gemini.nvme`, or `nvme`; `io/` is a source root, not a package (docs/adr/0001). No
torch in here.
"""

if __name__ == "nvme":
    from gemini import names

    names.is_long(__name__)
from gemini.nvme.engines import Engine, Transfer
from gemini.nvme.engines.threads import ThreadEngine
from gemini.nvme.errors import (
    ChecksumError,
    DiskFullError,
    FolderError,
    NvmeError,
    RollbackError,
    TransferError,
    WriteBudgetError,
    cause_of,
    check_process,
    transfer_error,
)
from gemini.nvme.files import calls
from gemini.nvme.files.file import (
    OpenFile,
    check_folder,
    create_direct,
    default_folder,
    open_direct,
)
from gemini.nvme.files.orphan_files import (
    Left,
    is_gone,
    left_in,
    orphans,
    remove_orphans,
    remove_stepless,
    remove_superseded,
)
from gemini.nvme.files.recovery import Recovered, recover
from gemini.nvme.layout import (
    FORMAT_VERSION,
    MOST_VERSIONS,
    PIECE_BYTES,
    Index,
    IndexEntry,
    StoreFormatError,
    StoreLayout,
    checksum_of,
)
from gemini.nvme.pinned import PinnedVersions
from gemini.nvme.pipeline import WriteBehind, read_ahead, settle
from gemini.nvme.pool import Buffer, BufferPool, Pin
from gemini.nvme.probe import Speed, make_engine, measure_disks, probe
from gemini.nvme.shared import SharedBlocks
from gemini.nvme.store import BlockStore, WriteMeter
from gemini.nvme.versions import KeptVersions, PinnedVersion

__all__ = [
    "FORMAT_VERSION",
    "MOST_VERSIONS",
    "PIECE_BYTES",
    "BlockStore",
    "Buffer",
    "BufferPool",
    "ChecksumError",
    "DiskFullError",
    "Engine",
    "FolderError",
    "Index",
    "IndexEntry",
    "KeptVersions",
    "Left",
    "NvmeError",
    "OpenFile",
    "Pin",
    "PinnedVersion",
    "PinnedVersions",
    "Recovered",
    "RollbackError",
    "SharedBlocks",
    "Speed",
    "StoreFormatError",
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
    "check_process",
    "checksum_of",
    "create_direct",
    "default_folder",
    "is_gone",
    "left_in",
    "make_engine",
    "measure_disks",
    "open_direct",
    "orphans",
    "probe",
    "read_ahead",
    "recover",
    "remove_orphans",
    "remove_stepless",
    "remove_superseded",
    "settle",
    "transfer_error",
]
