"""Recovery of the last commit of a process that died, or of a machine that lost its power."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from gemini.nvme.errors import ChecksumError, cause_of
from gemini.nvme.layout import (
    HEADER_LIMIT,
    NUM_VERSIONS,
    Extent,
    Header,
    Index,
    StoreFormatError,
    StoreLayout,
    checksum_of,
)
from gemini.strangers import open_regular

from . import calls


@dataclass(frozen=True, slots=True)
class Recovered:
    """Commit of a store, read only. Its `fds` are closed by leaving `recover`."""

    layout: StoreLayout
    index: Index
    fds: tuple[int, ...]
    _extents: tuple[tuple[Extent, ...], ...]

    def extent(self, block: int) -> Extent:
        """Extent of the committed version of one block."""
        return self._extents[block][self.index.entries[block].version]

    def block(self, block: int) -> bytes:
        """Committed bytes of one block. Raises ChecksumError where they do not verify."""
        entry, extent = self.index.entries[block], self.extent(block)
        data = os.pread(self.fds[extent.file], extent.nbytes, extent.offset)
        if checksum_of(data) != entry.checksum:
            raise ChecksumError(f"block {block} of a recovered store does not verify")
        return data[: self.layout.block_nbytes[block]]


@contextmanager
def recover(
    paths: Sequence[str | os.PathLike[str]], step: int | None = None, pinned: Index | None = None
) -> Iterator[Recovered]:
    """Open the files of a dead process's store, in order, to read its last commit.

    step: the commit of this step, which must be the last one or the one before. Stores that are
    committed one after the other have at most one step between them, so each still has the least.
    pinned: an earlier commit, which the store keeps; its process may live.
    Raises StoreFormatError where there is no such commit, or a file is not one of a whole store.
    """
    fds: list[int] = []
    try:
        headers: list[Header] = []
        for path in paths:
            fds.append(_open(path))
            headers.append(_header(path, fds[-1]))
            if replace(headers[-1], file=0, nbytes=0) != replace(headers[0], file=0, nbytes=0):
                raise StoreFormatError(f"{path} belongs to another store than {paths[0]}")
        expected = headers[0].num_files if headers else None
        if [header.file for header in headers] != list(range(expected or 1)):
            raise StoreFormatError(
                f"{', '.join(map(str, paths)) or 'no path'}: files "
                f"{[header.file for header in headers]} of a store of {expected}; expected all, in "
                "order"
            )
        layout = headers[0].layout()
        # Both slots may be whole: the last commit has the larger sequence. A slot whose write was
        # torn decodes to None, and the commit before it is in the other.
        slots = [
            Index.decode(
                os.pread(fds[0], layout.index_slot_nbytes, layout.index_offset(slot)),
                layout.num_blocks,
                layout.num_versions,
            )
            for slot in range(NUM_VERSIONS)
        ]
        live = [index for index in slots if index is not None and step in (None, index.step)]
        if pinned is not None:
            live = [pinned] if _fits(pinned, layout) else []
        if not live:
            raise StoreFormatError(
                f"{paths[0]} holds no committed step" + f" {step}" * (step is not None)
            )
        last = max(live, key=lambda index: index.sequence)
        yield Recovered(layout, last, tuple(fds), layout.extents())
    finally:
        for fd in fds:
            calls.close(fd)


def _fits(index: Index, layout: StoreLayout) -> bool:
    versions = {entry.version for entry in index.entries}
    return len(index.entries) == layout.num_blocks and max(versions) < layout.num_versions


def _open(path: str | os.PathLike[str]) -> int:
    """Open a regular file, and no link to one. Raises StoreFormatError."""
    try:
        if os.path.islink(path):
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
        return open_regular(path)
    except OSError as error:
        raise StoreFormatError(f"{path} cannot be opened: {cause_of(error)}") from error


def _header(path: str | os.PathLike[str], fd: int) -> Header:
    try:
        header = Header.decode(os.pread(fd, HEADER_LIMIT, 0))
        header.check_size(os.fstat(fd).st_size)
    except StoreFormatError as error:
        raise StoreFormatError(f"{path}: {error}") from error
    return header
