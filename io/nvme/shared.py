"""Shared blocks: written once and never changed, one file for all processes of a host that have the
same ones, named by a digest of its content.

Through the page cache, so buffers need be no whole pages.

[Note: shared files] Readers hold a shared lock. Who finds no file makes it, and holds the exclusive
lock until the index is there: the others wait for it. Without an index a file is one whose writer
died, and is made anew. Who has a file last removes it, as do `remove_stepless` and `remove_orphans`
where that process died: a lock that can be had means that nobody reads.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from multiprocessing.util import Finalize
from pathlib import Path

from gemini.nvme.files.file import OpenFile, explained
from gemini.nvme.files.orphan_files import PREFIX, SUFFIX
from gemini.tickets import Ticket
from gemini.units import BlockId

from .engines import Engine, Transfer
from .errors import ChecksumError, FolderError, TransferError
from .files import calls
from .layout import Index, IndexEntry, StoreLayout

MakeBlocks = Callable[[], Iterable[memoryview]]


@dataclass(frozen=True, slots=True)
class _SharedRead:
    """A read under way; `wait` verifies the block."""

    inner: Ticket[int]
    block: BlockId
    blocks: SharedBlocks

    def ready(self) -> bool:
        return self.inner.ready()

    def wait(self) -> None:
        try:
            checksum = self.inner.wait()
        except TransferError as error:
            if error.errno:
                raise
            self.blocks.refuse(self.block)
        self.blocks.verify(self.block, checksum)


class SharedBlocks:
    """Blocks of one file; see [Note: shared files]. One thread owns it, another may read.

    digest: of the blocks, which names the file. what: the blocks in words.
    blocks: makes them one after the other, where no file has them yet.
    written_bytes: bytes that this process wrote; 0 where a file was there.

    Raises DiskFullError or FolderError where no file can be made, TransferError where one cannot be
    read or written.
    """

    def __init__(
        self,
        folder: Path,
        digest: str,
        block_nbytes: Sequence[int],
        engine: Engine,
        blocks: MakeBlocks,
        *,
        what: str,
    ) -> None:
        self.digest = digest
        self.written_bytes = 0
        self._what = what
        self._engine = engine
        self._layout = StoreLayout.plan(digest, block_nbytes, num_versions=1)
        self._extents = [versions[0] for versions in self._layout.extents()]
        self.file_bytes = sum(self._layout.file_nbytes())  # of the file, which others may have too
        self._path = folder / f"{PREFIX}base-{os.geteuid()}-{digest}-0{SUFFIX}"
        self._file, self._index = self._reach(blocks)
        # as weakref.finalize, and at the end of processes of multiprocessing too
        self._finalizer = Finalize(self, _let_go, (os.getpid(), self._file), exitpriority=0)

    @property
    def path(self) -> Path:
        """Path of the file."""
        return self._path

    def read(self, block: BlockId, buffer: memoryview) -> Ticket[None]:
        """Begin to fill the first bytes of `buffer`. The ticket raises ChecksumError where they are
        others than were written."""
        extent = self._extents[block]
        view = buffer[: self._layout.block_nbytes[block]]
        inner = self._engine.read(Transfer(self._file, extent.offset, view, True))
        return _SharedRead(inner, block, self)

    def close(self) -> None:
        """Let the file go: it is removed with the last process that has it. No transfer is under
        way. Nothing happens in a forked child, or a second time."""
        if self._finalizer.still_active():
            self._finalizer()

    def verify(self, block: BlockId, checksum: int) -> None:
        """Raise ChecksumError for another checksum than was written."""
        if checksum != self._index.entries[block].checksum:
            self.refuse(block)

    def refuse(self, block: BlockId) -> None:
        """Remove the file, so that no process takes it any more. Raises ChecksumError."""
        self._file.unlink()
        extent = self._extents[block]
        raise ChecksumError(
            f"{self._path} was changed while it was in use, or the disk is failing: the "
            f"{extent.nbytes} bytes at offset {extent.offset} of {self._what} are others than were "
            "written. It was removed: start again from the last checkpoint, which writes it anew "
            "from the base that is loaded, and leave files of a run alone"
        )

    # -- inside --

    def _reach(self, blocks: MakeBlocks) -> tuple[OpenFile, Index]:
        # A name may come and go until this process has its lock, so every look at the file is
        # repeated under it: one without a name (st_nlink 0) was removed in between, and the next
        # turn opens or makes another.
        while True:
            try:
                file = _open(self._path)
                made = file is None
                file = file or _create(self._path)
            except FileExistsError:
                continue  # another has just made it
            except OSError as error:
                raise explained(self._path, error) from error
            try:
                calls.lock(file.fd, calls.LOCK_EX if made else calls.LOCK_SH)
                if made and os.fstat(file.fd).st_nlink:
                    self._write(file, blocks)
                    calls.lock(file.fd, calls.LOCK_SH)
                index = self._index_in(file)
                if os.fstat(file.fd).st_nlink and index is not None:
                    return file, index
                if index is None:  # its writer died
                    calls.lock(file.fd, calls.LOCK_EX)
                    if self._index_in(file) is None:
                        file.unlink()
            except BaseException as error:
                if made:
                    file.unlink()
                file.close()
                if isinstance(error, OSError):
                    raise explained(self._path, error) from error
                raise
            file.close()

    def _index_in(self, file: OpenFile) -> Index | None:
        """Index of the file; None where it is not of this layout, or not whole."""
        header = self._layout.header(0)
        if os.pread(file.fd, len(header), 0) != header:
            return None
        if os.fstat(file.fd).st_size < self.file_bytes:
            return None
        slot = os.pread(file.fd, self._layout.index_slot_nbytes, self._layout.index_offset(0))
        return Index.decode(slot, self._layout.num_blocks)

    def _write(self, file: OpenFile, blocks: MakeBlocks) -> None:
        """Write the blocks, and the index when they are on the disk."""
        file.reserve([(0, self.file_bytes)])
        _write(file, 0, self._layout.header(0))
        entries = []
        for extent, view in zip(self._extents, blocks(), strict=True):
            transfer = Transfer(file, extent.offset, view, True)
            entries.append(IndexEntry(0, self._engine.write(transfer).wait()))
            self.written_bytes += view.nbytes
        calls.fdatasync(file.fd)
        _write(file, self._layout.index_offset(0), Index(1, 0, tuple(entries)).encode())


def _open(path: Path) -> OpenFile | None:
    """Open it to read; None without a file. Raises FolderError for one of another user."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        file = OpenFile(path, calls.open_file(path, flags), direct=False, keeps_cache=True)
    except FileNotFoundError:
        return None
    status = os.fstat(file.fd)
    if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid():
        return file
    file.close()
    raise FolderError(f"{path} is no file of this user; remove it, or name another nvme folder")


def _create(path: Path) -> OpenFile:
    """Create it. No other descriptor than this one can write to it."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return OpenFile(path, calls.open_file(path, flags, 0o400), direct=False, keeps_cache=True)


def _write(file: OpenFile, offset: int, data: bytes) -> None:
    done = 0
    while done < len(data):
        done += calls.pwritev(file.fd, [data[done:]], offset + done)


def _let_go(pid: int, file: OpenFile) -> None:
    """Close it, and remove it where no other process has it; not in a forked child."""
    if os.getpid() != pid:
        return
    with contextlib.suppress(OSError):  # another has it
        calls.lock(file.fd, calls.LOCK_EX | calls.LOCK_NB)
        file.unlink()
    file.close()
