"""Reads what an index says: verified units of our files; files of DCP's own writer, safely."""

from __future__ import annotations

import io
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import torch
from torch import Tensor
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner_helpers import _create_chunk_list
from torch.distributed.checkpoint.utils import find_state_dict_object
from torch.distributed.tensor import DTensor

from gemini.checkpoint.format.boxes import Box
from gemini.checkpoint.format.data_file import UnitReader
from gemini.checkpoint.format.errors import CorruptError, FormatError
from gemini.checkpoint.format.index import Overlap, PartsOf, SavedPart, SavedValue
from gemini.checkpoint.format.manifest import METADATA, Manifest
from gemini.checkpoint.format.pinned_file import PinnedStream
from gemini.checkpoint.format.small_files import read_manifest
from gemini.checkpoint.untrusted.metadata import read_index
from gemini.checkpoint.untrusted.torch_files import FileSlice, safe_load
from gemini.nvme import cause_of

from .sharded import FlatRuns, can_be_raw, in_run

WHOLE_ITEMS = 8  # of files that are not ours, kept in memory: planes of a few parameters

RunFiller = Callable[
    [str, int, Tensor], bool
]  # (key, first element, [n] to fill) -> whether it is there
RunWalk = Callable[[RunFiller], None]  # walks over this rank's runs in storage order


