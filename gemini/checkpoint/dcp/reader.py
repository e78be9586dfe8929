"""Sources of a load: a folder of DCP, ours or not, a file of torch.save, or weights alone.

`Reader` reads the items of an index: verified units of our files, or, without checksums, files of
DCP's own writer, whose pickles run no code.
"""

from __future__ import annotations

import io
import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner_helpers import _create_chunk_list
from torch.distributed.checkpoint.utils import find_state_dict_object
from torch.distributed.tensor import DTensor, distribute_tensor

from gemini import strangers
from gemini.checkpoint.format.data_file import PinnedStream, UnitReader, can_be_raw
from gemini.checkpoint.format.folder import find
from gemini.checkpoint.format.manifest import (
    METADATA,
    CorruptError,
    FormatError,
    Manifest,
    SavedPart,
    SavedValue,
    memory_limit,
    metadata_of,
    own_index,
    read_manifest,
    reading,
)
from gemini.checkpoint.untrusted.lazy_tensors import LazyTensors, weight_files
from gemini.checkpoint.untrusted.metadata import read_index
from gemini.checkpoint.untrusted.torch_files import (
    FileSlice,
    first_line,
    has_own_bytes,
    load_mapped,
    safe_load,
)
from gemini.optim.rules.saved import number_of
from gemini.saved_names import renamed

from .boxes import Box, FlatRuns, Overlap, PartsOf, in_run

WHOLE_ITEMS = 8  # of files that are not ours, kept in memory: planes of a few parameters
_MOST_LEVELS = 32  # of a state dict
_VALUE_BYTES = 160  # of memory that one more name takes
_VALUE_FILE_BYTES = 256 << 20  # most of a value that is no tensor

RunFiller = Callable[
    [str, int, Tensor], bool
]  # (key, first element, [n] to fill) -> whether it is there


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
        self.index = read_index(pickled, folder, self.manifest) if own is None else own
        self.sizes: Mapping[str, torch.Size | None] = {
            key: None if entry.dtype is None else entry.size for key, entry in self.index.items()
        }
        self._items: _OurItems | _DcpItems = (
            _DcpItems(folder) if self.manifest is None else _OurItems(folder, self.manifest)
        )

    def rename(self, name_of: Callable[[str], str]) -> None:
        """Show every value under the key that `name_of` makes of its own."""
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
            _check_kind(key, entry.dtype, value.dtype)
            if isinstance(value, DTensor) and value.device_mesh.get_coordinate() is None:
                continue  # this rank has no part of it
            parts = PartsOf(entry.parts)
            for chunk in _create_chunk_list(value):
                there = find_state_dict_object(state, MetadataIndex(key, chunk.offsets)).detach()
                for overlap in parts.overlaps(tuple(chunk.offsets), tuple(chunk.sizes)):
                    self._copy(key, entry, overlap, there)

    def filler(self, tensors: Mapping[str, FlatRuns]) -> RunFiller:
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
                _check_kind(key, dtype, tensor.dtype)
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
        there = narrow_tensor_by_index(there, overlap.in_box, overlap.sizes)
        there.copy_(narrow_tensor_by_index(item, overlap.in_part, overlap.sizes))


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
            return _tensor_of(io.BytesIO(self.data(part)), key, entry.dtype, part.sizes)
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


