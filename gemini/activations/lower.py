"""Tiers below the device's memory, for saved tensors: a file, where the device is the CPU.

A GPU has host memory between the two: `gemini.activations.host`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torch import UntypedStorage

from gemini.nvme import PIECE_BYTES, WriteMeter

from .file import FileCopy, FileRead, SavedFile
from .saved import Arrival, Copy

Moved = tuple[int, int, int, int]  # bytes to the host and back, to files and back, so far


class LowerTier(Protocol):
    """Where storages go that leave the device's memory. One thread at a time."""

    @property
    def staging_bytes(self) -> int:
        """Bytes of host memory through which they pass."""
        ...

    @property
    def in_flight_bytes(self) -> int:
        """Bytes that may be on their way before anybody waits."""
        ...

    def moved(self) -> Moved: ...

    def attach_meter(self, meter: WriteMeter) -> None:
        """Count what files are written in an optimizer's meter; see `SavedFile.attach_meter`."""
        ...

    def release_staging(self) -> None:
        """Give `staging_bytes` back until something is written."""
        ...

    def save(self, storage: UntypedStorage) -> Copy | None:
        """Begin to copy a storage, as it is now; it must stay until `is_saved`. None: memory has no
        room for it. Raises NvmeError, before anything is copied, where a disk has none."""
        ...

    def is_saved(self, copy: Copy, *, wait: bool = False) -> bool:
        """Whether the storage may be let go. Raises NvmeError where the copy failed."""
        ...

    def load(self, copy: Copy) -> Arrival:
        """Begin to bring a saved storage back. Raises NvmeError."""
        ...

    def drop(self, copy: Copy, arrival: Arrival | None) -> None:
        """Give a copy's room to others. arrival: of the copy, that nobody has waited for."""
        ...

    def close(self) -> None:
        """Give everything back."""
        ...


class NoTier:
    """No tier: everything stays, and is counted."""

    staging_bytes = in_flight_bytes = 0

    def moved(self) -> Moved:
        return 0, 0, 0, 0

    def attach_meter(self, meter: WriteMeter) -> None:
        """Nothing is written."""

    def release_staging(self) -> None:
        """There is none."""

    def save(self, storage: UntypedStorage) -> None:
        return None

    def is_saved(self, copy: Copy, *, wait: bool = False) -> bool:
        raise AssertionError("nothing was copied")

    def load(self, copy: Copy) -> Arrival:
        raise AssertionError("nothing was copied")

    def drop(self, copy: Copy, arrival: Arrival | None) -> None:
        raise AssertionError("nothing was copied")

    def close(self) -> None:
        """Nothing is open."""


@dataclass(slots=True, eq=False)
class FileArrival:
    """A storage that is read from a file into memory of the CPU."""

    read: FileRead

    def wait(self) -> tuple[UntypedStorage, int]:
        self.read.wait()
        landing = self.read.landing
        return landing.untyped_storage(), int(landing.storage_offset())


class FileTier:
    """A file below the memory of a CPU. The device's memory is the host's."""

    def __init__(self, folder: Path, label: str = "", *, piece_bytes: int = PIECE_BYTES) -> None:
        self.file = SavedFile(folder, label, piece_bytes=piece_bytes)

    @property
    def staging_bytes(self) -> int:
        return self.file.staging_bytes

    @property
    def in_flight_bytes(self) -> int:
        return self.file.in_flight_bytes

    def moved(self) -> Moved:
        return 0, 0, self.file.written_bytes, self.file.read_bytes

    def attach_meter(self, meter: WriteMeter) -> None:
        self.file.attach_meter(meter)

    def release_staging(self) -> None:
        self.file.release_staging()

    def save(self, storage: UntypedStorage) -> Copy:
        return self.file.write(storage.data_ptr(), storage.nbytes())

    def is_saved(self, copy: Copy, *, wait: bool = False) -> bool:
        assert isinstance(copy, FileCopy)
        return self.file.ended(copy, wait=wait)

    def load(self, copy: Copy) -> Arrival:
        assert isinstance(copy, FileCopy)
        return FileArrival(self.file.read(copy))

    def drop(self, copy: Copy, arrival: Arrival | None) -> None:
        assert isinstance(copy, FileCopy)
        self.file.drop(copy)  # a read that nobody waits for ends in memory of its own

    def close(self) -> None:
        self.file.close()
