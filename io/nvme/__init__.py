"""Blocks of optimizer state on NVMe: direct I/O, two versions of every block, checksums.

Imported as `gemini.nvme`, or `nvme`; `io/` is a source root, not a package (docs/adr/0001). No
torch in here. Names are imported on first use: without state on disk none of this is loaded.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if __name__ == "nvme":
    from gemini import names

    names.is_long(__name__)
if TYPE_CHECKING:
    from gemini.nvme.engines import Engine as Engine
    from gemini.nvme.engines import Transfer as Transfer
    from gemini.nvme.engines.threads import ThreadEngine as ThreadEngine
    from gemini.nvme.errors import ChecksumError as ChecksumError
    from gemini.nvme.errors import DiskFullError as DiskFullError
    from gemini.nvme.errors import FolderError as FolderError
    from gemini.nvme.errors import NvmeError as NvmeError
    from gemini.nvme.errors import RollbackError as RollbackError
    from gemini.nvme.errors import TransferError as TransferError
    from gemini.nvme.errors import WriteBudgetError as WriteBudgetError
    from gemini.nvme.errors import WriteMeter as WriteMeter
    from gemini.nvme.errors import cause_of as cause_of
    from gemini.nvme.errors import check_process as check_process
    from gemini.nvme.errors import transfer_error as transfer_error
    from gemini.nvme.files import calls as calls
    from gemini.nvme.files.file import OpenFile as OpenFile
    from gemini.nvme.files.file import check_folder as check_folder
    from gemini.nvme.files.file import create_direct as create_direct
    from gemini.nvme.files.file import default_folder as default_folder
    from gemini.nvme.files.file import local_folder as local_folder
    from gemini.nvme.files.file import open_direct as open_direct
    from gemini.nvme.files.orphan_files import Left as Left
    from gemini.nvme.files.orphan_files import is_gone as is_gone
    from gemini.nvme.files.orphan_files import left_in as left_in
    from gemini.nvme.files.orphan_files import orphans as orphans
    from gemini.nvme.files.orphan_files import remove_orphans as remove_orphans
    from gemini.nvme.files.orphan_files import remove_stepless as remove_stepless
    from gemini.nvme.files.orphan_files import remove_superseded as remove_superseded
    from gemini.nvme.files.recovery import Recovered as Recovered
    from gemini.nvme.files.recovery import recover as recover
    from gemini.nvme.layout import FORMAT_VERSION as FORMAT_VERSION
    from gemini.nvme.layout import MOST_VERSIONS as MOST_VERSIONS
    from gemini.nvme.layout import PIECE_BYTES as PIECE_BYTES
    from gemini.nvme.layout import Index as Index
    from gemini.nvme.layout import IndexEntry as IndexEntry
    from gemini.nvme.layout import StoreFormatError as StoreFormatError
    from gemini.nvme.layout import StoreLayout as StoreLayout
    from gemini.nvme.layout import checksum_of as checksum_of
    from gemini.nvme.pinned import PinnedVersions as PinnedVersions
    from gemini.nvme.pipeline import WriteBehind as WriteBehind
    from gemini.nvme.pipeline import read_ahead as read_ahead
    from gemini.nvme.pipeline import settle as settle
    from gemini.nvme.pool import Buffer as Buffer
    from gemini.nvme.pool import BufferPool as BufferPool
    from gemini.nvme.pool import Pin as Pin
    from gemini.nvme.probing import Speed as Speed
    from gemini.nvme.probing import make_engine as make_engine
    from gemini.nvme.probing import measure_disks as measure_disks
    from gemini.nvme.probing import probe as probe
    from gemini.nvme.shared import SharedBlocks as SharedBlocks
    from gemini.nvme.store import BlockStore as BlockStore
    from gemini.nvme.versions import KeptVersions as KeptVersions
    from gemini.nvme.versions import PinnedVersion as PinnedVersion

_HOME = {
    "BlockStore": "store",
    "Buffer": "pool",
    "BufferPool": "pool",
    "ChecksumError": "errors",
    "DiskFullError": "errors",
    "Engine": "engines",
    "FORMAT_VERSION": "layout",
    "FolderError": "errors",
    "Index": "layout",
    "IndexEntry": "layout",
    "KeptVersions": "versions",
    "Left": "files.orphan_files",
    "MOST_VERSIONS": "layout",
    "NvmeError": "errors",
    "OpenFile": "files.file",
    "PIECE_BYTES": "layout",
    "Pin": "pool",
    "PinnedVersion": "versions",
    "PinnedVersions": "pinned",
    "Recovered": "files.recovery",
    "RollbackError": "errors",
    "SharedBlocks": "shared",
    "Speed": "probing",
    "StoreFormatError": "layout",
    "StoreLayout": "layout",
    "ThreadEngine": "engines.threads",
    "Transfer": "engines",
    "TransferError": "errors",
    "WriteBehind": "pipeline",
    "WriteBudgetError": "errors",
    "WriteMeter": "errors",
    "calls": "files",
    "cause_of": "errors",
    "check_folder": "files.file",
    "check_process": "errors",
    "checksum_of": "layout",
    "create_direct": "files.file",
    "default_folder": "files.file",
    "is_gone": "files.orphan_files",
    "left_in": "files.orphan_files",
    "local_folder": "files.file",
    "make_engine": "probing",
    "measure_disks": "probing",
    "open_direct": "files.file",
    "orphans": "files.orphan_files",
    "probe": "probing",
    "read_ahead": "pipeline",
    "recover": "files.recovery",
    "remove_orphans": "files.orphan_files",
    "remove_stepless": "files.orphan_files",
    "remove_superseded": "files.orphan_files",
    "settle": "pipeline",
    "transfer_error": "errors",
}
__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"gemini.nvme.{_HOME[name]}"), name)
