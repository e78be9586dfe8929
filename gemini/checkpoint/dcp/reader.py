"""The StorageReader: verified units of our files; DCP's own files as DCP reads them, safely."""

from __future__ import annotations

import io
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from gemini.checkpoint.format.boxes import Box, boxes_of_region
from gemini.checkpoint.format.data_file import UnitReader
from gemini.checkpoint.format.errors import CorruptError, said_plainly
from gemini.checkpoint.format.manifest import Manifest
from gemini.checkpoint.untrusted.torch_files import FileSlice, safe_load
from gemini.nvme import cause_of

from .sharded import FlatRuns, can_be_raw, in_run

WHOLE_ITEMS = 8  # of files that are not ours, kept in memory: planes of a few parameters

RunFiller = Callable[
    [str, int, Tensor], bool
]  # (key, first element, [n] to fill) -> whether it is there
RunWalk = Callable[[RunFiller], None]  # walks over this rank's runs in storage order


class SafePlanner(DefaultLoadPlanner):
    """DCP's planner, but bytes are unpickled with `weights_only`."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        key = read_item.dest_index.fqn
        self.state_dict[key] = safe_load(value, key)


def _tensor_of(data: Any, what: str, sizes: tuple[int, ...]) -> Tensor:
    found = safe_load(data, what)
    if not isinstance(found, Tensor) or tuple(found.shape) != sizes:
        raise CorruptError(f"{what} cannot be read: it is another tensor than its list says")
    return found


class Reader(StorageReader):
    """Reads one checkpoint folder; `fill` is handed the runs of `FlatRuns` one after the other."""

    def __init__(
        self,
        folder: Path,
        manifest: Manifest | None,
        metadata: Metadata,
        fill: RunWalk | None = None,
    ) -> None:
        self._folder = folder
        self._manifest = manifest
        self._metadata = metadata
        self._fill = fill

    def reset(self, checkpoint_id: Any = None) -> None:
        """Nothing: one object reads one folder."""

    def read_metadata(self, *args: Any, **options: Any) -> Metadata:
        return self._metadata

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Nothing: every rank has read it."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        with said_plainly():
            return self._read(plan, planner)

    def _read(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        items = _open_items(self._folder, self._manifest, self._metadata)
        try:
            runs: dict[str, dict[tuple[int, ...], list[ReadItem]]] = {}
            state: dict[str, Any] = getattr(planner, "state_dict", {})
            for request in plan.items:
                key = request.dest_index.fqn
                if isinstance(state.get(key), FlatRuns):
                    box = tuple(request.dest_index.offset or ())
                    runs.setdefault(key, {}).setdefault(box, []).append(request)
                elif request.type == LoadItemType.BYTE_IO:
                    planner.load_bytes(request, io.BytesIO(items.data(request)))
                else:
                    there = planner.resolve_tensor(request).detach()
                    there.copy_(_part(items.tensor(request), request))
                    planner.commit_tensor(request, there)
            if self._fill is not None and runs:
                _BoxReader(state, runs, items).run(self._fill)
        finally:
            items.close()
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


class _BoxReader:
    """Runs of `FlatRuns` from the items that DCP planned for their boxes."""

    def __init__(
        self,
        state: dict[str, Any],
        runs: dict[str, dict[tuple[int, ...], list[ReadItem]]],
        items: _Items,
    ) -> None:
        self._state = state
        self._runs = runs
        self._items = items

    def run(self, fill: RunWalk) -> None:
        self._items.will_read(
            request
            for key, start, numel in _in_order(self._state, self._runs)
            for _, requests in self._boxes(key, start, numel)
            for request in requests
        )
        fill(self._put)

    def _put(self, key: str, start: int, values: Tensor) -> bool:
        if key not in self._runs:
            return False
        for box, requests in self._boxes(key, start, values.numel()):
            mine = in_run(values, start, box, self._state[key].region)
            for request in requests:
                there = narrow_tensor_by_index(mine, request.dest_offsets, request.lengths)
                there.copy_(_part(self._items.tensor(request), request))
        return True

    def _boxes(self, key: str, start: int, numel: int) -> Iterator[tuple[Box, list[ReadItem]]]:
        for box in boxes_of_region(self._state[key].region, start, start + numel):
            yield box, self._runs[key].get(box.offsets, [])


def _in_order(state: dict[str, Any], runs: dict[str, Any]) -> Iterator[tuple[str, int, int]]:
    """Runs in the order in which they will be asked for: that of blocks, planes side by side."""
    wanted = [
        (order, key, start, numel)
        for key in runs
        for (start, numel), order in zip(state[key].runs, state[key].order, strict=True)
    ]
    for _, key, start, numel in sorted(wanted):
        yield key, start, numel


def _part(tensor: Tensor, request: ReadItem) -> Tensor:
    return narrow_tensor_by_index(tensor, request.storage_offsets, request.lengths)


@dataclass(frozen=True, slots=True)
class _StoredItem:
    """Where one item lies, and what it is."""

    file: str
    offset: int
    nbytes: int
    dtype: torch.dtype | None  # None: bytes
    sizes: tuple[int, ...]


class _Items:
    """Items of a checkpoint by read request."""

    def __init__(self, metadata: Metadata) -> None:
        self._metadata = metadata

    def place(self, request: ReadItem) -> _StoredItem:
        index = request.storage_index
        stored = self._metadata.storage_data[index]
        entry = self._metadata.state_dict_metadata[index.fqn]
        dtype: torch.dtype | None = None
        sizes: tuple[int, ...] = ()
        if isinstance(entry, TensorStorageMetadata):
            dtype = entry.properties.dtype
            hint = index.index
            if hint is None or entry.chunks[hint].offsets != index.offset:
                hint = next(i for i, c in enumerate(entry.chunks) if c.offsets == index.offset)
            sizes = tuple(entry.chunks[hint].sizes)
        return _StoredItem(stored.relative_path, stored.offset, stored.length, dtype, sizes)

    def will_read(self, requests: Iterator[ReadItem]) -> None:
        """What comes, in order."""

    def data(self, request: ReadItem) -> bytes:
        raise NotImplementedError

    def tensor(self, request: ReadItem) -> Tensor:
        """The whole item; good until the next call."""
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError


class _OurItems(_Items):
    """Verified, and with direct I/O."""

    def __init__(self, folder: Path, manifest: Manifest, metadata: Metadata) -> None:
        super().__init__(metadata)
        self._units = UnitReader(folder, manifest.files)

    def will_read(self, requests: Iterator[ReadItem]) -> None:
        places = (self.place(request) for request in requests)
        self._units.will_read((place.file, place.offset, place.nbytes) for place in places)

    def data(self, request: ReadItem) -> bytes:
        place = self.place(request)
        return bytes(self._units.read(place.file, place.offset, place.nbytes))

    def tensor(self, request: ReadItem) -> Tensor:
        place = self.place(request)
        assert place.dtype is not None
        if not can_be_raw(place.dtype):
            data = io.BytesIO(self.data(request))
            return _tensor_of(data, request.storage_index.fqn, place.sizes)
        numel = 1
        for size in place.sizes:
            numel *= size
        nbytes = numel * place.dtype.itemsize
        start = place.offset + place.nbytes - nbytes  # elements come last
        view = self._units.read(place.file, start, nbytes)
        if not numel:
            return torch.empty(place.sizes, dtype=place.dtype)
        return torch.frombuffer(view, dtype=place.dtype, count=numel).view(place.sizes)

    def close(self) -> None:
        self._units.close()


class _DcpItems(_Items):
    """Files of torch.distributed.checkpoint's own writer: no checksums, one pickled item each."""

    def __init__(self, folder: Path, metadata: Metadata) -> None:
        super().__init__(metadata)
        self._folder = folder
        self._recent: OrderedDict[tuple[str, int], Tensor] = OrderedDict()  # oldest first

    def data(self, request: ReadItem) -> bytes:
        place = self.place(request)
        path = self._folder / place.file
        with _opened(path) as file:
            file.seek(place.offset)
            data = file.read(place.nbytes)
        if len(data) != place.nbytes:
            raise CorruptError(f"{path} ends before byte {place.offset + place.nbytes}")
        return data

    def tensor(self, request: ReadItem) -> Tensor:
        place = self.place(request)
        key = (place.file, place.offset)
        if key not in self._recent:
            path = self._folder / place.file
            what = f"{path}, {request.storage_index.fqn}"
            with _opened(path) as file:
                view = FileSlice(file, place.offset, place.nbytes)
                self._recent[key] = _tensor_of(view, what, place.sizes)
            if len(self._recent) > WHOLE_ITEMS:
                self._recent.popitem(last=False)
        self._recent.move_to_end(key)
        return self._recent[key]

    def close(self) -> None:
        self._recent.clear()


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    try:
        with path.open("rb") as file:
            yield file
    except OSError as error:
        raise CorruptError(f"{path} cannot be read: {cause_of(error.errno)}") from error


def _open_items(folder: Path, manifest: Manifest | None, metadata: Metadata) -> _Items:
    if manifest is None:
        return _DcpItems(folder, metadata)
    return _OurItems(folder, manifest, metadata)
