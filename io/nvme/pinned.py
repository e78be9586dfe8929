"""Pinned versions of blocks: committed ones that are kept until a reader has read them.

Every block has two versions. The step after a pin writes the other one; the step after that would
write over what is pinned, and its write waits until the reader has let that block go. So a reader
that goes in the order in which blocks are overwritten has more than a step's time for each.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass

from gemini.nvme.files.file import OpenFile
from gemini.tickets import Ticket
from gemini.units import BlockId

from .engines import Engine, Transfer
from .engines.threads import ThreadEngine
from .errors import ChecksumError
from .layout import Extent


@dataclass(frozen=True, slots=True)
class PinnedBlock:
    """Place of one version of one block."""

    file: OpenFile
    extent: Extent
    version: int
    checksum: int | None  # None where it is not verified


class PinnedVersions:
    """Versions of blocks as the last commit left them. The reader has a thread of its own."""

    def __init__(self, blocks: Mapping[BlockId, PinnedBlock]) -> None:
        self._blocks = dict(blocks)
        self._held = set(blocks)
        self._changed = threading.Condition()
        self._engine: Engine = ThreadEngine()

    def read(self, block: BlockId, buffer: memoryview) -> Ticket[int]:
        """Begin to read a block that was not let go."""
        assert block in self._held
        pinned = self._blocks[block]
        view = buffer[: pinned.extent.nbytes]
        return self._engine.read(
            Transfer(pinned.file, pinned.extent.offset, view, pinned.checksum is not None)
        )

    def check(self, block: BlockId, checksum: int) -> None:
        """Raise ChecksumError where a read of `block` did not give what was committed."""
        pinned = self._blocks[block]
        if pinned.checksum is not None and checksum != pinned.checksum:
            raise ChecksumError(
                f"block {block} at offset {pinned.extent.offset} of {pinned.file.path} has "
                f"checksum {checksum:#010x}, expected {pinned.checksum:#010x}"
            )

    def let_go(self, block: BlockId) -> None:
        """Let the store write over the block."""
        with self._changed:
            self._held.discard(block)
            self._changed.notify_all()

    def close(self) -> None:
        """Let go of all blocks. Waits for reads."""
        self._engine.close()
        with self._changed:
            self._held.clear()
            self._changed.notify_all()

    # -- for the store --

    @property
    def is_held(self) -> bool:
        """Whether a block is still to be read."""
        return bool(self._held)

    def wait_to_overwrite(self, block: BlockId, version: int) -> float:
        """Wait until this version of `block` may be written over. Returns seconds waited."""
        # The look without the lock is safe: blocks are only ever taken out of the set.
        if block not in self._held or self._blocks[block].version != version:
            return 0.0
        started = time.perf_counter()
        with self._changed:
            self._changed.wait_for(lambda: block not in self._held)
        return time.perf_counter() - started

    def wait_until_let_go(self) -> None:
        """Wait until all blocks are let go."""
        with self._changed:
            self._changed.wait_for(lambda: not self._held)
