"""tensornvme's Offloader as an engine, where it is installed.

It keeps a file of its own, keyed by ours and without a name, so a store's content survives its
process only with the other engines. It reports neither a full disk nor a short transfer, truncates
a transfer longer than 2 GiB, moves a tensor's whole storage whatever part of it the tensor is, and
gives the space back with every read: so transfers are split into pieces with storages of their own,
every write is read back and compared, and every read is written again.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gemini.tickets import Done, Ticket

from ..errors import NvmeError, transfer_error
from ..layout import PIECE_BYTES, combine, crc32
from . import Transfer


class TensorNvmeEngine:
    """Synchronous engine: a ticket is done when it is returned. Raises NvmeError without
    tensornvme."""

    name = "tensornvme"

    def __init__(self, folder: str | os.PathLike[str], backend: str = "uring") -> None:
        try:
            import torch
            from tensornvme._C import Offloader
        except ImportError as error:
            raise NvmeError("the tensornvme package is not installed") from error
        self._torch: Any = torch
        self._path = Path(folder) / f"gemini-tensornvme-{os.getpid()}-{secrets.token_hex(8)}"
        self._offloader: Any = Offloader(str(self._path), 16, backend)
        self._path.unlink()  # it is open, and a process that is killed leaves no file

    def read(self, transfer: Transfer) -> Ticket[int]:
        checksums = []
        for start, piece in self._pieces(transfer):
            key = f"{transfer.file.path}:{transfer.offset + start}"
            self._offloader.sync_read(piece, key)
            self._offloader.sync_write(piece, key)
            checksums.append(crc32(piece.numpy().data) if transfer.checksums else 0)
        return Done(combine(checksums))

    def write(self, transfer: Transfer) -> Ticket[int]:
        checksums = []
        for start, piece in self._pieces(transfer):
            key = f"{transfer.file.path}:{transfer.offset + start}"
            self._offloader.sync_write(piece, key)
            back = self._torch.zeros_like(piece)
            self._offloader.sync_read(back, key)
            checksum = crc32(piece.numpy().data)
            if crc32(back.numpy().data) != checksum:
                raise transfer_error(
                    "write", str(self._path), transfer.offset + start, piece.numel(), 0
                )
            self._offloader.sync_write(piece, key)
            checksums.append(checksum if transfer.checksums else 0)
        return Done(combine(checksums))

    def close(self) -> None:
        if self._offloader is not None:
            self._path.touch(0o600)  # it removes its file, and prints where there is none
            self._offloader = None

    def _pieces(self, transfer: Transfer) -> Iterator[tuple[int, Any]]:
        """Start and tensor of every piece, each with a storage of its own."""
        length = transfer.buffer.nbytes
        for start in range(0, length, PIECE_BYTES):
            piece = transfer.buffer[start : min(start + PIECE_BYTES, length)]
            yield start, self._torch.frombuffer(piece, dtype=self._torch.uint8)