class _DcpItems:
    """Files of torch.distributed.checkpoint's own writer: no checksums, one pickled item each."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._recent: OrderedDict[tuple[str, int], Tensor] = OrderedDict()  # oldest first

    def will_read(self, items: Iterable[tuple[str, SavedValue, SavedPart]]) -> None:
        """Look at the items of the reads to come, without their elements. Raises CorruptError.

        So none of them is found to be another when half of a model is loaded.
        """
        for key, entry, part in {(part.file, part.at): (key, entry, part)
                                 for key, entry, part in items}.values():  # fmt: skip
            self._open(key, entry, part, torch.serialization.skip_data())

    def data(self, part: SavedPart) -> bytes:
        path = self._folder / part.file
        with reading(path), strangers.opened(path) as file:
            file.seek(part.at)
            data = file.read(part.nbytes)
        if len(data) != part.nbytes:
            raise CorruptError(f"{path} ends before byte {part.at + part.nbytes}")
        return data

    def tensor(self, key: str, entry: SavedValue, part: SavedPart) -> Tensor:
        place = (part.file, part.at)
        if place not in self._recent:
            self._recent[place] = self._open(key, entry, part)
            if len(self._recent) > WHOLE_ITEMS:
                self._recent.popitem(last=False)
        self._recent.move_to_end(place)
        return self._recent[place]

    def _open(
        self, key: str, entry: SavedValue, part: SavedPart,
        how: AbstractContextManager[None] | None = None,
    ) -> Tensor:  # fmt: skip
        path = self._folder / part.file
        with reading(path), strangers.opened(path) as file, how or nullcontext():
            view = FileSlice(file, part.at, part.nbytes)
            return _tensor_of(view, f"{path}, {key}", entry.dtype, part.sizes)

    def close(self) -> None:
        self._recent.clear()


def _tensor_of(data: Any, what: str, dtype: torch.dtype | None, sizes: tuple[int, ...]) -> Tensor:
    found = safe_load(data, what)
    if not isinstance(found, Tensor) or (found.layout, found.dtype, tuple(found.shape)) != (
        torch.strided, dtype, sizes,
    ):  # fmt: skip
        raise CorruptError(f"{what} cannot be read: it is another tensor than its list says")
    return found


def _check_kind(key: str, saved: torch.dtype, wanted: torch.dtype) -> None:
    """Raise CorruptError for flags or complex numbers in the place of numbers."""
    alike = (saved == torch.bool) == (
        wanted == torch.bool
    ) and saved.is_complex == wanted.is_complex
    if not alike:
        raise CorruptError(f"{key} cannot be read: it is of {saved}, expected {wanted}")


# -- whole values --


class WholeSource:
    """Whole tensors and values by key, of files of weights or of a file of torch.save."""

    def __init__(
        self, path: Path, values: Mapping[str, Any], sizes: Mapping[str, torch.Size | None]
    ) -> None:
        self.path, self.sizes, self._values = path, sizes, values
        self._key_of: Mapping[str, str] = {key: key for key in sizes}

    def rename(self, name_of: Callable[[str], str]) -> None:
        """Show every value under the key that `name_of` makes of its own."""
        self.sizes = renamed(self.sizes, name_of)
        self._key_of = renamed(self._key_of, name_of)

    def load_into(self, state: dict[str, Any]) -> None:
        """Fill tensors in place and replace other values; see `Reader.load_into`."""
        for key, there in state.items():
            value = self._values[self._key_of[key]]
            if not isinstance(there, Tensor):
                state[key] = value
                continue
            if not isinstance(value, Tensor):
                if number_of(value) is None:
                    raise CorruptError(
                        f"{key} cannot be read: it is a {type(value).__name__}, expected a number"
                    )
                value = torch.tensor(float(value), dtype=torch.float64)
            _check_kind(key, value.dtype, there.dtype)
            if value.numel() != there.numel():
                raise CorruptError(
                    f"{key} cannot be read: it is of shape {tuple(value.shape)}, expected "
                    f"{tuple(there.shape)}"
                )
            value = value.reshape(there.shape)
            if isinstance(there, DTensor):
                mesh, value = there.device_mesh, value.to(there.device)
                value = distribute_tensor(value, mesh, there.placements, src_data_rank=None)
            there.copy_(value)

    def filler(self, tensors: Mapping[str, FlatRuns]) -> RunFiller:
        """Filler of the runs of `tensors`; see `Reader.filler`."""
        if isinstance(self._values, dict):  # others are files, whose tensors are read on request
            for key, tensor in tensors.items():
                _check_kind(key, self._values[self._key_of[key]].dtype, tensor.dtype)
        read: dict[str, Tensor] = {}  # the last one: runs of a tensor come one after the other

        def put(key: str, start: int, values: Tensor) -> bool:
            if key not in tensors:
                return False
            if key not in read:
                read.clear()
                read[key] = tensors[key].flat_part(self._values[self._key_of[key]])
            values.copy_(read[key][start : start + values.numel()])
            return True

        return put


# tensors and small values by key; `sizes` has the shape of a tensor, None for a value
CheckpointSource = Reader | WholeSource


def open_source(path: Path, names: Sequence[str], stack: ExitStack) -> CheckpointSource:
    """Open a checkpoint, a file of torch.save, or weights.

    names: of the optimizer's parameters in order, for states that are keyed by position.
    stack: closes the files.
    Raises FormatError for a path that is none of these, CorruptError for a damaged checkpoint.
    """
    if path.is_file():
        path = path.resolve()  # a link that the caller names is followed, and none in a folder
    if _has_weights_alone(path):
        tensors = LazyTensors(path, stack)
        return WholeSource(path, tensors, tensors.sizes())
    if path.is_file():
        values = _values_of_file(path, names)
        return WholeSource(
            path,
            values,
            {k: v.size() if isinstance(v, Tensor) else None for k, v in values.items()},
        )
    return stack.enter_context(closing(Reader(find(path))))


def _has_weights_alone(path: Path) -> bool:
    """Whether a path is a file of safetensors, or a folder of weights without a checkpoint."""
    if path.is_dir():
        return not (path / METADATA).exists() and bool(weight_files(path))
    if not path.is_file():
        return False
    with reading(path), strangers.opened(path) as file:
        start, nbytes = file.read(9), os.fstat(file.fileno()).st_size
    return start[8:] == b"{" and int.from_bytes(start[:8], "little") < nbytes


def _values_of_file(path: Path, names: Sequence[str]) -> dict[str, Any]:
    """Values of a file of torch.save: a module's state dict, or a dict with an optimizer's too.

    names: of the optimizer's parameters in order, for states that are keyed by position.
    """
    try:
        content = load_mapped(path)
    except Exception as error:  # damaged zip files and pickles fail in any way
        first = first_line(error)
        raise FormatError(f"{path} is no file of torch.save that is safe: {first}") from error
    if not isinstance(content, Mapping):
        raise FormatError(f"{path} holds a {type(content).__name__}; expected a state dict")
    values: dict[str, Any] = {}
    left = memory_limit(path.stat().st_size, 0)
    for key, value in _flat("", content, names, _MOST_LEVELS):
        left -= _VALUE_BYTES + len(key)
        if left < 0:
            raise FormatError(f"{path} holds more values than it has bytes")
        if isinstance(value, Tensor) and not has_own_bytes(value):
            raise FormatError(f"{path}: {key:.80} is a tensor without all of its elements")
        values[key] = value
    return values


def _flat(prefix: str, value: Any, names: Sequence[str], levels: int) -> Iterator[tuple[str, Any]]:
    """Leaves by their path, as DCP flattens; positions of parameters become their names."""
    if not levels:
        raise FormatError(f"{prefix:.80} is nested deeper than any state dict")
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            if isinstance(key, int) and 0 <= key < len(names):
                key = names[key]
            path = f"{prefix}.{key}" if prefix else str(key)
            yield from _flat(path, inner, names, levels - 1)
    elif isinstance(value, list) and any(isinstance(inner, Mapping) for inner in value):
        for i, inner in enumerate(value):
            yield from _flat(f"{prefix}.{i}", inner, names, levels - 1)
    else:
        yield prefix, value
