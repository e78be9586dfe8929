"""State that a checkpoint is pinned to: a small file a rank, and the store's files that it names.

The name of the small file is the checkpoint's own, so its store keeps the version while it exists
(`nvme.versions`): until the checkpoint is deleted, or another takes its place.
"""

from __future__ import annotations

import secrets
import zlib
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import NoReturn

from torch import Tensor

from gemini import nvme
from gemini.nvme.files import calls
from gemini.optim.state.disk.state_version import StateVersion, VersionReader

from .errors import CorruptError, on_disk
from .manifest import JSON_BYTES, PinnedFile
from .small_files import read_file

SUFFIX = ".pinned"


def pinned_name(rank: int) -> str:
    """Of no other checkpoint."""
    return f"__{rank}_0.{secrets.token_hex(4)}{SUFFIX}"


def write_pinned(path: Path, version: StateVersion) -> PinnedFile:
    """The small file of one rank, synced. Raises CheckpointError."""
    data = version.encode()
    with on_disk("write", path):
        calls.write_whole(path, data)
    return PinnedFile(path.name, version.nbytes, len(data), zlib.crc32(data))


class PinnedStream:
    """Reads the state that one rank has pinned, verified."""

    def __init__(self, folder: Path, file: PinnedFile, stack: ExitStack) -> None:
        """stack: closes the store's files. Raises CorruptError."""
        self._path = folder / file.name
        data = read_file(self._path, max(file.file_nbytes, JSON_BYTES))
        if len(data) != file.file_nbytes or zlib.crc32(data) != file.crc32:
            raise CorruptError(f"{self._path} is damaged: its checksum does not match")
        try:
            self._version = StateVersion.decode(data)
        except ValueError as error:
            raise CorruptError(f"{self._path} says what no state is: {error}") from error
        if self._version.nbytes != file.nbytes:
            raise CorruptError(f"{self._path} has other state than the manifest says")
        gone = [path for path in self._version.paths if not Path(path).exists()]
        if gone:
            raise CorruptError(
                f"{gone[0]} is gone, and {folder} is pinned to the state in it; load another "
                "checkpoint. Copy what is pinned out (save_checkpoint with async_save=True) "
                "before its files are removed"
            )
        try:
            files = stack.enter_context(
                nvme.recover(self._version.paths, pinned=self._version.index)
            )
            self._reader = VersionReader(self._version, files)
            stack.callback(self._reader.close)
        except (nvme.StoreFormatError, OSError) as error:
            raise CorruptError(f"{self._path}: {error}") from error

    def read(self, at: int, numel: int) -> Tensor:
        """[numel] elements, good until the next call. Raises CorruptError."""
        try:
            return self._reader.read(at, numel)
        except (nvme.NvmeError, ValueError) as error:
            self._refuse(error)

    def verify(self) -> None:
        """Read every block once. Raises CorruptError."""
        try:
            for i in range(len(self._version.blocks)):
                self._reader.block(i)
        except nvme.NvmeError as error:
            self._refuse(error)

    def _refuse(self, error: Exception) -> NoReturn:
        raise CorruptError(
            f"{self._version.paths[0]}, which {self._path} is pinned to, was written over or is "
            f"damaged: {error}"
        ) from error


def verify_pinned(folder: Path, file: PinnedFile, say: Callable[[str, int], None]) -> None:
    """Read all that a rank has pinned. Raises CorruptError."""
    with ExitStack() as stack:
        PinnedStream(folder, file, stack).verify()
        say(file.name, file.nbytes)
