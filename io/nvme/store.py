"""Store of blocks on disk, each in two versions; a commit makes one step's writes count at once.
Where versions are kept (`versions.py`), a block has so many more.

[Note: two versions] A write goes to the other version of its block, not the committed one. `flush`
waits for the writes and syncs the data, `commit` writes and syncs the index. Until then a read sees
the old version, and `rollback`, or the death of the process, leaves the last commit whole.

[Note: holes] A file has a place for every block of its layout, and space on the disk for those that
are there. A block may leave and come again (`forget`, `remember`): nothing is written for it but
its own bytes. The index does not vouch for a block that is not there.

[Note: commit cannot fail] Ranks agree after `flush`; who commits after that must not fail alone. So
an index that cannot be written still counts in this process, which reads the new versions, and the
store fails the *next* step, on which all ranks agree again. On disk the step before stays whole.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Collection, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.util import Finalize
from pathlib import Path

from gemini.nvme.files.file import OpenFile, check_folder, create_files
from gemini.nvme.files.orphan_files import remove_stepless, store_name
from gemini.tickets import Ticket
from gemini.units import PAGE_BYTES, BlockId, align_up

from .engines import Engine, Transfer
from .engines.threads import ThreadEngine
from .errors import (
    ChecksumError,
    NvmeError,
    TransferError,
    WriteMeter,
    cause_of,
    check_process,
    counting,
)
from .layout import NUM_VERSIONS, Extent, Index, IndexEntry, StoreLayout, joined
from .pinned import PinnedBlock, PinnedVersions
from .pipeline import settle
from .versions import KeptVersions, PinnedVersion

log = logging.getLogger("gemini.nvme")


@dataclass(slots=True)
class DiskTraffic:
    """Bytes moved since the store was made."""

    read_bytes: int = 0
    written_bytes: int = 0


@dataclass(frozen=True, slots=True)
class _Read:
    """Read under way; `wait` verifies the block."""

    inner: Ticket[int]
    path: str
    extent: Extent
    block: BlockId
    expected: int | None  # checksum, None where it is not verified

    def ready(self) -> bool:
        return self.inner.ready()

    def wait(self) -> None:
        checksum = self.inner.wait()
        if self.expected is not None and checksum != self.expected:
            raise ChecksumError(
                f"block {self.block} at offset {self.extent.offset} (+{self.extent.nbytes}) of "
                f"{self.path} has checksum {checksum:#010x}, expected {self.expected:#010x}: "
                "the file was changed or the disk is failing"
            )


class BlockStore:
    """Store of the blocks of a `StoreLayout` in one file per folder, with a place for each.

    Space is allocated for the blocks that are there; the others are holes ([Note: holes]).

    One thread owns a store. Another may read or write blocks meanwhile: those that no thread
    writes, or those that are read of the last commit alone. Buffers are page-aligned and hold whole
    pages.

    folders: one for each file of the layout.
    blocks: those that are there; the others may come by `remember`. None: all.
    engine: closed with the store; None is `threads`.
    meter: of bytes written in all, and their budget.

    Raises ValueError for another number of folders, FolderError or DiskFullError where the files
    cannot be made, TransferError where a header cannot be written. Files of dead processes that
    hold no step are removed ([Note: kept files] in `orphan_files`).
    """

    def __init__(
        self,
        folders: Sequence[str | os.PathLike[str]],
        layout: StoreLayout,
        *,
        blocks: Collection[BlockId] | None = None,
        engine: Engine | None = None,
        checksums: bool = True,
        allow_ram: bool = False,
        label: str = "",
        meter: WriteMeter | None = None,
    ) -> None:
        if len(folders) != layout.num_files:
            raise ValueError(f"{len(folders)} folders for a layout of {layout.num_files} files")
        self._engine = engine or ThreadEngine()
        self._extents = layout.extents()
        self._holes: set[Extent] = set()  # of the files: no space is allocated there
        if blocks is not None:
            there = set(blocks)
            gone = [versions for i, versions in enumerate(self._extents) if i not in there]
            self._holes.update(extent for versions in gone for extent in versions)
        runs = [
            joined([Extent(file, 0, layout.blocks_offset(file)), *self._allocated(file)])
            for file in range(layout.num_files)
        ]
        try:
            paths = [check_folder(folder, allow_ram=allow_ram) for folder in folders]
            remove_stepless(paths)
            self._files = create_files(paths, layout.file_nbytes(), label, runs)
        except BaseException:
            self._engine.close()
            raise
        self.layout = layout
        self.traffic = DiskTraffic()
        self.checksums = checksums
        self.meter = meter or WriteMeter()
        self.versions = KeptVersions(max(0, layout.num_versions - NUM_VERSIONS))
        # as weakref.finalize, and at the end of processes of multiprocessing too
        self._finalizer = Finalize(
            self, _discard, (os.getpid(), self._files, self.versions), exitpriority=0
        )
        self._pending: dict[BlockId, Ticket[int]] = {}
        self._counts = threading.Lock()  # what is pending, and what is committed, as one
        self._index = Index(0, 0, tuple(IndexEntry(1, 0) for _ in range(layout.num_blocks)))
        self._written: set[BlockId] = set()  # blocks that were committed at least once
        self._flushed: dict[BlockId, int] | None = None  # checksums, once `flush` is done
        self._failure: TransferError | None = None  # of the index
        self._pid = os.getpid()
        self._buffer_nbytes = [align_up(nbytes, PAGE_BYTES) for nbytes in layout.block_nbytes]
        self._pins: list[PinnedVersions] = []
        self._file_bytes = sum(nbytes for of_file in runs for _, nbytes in of_file)
        self.pinned_seconds = 0.0  # that writes waited for a reader of pinned versions
        try:
            self._write_headers()
        except BaseException:
            self.close()
            raise

    def _write_headers(self) -> None:
        """Bring name and header of every file to the disk before anything can be committed."""
        for number, file in enumerate(self._files):
            file.write_pages(0, self.layout.header(number))
            if self.layout.num_versions > 1:
                file.sync()
        by_folder = {file.path.parent: file for file in self._files}
        for file in by_folder.values() if self.layout.num_versions > 1 else ():
            file.sync_name()

    @property
    def paths(self) -> tuple[Path, ...]:
        """Paths of the files, one for each folder."""
        return tuple(file.path for file in self._files)

    @property
    def files(self) -> tuple[OpenFile, ...]:
        """Files in the order of `paths`; `close` ends them."""
        return self._files

    @property
    def name(self) -> str:
        """Name with which its files begin, and those of no other store."""
        return store_name(self.paths[0])

    @property
    def committed_step(self) -> int:
        """Step given to the last `commit`; 0 before the first."""
        return self._index.step

    @property
    def file_bytes(self) -> int:
        """Bytes allocated on disk, over all files."""
        return self._file_bytes

    def committed_extent(self, block: BlockId) -> Extent:
        """Extent of the committed version."""
        return self._extents[block][self._index.entries[block].version]

    def buffer_nbytes(self, block: BlockId) -> int:
        """Whole pages that a buffer for this block must hold."""
        return self._buffer_nbytes[block]

    @property
    def is_ours(self) -> bool:
        """Whether this is the process that made the store, and not a forked child of it."""
        return os.getpid() == self._pid

    def check_process(self) -> None:
        """Raise NvmeError in a forked child: it has none of the threads that move blocks."""
        check_process(self._pid)

    def check_step(self, nbytes: int, what: str = "the next step") -> None:
        """Raise if `what`, which writes `nbytes`, must not begin. Writes nothing.

        WriteBudgetError: it would pass the budget. TransferError: the last index was not written.
        """
        self.check_process()
        if self._failure is not None:
            raise self._failure
        self.meter.check(nbytes, what)

    def read(self, block: BlockId, buffer: memoryview, at: Index | None = None) -> Ticket[None]:
        """Begin to read the committed version, or that of a commit that is kept. The ticket raises
        ChecksumError where it does not verify."""
        if block not in self._written:
            raise ValueError(f"block {block} was never committed; there is nothing to read")
        entry = (at or self._index).entries[block]
        return self._read(block, self._extents[block][entry.version], entry.checksum, buffer)

    def read_uncommitted(self, block: BlockId, buffer: memoryview) -> Ticket[None]:
        """Begin to read the version written since the last commit, to undo it by hand."""
        checksum = self._pending[block].wait()
        other = self._extents[block][self._next_version(block)]
        return self._read(block, other, checksum, buffer)

    def read_latest(self, block: BlockId, buffer: memoryview) -> Ticket[None]:
        """Begin to read the version written since the last commit, which another thread may be
        about to commit; without one, or where its write failed, the committed version.

        Waits until it is written.
        """
        ticket = self._pending.get(block)
        is_written = ticket is not None
        try:
            if ticket is not None:
                ticket.wait()
        except NvmeError:  # whoever wrote it is told
            is_written = False
        # Between the look and the read another thread's commit may turn the versions round: the
        # lock makes them one.
        with self._counts:
            if is_written and self._pending.get(block) is ticket:
                return self.read_uncommitted(block, buffer)
            return self.read(block, buffer)

    def write(self, block: BlockId, buffer: memoryview) -> Ticket[int]:
        """Begin to write a block's other version. It counts after `commit`."""
        # The version that does not count. A save may still read it, as it did count when the save
        # began: then the write waits for that reader.
        version = 1 - self._index.entries[block].version
        if self.versions.most:
            version = self._next_version(block)
        if self._pins:
            for pin in self._pins:
                self.pinned_seconds += pin.wait_to_overwrite(block, version)
            self._pins = [pin for pin in self._pins if pin.is_held]
        extent = self._extents[block][version]
        ticket = self._engine.write(self._transfer(block, extent, buffer))
        self._pending[block] = ticket
        self._flushed = None
        with counting:
            self.traffic.written_bytes += extent.nbytes
            self.meter.written_bytes += extent.nbytes
        return ticket

    def flush(self) -> None:
        """Wait for every write since the last commit and sync the data; raises the first error."""
        if self._flushed is not None:
            return
        # All writes come before one sync of each file, as a sync is the dear part. Ranks agree
        # after it: whatever can fail must have failed here.
        checksums = {block: ticket.wait() for block, ticket in self._pending.items()}
        for number in sorted({self.layout.file_of_block[block] for block in checksums}):
            self._files[number].sync()
        self._flushed = checksums

    def commit(self, step: int) -> None:
        """Make every write since the last commit count, at once and durably.

        Raises the errors of `flush`, and commits nothing then; after a `flush` it does not raise
        ([Note: commit cannot fail]). Raises ValueError where blocks have one version.
        """
        if self.layout.num_versions == 1:
            raise ValueError("a store of one version commits nothing; expected one of two")
        self.flush()
        assert self._flushed is not None
        entries = list(self._index.entries)
        for block, checksum in self._flushed.items():
            version = 1 - entries[block].version
            if self.versions.most:
                version = self._next_version(block)
            entries[block] = IndexEntry(version, checksum)
        before = self._index
        with self._counts:
            # In memory before on disk: readers of another thread see all blocks turn at once, and
            # an index that cannot be written counts all the same ([Note: commit cannot fail]).
            self._index = Index(self._index.sequence + 1, step, tuple(entries))
            self._written.update(self._flushed)
            self._pending.clear()
            self._flushed = None
        if self.versions.most:
            self.versions.committed(before, self._index)
        self._write_index()

    def _next_version(self, block: BlockId) -> int:
        """Version of a block that a write goes to. The same until a commit or a pin."""
        if self.versions.most:
            return self.versions.free_version(block, self._index)
        return 1 - self._index.entries[block].version

    @property
    def last(self) -> Index:
        """Index of the last commit."""
        return self._index

    def rewind(self, steps: int) -> None:
        """Make the commit of `steps` steps before the last one again, durably and without a block
        written.

        Commits after it are forgotten, and so are writes that were not committed; step numbers go
        on. Raises ValueError where so many are not kept; see `commit` for an index that fails.
        """
        history = self.versions.history
        if not 1 <= steps <= len(history):
            raise ValueError(f"{steps} steps back, and {len(history)} are kept")
        self.rollback()
        entries = history[-steps].entries
        with self._counts:
            self._index = Index(self._index.sequence + 1, self._index.step, entries)
        self.versions.rewound(steps)
        self._write_index()

    def pin_last(self, witness: Path) -> PinnedVersion:
        """Keep the last commit while `witness` is there; see `KeptVersions.pin`."""
        # a pin may change which version is free, so no write may be under way to one
        self.rollback()
        return self.versions.pin(self._index, witness, self.paths)

    def _write_index(self) -> None:
        try:
            # Two places take turns: a power cut while one is written leaves the other.
            offset = self.layout.index_offset(self._index.sequence % 2)
            self._files[0].write_pages(offset, self._index.encode())
            self._files[0].sync()
        except TransferError as error:
            log.error("the index of step %d was not written: %s", self.committed_step, error)
            self._failure = error

    def rollback(self) -> None:
        """Forget every write since the last commit. Waits until they have ended."""
        for ticket in self._pending.values():
            settle(ticket)
        self._pending.clear()
        self._flushed = None

    def forget(self, blocks: Sequence[BlockId]) -> None:
        """Forget these blocks: their space goes back to the file system, where that can take it. No
        transfer is under way; waits for readers of pinned versions.

        From the next commit on `recover` refuses them, as blocks that do not verify.
        """
        # a save that was told of these blocks may not have read all of them
        for pin in self._pins:
            pin.wait_until_let_go()
        entries = list(self._index.entries)
        for block in blocks:
            self._written.discard(block)
            entry = entries[block]
            # the wrong checksum on purpose: the next index must not vouch for pages that are gone
            entries[block] = IndexEntry(entry.version, entry.checksum ^ 0xFFFFFFFF)
            self._punch(self._extents[block])
        self._index = Index(self._index.sequence, self._index.step, tuple(entries))

    def remember(self, blocks: Sequence[BlockId]) -> None:
        """Take space for blocks that were never there, or were forgotten: they can be written, and
        read once that was committed.

        Raises DiskFullError or FolderError, and then nothing has changed.
        """
        wanted = [extent for block in blocks for extent in dict.fromkeys(self._extents[block])]
        missing = [extent for extent in wanted if extent in self._holes]
        try:
            for number, file in enumerate(self._files):
                file.reserve(joined(extent for extent in missing if extent.file == number))
        except BaseException:
            self._punch(missing)
            raise
        self._holes.difference_update(missing)
        self._file_bytes += sum(extent.nbytes for extent in missing)

    def _punch(self, extents: Iterable[Extent]) -> None:
        for extent in dict.fromkeys(extents):  # one, where a block has one version
            taken = self._files[extent.file].punch(extent.offset, extent.nbytes)
            if taken and extent not in self._holes:
                self._holes.add(extent)
                self._file_bytes -= extent.nbytes

    def _allocated(self, file: int) -> list[Extent]:
        """Extents of a file that are no holes, in its order."""
        extents = (extent for versions in self._extents for extent in dict.fromkeys(versions))
        return [e for e in extents if e.file == file and e not in self._holes]

    def pin(self, blocks: Sequence[BlockId]) -> PinnedVersions:
        """Keep the committed versions of these blocks until they are let go.

        Commits go on; a write over a pinned version waits. `close` waits for all.
        """
        pinned = {}
        for block in blocks:
            entry = self._index.entries[block]
            extent = self._extents[block][entry.version]
            checksum = entry.checksum if self.checksums else None
            pinned[block] = PinnedBlock(self._files[extent.file], extent, entry.version, checksum)
        self._pins.append(PinnedVersions(pinned))
        return self._pins[-1]

    def close(self) -> None:
        """Wait for transfers, remove the files. Nothing happens in a forked child, or a second
        time.

        Raises TransferError where a file cannot be closed; then all is done but for that.
        """
        if self._finalizer.still_active() and self.is_ours:
            for pin in self._pins:
                pin.wait_until_let_go()
            self.rollback()
            self._engine.close()
            self._finalizer()
            with ExitStack() as stack:
                for file in self._files:
                    stack.callback(file.close)

    def _read(
        self, block: BlockId, extent: Extent, checksum: int, buffer: memoryview
    ) -> Ticket[None]:
        inner = self._engine.read(self._transfer(block, extent, buffer))
        with counting:
            self.traffic.read_bytes += extent.nbytes
        path = str(self._files[extent.file].path)
        return _Read(inner, path, extent, block, checksum if self.checksums else None)

    def _transfer(self, block: BlockId, extent: Extent, buffer: memoryview) -> Transfer:
        if os.getpid() != self._pid:
            check_process(self._pid)  # raises
        if buffer.nbytes < extent.nbytes:
            raise ValueError(
                f"buffer of {buffer.nbytes} bytes for block {block} of {extent.nbytes} bytes"
            )
        file = self._files[extent.file]
        view = buffer[: extent.nbytes]
        return Transfer(file, extent.offset, view, self.checksums)


def _discard(pid: int, files: tuple[OpenFile, ...], versions: KeptVersions) -> None:
    """Remove the files, unless this is a forked child of the process that made them, or a version
    in them is pinned."""
    if os.getpid() != pid:
        return
    stays = bool(versions.pinned)
    try:
        stays = versions.most > 0 and versions.say([file.path for file in files], is_closed=True)
    except OSError as error:
        log.warning("%s was not removed: %s", files[0].path, cause_of(error.errno))
    if stays:
        log.info("%s stays: a checkpoint is pinned to it", files[0].path)
        return
    for file in files:
        file.unlink()
