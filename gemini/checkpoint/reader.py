"""Reader of a checkpoint folder: verified units of our own files.

Folders and values of torch.distributed.checkpoint, and other programs' files, are read by
`gemini.checkpoint.foreign`, which is imported if there are any.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gemini.optim.state.memory import copy_alone
from gemini.saved_names import renamed

from .format.boxes import Box, Overlap, PartsOf, StreamedRuns, in_box, in_run
from .format.data_file import PinnedStream, UnitReader, can_be_raw
from .format.folder import find
from .format.manifest import (
    METADATA,
    CorruptError,
    FormatError,
    Index,
    Manifest,
    SavedPart,
    SavedValue,
    check_kind,
    metadata_of,
    own_index,
    read_manifest,
)
from .format.source import CheckpointSource, Items, RunFiller
from .untrusted.torch_files import safe_load, safe_tensor

_VALUE_FILE_BYTES = 256 << 20  # most of a value that is no tensor


class Reader:
    """Tensors and values of a checkpoint folder, by key."""

    def __init__(self, folder: Path) -> None:
        """Raise FormatError for a folder that is no checkpoint, CorruptError for a damaged one."""
        self.path = folder
        self.manifest = read_manifest(folder)
        if not (folder / METADATA).exists():
            if self.manifest is not None:
                raise CorruptError(f"{folder / METADATA} is missing")
            raise FormatError(f"{folder} is no checkpoint: it has no {METADATA}")
        pickled = metadata_of(folder, self.manifest)
        own = own_index(folder, self.manifest)
        self.index: Index = _foreign_index(pickled, folder, self.manifest) if own is None else own
        self.sizes: Mapping[str, torch.Size | None] = {
            key: None if entry.dtype is None else entry.size for key, entry in self.index.items()
        }
        self._items = _items_of(folder, self.manifest)

    def rename(self, name_of: Callable[[str], str]) -> None:
        self.index = renamed(self.index, name_of)
        self.sizes = renamed(self.sizes, name_of)

    def close(self) -> None:
        self._items.close()

    @torch.no_grad()
    def load_into(self, state: dict[str, Any]) -> None:
        """Fill tensors in place (of a sharded one this rank's part) and replace other values.

        Raises FormatError for a key that was saved as a tensor and is no tensor in `state`.
        """
        for key, value in state.items():
            entry = self.index[key]
            if entry.dtype is None:
                (part,) = entry.parts
                if part.nbytes > _VALUE_FILE_BYTES:
                    raise CorruptError(f"{key} has {part.nbytes} bytes, expected a small value")
                state[key] = safe_load(io.BytesIO(self._items.data(part)), key)
                continue
            if not isinstance(value, Tensor):
                raise FormatError(f"{key} is saved as a tensor, expected a {type(value).__name__}")
            check_kind(key, entry.dtype, value.dtype)
            parts = PartsOf(entry.parts)
            for offsets, there in local_parts(value):
                for overlap in parts.overlaps(offsets, tuple(there.shape)):
                    self._copy(key, entry, overlap, there)

    def filler(self, tensors: Mapping[str, StreamedRuns]) -> RunFiller:
        """Filler that gives every run of `tensors` its saved values. Raises CorruptError for files
        that are not there as a whole, before the first run."""
        # Reads are announced in storage order, which is the order in which `walk` asks: so units
        # can be read ahead.
        runs = sorted(
            (order, key, run)
            for key, tensor in tensors.items()
            for run, order in zip(tensor.runs, tensor.order, strict=True)
        )
        copies: dict[tuple[str, int], list[tuple[Box, list[Overlap]]]] = {}
        for key, tensor in tensors.items():
            if (dtype := self.index[key].dtype) is not None:
                check_kind(key, dtype, tensor.dtype)
            parts = PartsOf(self.index[key].parts)
            for start, boxes in tensor.boxes_by_run():
                copies[key, start] = [(b, parts.overlaps(b.offsets, b.sizes)) for b in boxes]
        self._items.will_read(  # in the order in which they are asked for: planes side by side
            (key, self.index[key], overlap.part)
            for _, key, (start, _) in runs
            for _, overlaps in copies[key, start]
            for overlap in overlaps
        )

        def put(key: str, start: int, values: Tensor) -> bool:
            if key not in tensors:
                return False
            entry, region = self.index[key], tensors[key].region
            for box, overlaps in copies[key, start]:
                there = in_run(values, start, box, region)
                for overlap in overlaps:
                    self._copy(key, entry, overlap, there)
            return True

        return put

    def _copy(self, key: str, entry: SavedValue, overlap: Overlap, there: Tensor) -> None:
        item = self._items.tensor(key, entry, overlap.part)
        there = in_box(there, overlap.in_box, overlap.sizes)
        copy_alone(there, in_box(item, overlap.in_part, overlap.sizes))


class _OurItems:
    """Items of our own files, read with direct I/O and verified."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._units = UnitReader(folder, manifest.files)
        self._folder = folder
        self._pinned = {file.name: file for file in manifest.pinned}
        self._streams: dict[str, PinnedStream] = {}
        self._stack = ExitStack()

    def will_read(self, items: Iterable[tuple[str, SavedValue, SavedPart]]) -> None:
        """Announce the parts of the reads to come, in order. Raises CorruptError.

        Pinned state is opened and verified now: its files are in another folder, and their run may
        have gone on. So none of it is found to be gone or other when half of a model is loaded.
        """
        ours: list[tuple[str, int, int]] = []
        pinned: dict[str, list[int]] = {}
        for _, _, part in items:
            if part.file in self._pinned:
                pinned.setdefault(part.file, []).append(part.at)
            else:
                ours.append(part[:3])
        self._units.will_read(ours)
        for name, places in pinned.items():
            self._stream(name).verify(places)

    def _stream(self, name: str) -> PinnedStream:
        if name not in self._streams:
            self._streams[name] = PinnedStream(self._folder, self._pinned[name], self._stack)
        return self._streams[name]

    def data(self, part: SavedPart) -> bytes:
        return bytes(self._units.read(part.file, part.at, part.nbytes))

    def tensor(self, key: str, entry: SavedValue, part: SavedPart) -> Tensor:
        """Whole item, valid until the next call."""
        assert entry.dtype is not None
        if not can_be_raw(entry.dtype):
            return safe_tensor(io.BytesIO(self.data(part)), key, entry.dtype, part.sizes)
        numel = prod(part.sizes)
        nbytes = numel * entry.dtype.itemsize
        if not numel:
            return torch.empty(part.sizes, dtype=entry.dtype)
        if part.file in self._pinned:
            return self._stream(part.file).read(part.at, numel).view(part.sizes)
        # an item is a header and then its elements
        view = self._units.read(part.file, part.at + part.nbytes - nbytes, nbytes)
        return torch.frombuffer(view, dtype=entry.dtype, count=numel).view(part.sizes)

    def close(self) -> None:
        self._streams.clear()
        self._stack.close()
        self._units.close()


def _foreign_index(pickled: bytes, folder: Path, manifest: Manifest | None) -> Index:
    from .foreign.metadata import read_index

    return read_index(pickled, folder, manifest)


def _items_of(folder: Path, manifest: Manifest | None) -> Items:
    if manifest is not None:
        return _OurItems(folder, manifest)
    from .foreign.dcp import DcpItems

    return DcpItems(folder)


def local_parts(value: Tensor) -> list[tuple[tuple[int, ...], Tensor]]:
    """(offsets, values) of each part of a tensor that this rank has, detached: all of a plain
    one."""
    if type(value) in (Tensor, torch.nn.Parameter):
        return [((0,) * value.dim(), value.detach())]
    from .foreign.dcp import local_part, parts_in

    return [(offsets, local_part(value, offsets)) for offsets, _ in parts_in(value)]


def open_source(path: Path, names: Sequence[str], stack: ExitStack) -> CheckpointSource:
    """Open a checkpoint, a file of torch.save, or weights.

    names: of the optimizer's parameters in order, for states that are keyed by position.
    stack: closes the files.
    Raises FormatError for a path that is none of these, CorruptError for a damaged checkpoint.
    """
    if not (path / METADATA).exists():
        from .foreign.files import files_at

        files = files_at(path, names, stack)
        if files is not None:
            return files
    return stack.enter_context(closing(Reader(find(path))))
