"""What a load reads from, whoever wrote it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from .boxes import StreamedRuns
from .manifest import SavedPart, SavedValue

RunFiller = Callable[
    [str, int, Tensor], bool
]  # (key, first element, [n] to fill) -> whether it is there


class CheckpointSource(Protocol):
    """Tensors and small values by key, of a folder or of files."""

    path: Path
    sizes: Mapping[str, torch.Size | None]  # shape of a tensor, None for a value

    def rename(self, name_of: Callable[[str], str]) -> None:
        """Show every value under the key that `name_of` makes of its own."""
        ...

    def load_into(self, state: dict[str, Any]) -> None:
        """Fill tensors in place (of a sharded one this rank's part) and replace other values.

        Raises FormatError for a key that was saved as a tensor and is no tensor in `state`.
        """
        ...

    def filler(self, tensors: Mapping[str, StreamedRuns]) -> RunFiller:
        """Filler that gives every run of `tensors` its saved values. Raises CorruptError for files
        that are not there as a whole, before the first run."""
        ...


class Items(Protocol):
    """Items of a folder's files."""

    def will_read(self, items: Iterable[tuple[str, SavedValue, SavedPart]]) -> None:
        """Announce the parts of the reads to come, in order. Raises CorruptError."""
        ...

    def data(self, part: SavedPart) -> bytes:
        """Bytes of a value."""
        ...

    def tensor(self, key: str, entry: SavedValue, part: SavedPart) -> Tensor:
        """Whole item, valid until the next call."""
        ...

    def close(self) -> None:
        """Close the files."""
        ...