class Reader:
    """A checkpoint folder: its tensors and values by key."""

    def __init__(self, folder: Path) -> None:
        """Raises FormatError for what is no checkpoint, CorruptError for one that is damaged."""
        self.path = folder
        self.manifest = read_manifest(folder)
        if not (folder / METADATA).exists():
            if self.manifest is not None:
                raise CorruptError(f"{folder / METADATA} is missing")
            raise FormatError(f"{folder} is no checkpoint: it has no {METADATA}")
        self.index = read_index(folder, self.manifest)
        self.sizes: Mapping[str, torch.Size | None] = {
            key: None if entry.dtype is None else entry.size for key, entry in self.index.items()
        }
        self._items: _Items = (
            _DcpItems(folder) if self.manifest is None else _OurItems(folder, self.manifest)
        )

    def close(self) -> None:
        self._items.close()

    @torch.no_grad()
    def load_into(self, state: dict[str, Any]) -> None:
        """Fill tensors in place, of sharded ones this rank's part; replace other values.

        Raises FormatError for a key that is a tensor in one and none in the other.
        """
        for key, value in state.items():
            entry = self.index[key]
            if entry.dtype is None:
                state[key] = safe_load(io.BytesIO(self._items.data(entry.parts[0])), key)
                continue
            if not isinstance(value, Tensor):
                raise FormatError(f"{key} is saved as a tensor, expected a {type(value).__name__}")
            if isinstance(value, DTensor) and value.device_mesh.get_coordinate() is None:
                continue  # this rank has no part of it
            parts = PartsOf(entry.parts)
            for chunk in _create_chunk_list(value):
                there = find_state_dict_object(state, MetadataIndex(key, chunk.offsets)).detach()
                for overlap in parts.overlaps(tuple(chunk.offsets), tuple(chunk.sizes)):
                    self._copy(key, entry, overlap, there)

    def fill(self, tensors: Mapping[str, FlatRuns], walk: RunWalk) -> None:
        """Hand `walk` what gives every run of `tensors` its values."""
        runs = sorted(
            (order, key, run)
            for key, tensor in tensors.items()
            for run, order in zip(tensor.runs, tensor.order, strict=True)
        )
        copies: dict[tuple[str, int], list[tuple[Box, list[Overlap]]]] = {}
        for key, tensor in tensors.items():
            parts = PartsOf(self.index[key].parts)
            for start, boxes in tensor.boxes_by_run():
                copies[key, start] = [(b, parts.overlaps(b.offsets, b.sizes)) for b in boxes]
        self._items.will_read(  # in the order in which they are asked for: planes side by side
            overlap.part
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

        walk(put)

    def _copy(self, key: str, entry: SavedValue, overlap: Overlap, there: Tensor) -> None:
        item = self._items.tensor(key, entry, overlap.part)
        there = narrow_tensor_by_index(there, overlap.in_box, overlap.sizes)
        there.copy_(narrow_tensor_by_index(item, overlap.in_part, overlap.sizes))


class _Items(Protocol):
    """Items of the files of a checkpoint."""

    def will_read(self, parts: Iterable[SavedPart]) -> None:
        """What comes, in order."""
        ...

    def data(self, part: SavedPart) -> bytes: ...

    def tensor(self, key: str, entry: SavedValue, part: SavedPart) -> Tensor:
        """The whole item; good until the next call."""
        ...

    def close(self) -> None: ...


class _OurItems:
    """Verified, and with direct I/O."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._units = UnitReader(folder, manifest.files)
        self._folder = folder
        self._pinned = {file.name: file for file in manifest.pinned}
        self._streams: dict[str, PinnedStream] = {}
        self._stack = ExitStack()

    def will_read(self, parts: Iterable[SavedPart]) -> None:
        self._units.will_read(part[:3] for part in parts if part.file not in self._pinned)

    def data(self, part: SavedPart) -> bytes:
        return bytes(self._units.read(part.file, part.at, part.nbytes))

    def tensor(self, key: str, entry: SavedValue, part: SavedPart) -> Tensor:
        assert entry.dtype is not None
        if not can_be_raw(entry.dtype):
            return _tensor_of(io.BytesIO(self.data(part)), key, part.sizes)
        numel = prod(part.sizes)
        nbytes = numel * entry.dtype.itemsize
        if not numel:
            return torch.empty(part.sizes, dtype=entry.dtype)
        if part.file in self._pinned:
            return self._stream(part.file).read(part.at, numel).view(part.sizes)
        # elements come last
        view = self._units.read(part.file, part.at + part.nbytes - nbytes, nbytes)
        return torch.frombuffer(view, dtype=entry.dtype, count=numel).view(part.sizes)

    def _stream(self, name: str) -> PinnedStream:
        if name not in self._streams:
            file = self._pinned[name]
            self._streams[name] = PinnedStream(self._folder, file, self._stack)
        return self._streams[name]

    def close(self) -> None:
        self._streams.clear()
        self._stack.close()
        self._units.close()


class _DcpItems:
    """Files of torch.distributed.checkpoint's own writer: no checksums, one pickled item each."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._recent: OrderedDict[tuple[str, int], Tensor] = OrderedDict()  # oldest first

    def will_read(self, parts: Iterable[SavedPart]) -> None:
        """Nothing is read before it is asked for."""

    def data(self, part: SavedPart) -> bytes:
        path = self._folder / part.file
        with _opened(path) as file:
            file.seek(part.at)
            data = file.read(part.nbytes)
        if len(data) != part.nbytes:
            raise CorruptError(f"{path} ends before byte {part.at + part.nbytes}")
        return data

    def tensor(self, key: str, entry: SavedValue, part: SavedPart) -> Tensor:
        place = (part.file, part.at)
        if place not in self._recent:
            path = self._folder / part.file
            with _opened(path) as file:
                view = FileSlice(file, part.at, part.nbytes)
                self._recent[place] = _tensor_of(view, f"{path}, {key}", part.sizes)
            if len(self._recent) > WHOLE_ITEMS:
                self._recent.popitem(last=False)
        self._recent.move_to_end(place)
        return self._recent[place]

    def close(self) -> None:
        self._recent.clear()


def _tensor_of(data: Any, what: str, sizes: tuple[int, ...]) -> Tensor:
    found = safe_load(data, what)
    if not isinstance(found, Tensor) or tuple(found.shape) != sizes:
        raise CorruptError(f"{what} cannot be read: it is another tensor than its list says")
    return found


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    try:
        with path.open("rb") as file:
            yield file
    except OSError as error:
        raise CorruptError(f"{path} cannot be read: {cause_of(error.errno)}") from error
