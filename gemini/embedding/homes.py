"""Homes of records: what keeps all rows of this rank, in host memory or in a file."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from gemini.optim.state.memory import Memory


@dataclass(slots=True)
class RowTraffic:
    """Bytes between a cache and its home: by the plans, and as the home counted them."""

    planned_read: int = 0
    planned_written: int = 0
    read: int = 0
    written: int = 0


class RowHome(Protocol):
    """Home of [num_rows, width] fp32 records.

    A step is prepared, then confirmed or withdrawn, as ranks agree. Records that are written count
    only if a confirmed step has their values already: a home may write them in place.
    """

    traffic: RowTraffic
    step: int  # the last one that was confirmed

    def fill(self, parts: Iterable[Tensor], step: int) -> None:
        """Replace all records, in row order, by `parts`: the state of `step`."""
        ...

    def read(self, rows: Tensor) -> Tensor:
        """Records of `rows` [n] int64, on the host: [n, width]."""
        ...

    def write(self, rows: Tensor, records: Tensor) -> None:
        """Write records that left the cache, whose values a confirmed step has."""
        ...

    def has_room(self, count: int) -> bool:
        """Whether a step of `count` rows can be prepared; else `rebase` comes first."""
        ...

    def rebase(self) -> None:
        """Note that all records of the last step were written."""
        ...

    def prepare(self, step: int, rows: Tensor, records: Tensor) -> None:
        """Make a step durable that changed `rows`. Raises NvmeError; then nothing has changed."""
        ...

    def confirm(self) -> None:
        """Let the prepared step count; without it, the next one takes its place."""
        ...

    def cost(self, read: Tensor, written: Tensor) -> tuple[int, int]:
        """Bytes (read, written) of `read(read)` and `write(written)`, without moving any."""
        ...

    def close(self) -> None:
        """Give memory and files back."""
        ...


class HostHome:
    """Home in host memory, pinned if another device takes from it. It ends with the process."""

    def __init__(self, num_rows: int, width: int, memory: Memory) -> None:
        """memory: of the device with the cache."""
        self.records = memory.allocate_host(num_rows * width, torch.float32).view(num_rows, width)
        self.traffic = RowTraffic()
        self.step = self._prepared = 0

    def fill(self, parts: Iterable[Tensor], step: int) -> None:
        at = 0
        for part in parts:
            self.records[at : at + len(part)] = part
            at += len(part)
        assert at == len(self.records)
        self.step = step

    def read(self, rows: Tensor) -> Tensor:
        records = self.records[rows]
        self.traffic.read += records.nbytes
        return records

    def write(self, rows: Tensor, records: Tensor) -> None:
        self.records[rows] = records
        self.traffic.written += records.nbytes

    def has_room(self, count: int) -> bool:
        return True

    def rebase(self) -> None:
        return

    def prepare(self, step: int, rows: Tensor, records: Tensor) -> None:
        self._prepared = step

    def confirm(self) -> None:
        self.step = self._prepared

    def cost(self, read: Tensor, written: Tensor) -> tuple[int, int]:
        nbytes = self.records.shape[1] * self.records.element_size()
        return len(read) * nbytes, len(written) * nbytes

    def close(self) -> None:
        self.records = self.records.new_empty(0, self.records.shape[1])
