"""Writer of a save: one data file a rank, state streamed block by block, and the commit.

Every rank describes its state as an index whose parts have no place yet; rank 0 shares out parts
that several ranks have. Each writes its own, and rank 0 joins what they return.
"""

from __future__ import annotations

import io
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gemini.optim.state.disk.state_version import StateVersion
from gemini.optim.state.state_stream import StateRun

from .format.boxes import Region, StreamedRuns, boxes_of_region, in_run, is_contiguous
from .format.data_file import (
    HEADER_BYTES,
    ITEM_ALIGN,
    UnitWriter,
    can_be_raw,
    pinned_name,
    tensor_header,
    write_pinned,
)
from .format.folder import SaveFolder, saving_path
from .format.manifest import (
    CheckpointError,
    DataFile,
    Index,
    Manifest,
    PinnedFile,
    SavedPart,
    SavedValue,
    check,
    encode_index,
)
from .ranks import Ranks
from .reader import local_parts

Item = tuple[str, tuple[int, ...] | None]  # key, and offsets of a part; None: of a value
StatePath = tuple[str | int, ...]


class RankFile:
    """One rank's data file, with the place of each item in it."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder = folder
        self._name = f"__{rank}_0.distcp"
        self._units = UnitWriter(folder / self._name)
        self.pinned_name = pinned_name(rank)
        self._pinned: PinnedFile | None = None
        self.places: dict[Item, SavedPart] = {}

    def reserve(self, nbytes: int, items: int) -> None:
        """Allocate disk space. Raises nvme.DiskFullError."""
        self._units.reserve(nbytes + items * (HEADER_BYTES + ITEM_ALIGN))

    def add_run(self, key: str, region: Region, start: int, values: Tensor) -> None:
        """Write elements [start, start + n) of a flattened region, one item for each box."""
        for box in boxes_of_region(region, start, start + values.numel()):
            mine = in_run(values, start, box, region)
            self.add_tensor(key, box.offsets, mine)

    def pin(self, version: StateVersion) -> None:
        """Write the file that names the pinned state's files. Raises CheckpointError."""
        self._pinned = write_pinned(self._folder / self.pinned_name, version)

    def add_pinned(self, key: str, region: Region, run: StateRun, at: int) -> None:
        """Record the place of a pinned run, from byte `at` of its stream, one item for each box.

        Raises CheckpointError for a region that torch has split into strided pieces.
        """
        itemsize = run.values.itemsize
        for box in boxes_of_region(region, run.start, run.elements.stop):
            if not is_contiguous(box, region):
                raise CheckpointError(
                    f"{key} is split by torch, and pinned=True cannot say which rows this rank "
                    "has; save without pinned=True"
                )
            first = at + (box.start - run.start) * itemsize
            nbytes = box.numel * itemsize
            place = SavedPart(self.pinned_name, first, nbytes, box.offsets, box.sizes)
            self.places[key, box.offsets] = place

    def add_tensor(self, key: str, offsets: tuple[int, ...], values: Tensor) -> None:
        """Write a part of a tensor, as it is in memory if it can be."""
        sizes = tuple(values.shape)
        if can_be_raw(values.dtype):
            place = self._units.append(tensor_header(values.dtype, sizes), values)
        else:
            place = self._units.append_bytes(_bytes_of(values.detach().cpu().clone()))
        self.places[key, offsets] = SavedPart(self._name, *place, offsets, sizes)

    def add_value(self, key: str, value: Any) -> None:
        """Write a value that is no tensor."""
        place = self._units.append_bytes(_bytes_of(value))
        self.places[key, None] = SavedPart(self._name, *place, (), ())

    def finish(self) -> tuple[DataFile, PinnedFile | None]:
        return self._units.finish(), self._pinned

    def close(self) -> None:
        self._units.close()


class Save:
    """One save on one rank, into its file; rank 0 makes the folder a checkpoint.

    state: nested; a `StreamedRuns` in it is streamed.
    aliases: another key of a tensor -> the key under which it is saved.
    """

    def __init__(self, ranks: Ranks, target: Path, keep_last: int | None) -> None:
        """Make the folder, on rank 0. Collective. Raises CheckpointError on every rank."""
        self.ranks, self.target = ranks, target
        self.state: dict[str, Any] = {}
        self.aliases: Mapping[str, str] = {}
        self._done: Callable[[], object] = bool
        self._group = ranks.group()
        self._keep_last = keep_last
        self._about = {
            "saved": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "torch": torch.__version__,
        }
        self._folder = ranks.together(lambda: SaveFolder(target) if ranks.rank == 0 else None)
        self._file: RankFile | None = None

    def take(self, state: dict[str, Any], aliases: Mapping[str, str]) -> None:
        """Save this state; see `Save`."""
        self.state, self.aliases = state, aliases

    def when_done(self, call: Callable[[], object]) -> None:
        """Call this on every rank once the checkpoint is complete."""
        self._done = call

    def open_file(self) -> RankFile:
        self._file = RankFile(saving_path(self.target), self.ranks.rank)
        return self._file

    @contextmanager
    def or_nothing(self) -> Iterator[None]:
        """Context of a save: an error inside removes all of it from the disk."""
        try:
            yield
        except BaseException:
            # Callbacks run last in, first out: the file is closed, with its writes, before its
            # folder is removed.
            with ExitStack() as stack:
                if self._folder is not None:
                    stack.callback(self._folder.abandon)
                if self._file is not None:
                    stack.callback(self._file.close)
            raise

    def write(
        self,
        stream: Callable[[RankFile], None] = lambda file: None,
        failure: BaseException | None = None,
    ) -> None:
        """Write the checkpoint. Collective, in any thread.

        stream: writes the runs.
        failure: an earlier error of this rank. Raises CheckpointError on every rank if one failed.
        """
        ranks, group, file = self.ranks, self._group, self._file
        assert file is not None
        flat, paths = flattened(self.state)
        every: dict[str, StatePath] = {}  # paths of all ranks, on rank 0

        index: dict[str, SavedValue] = {}  # of this rank; its parts have no place yet

        def mine() -> tuple[Index, dict[str, StatePath]]:
            if failure is not None:
                raise failure
            index.update(described(flat))
            return index, paths

        def shared(found: list[tuple[Index, dict[str, StatePath]]]) -> list[set[Item]]:
            for _, theirs in reversed(found):  # of two ranks the first counts
                every.update(theirs)
            return share_out([index for index, _ in found])

        def commit(written: list[_Written]) -> list[None]:
            self._commit(written, every)
            return [None] * len(written)

        own = ranks.through_first(mine, shared, group)
        # Rank 0 commits only when all ranks have written and synced: one failure keeps all of them
        # from a checkpoint with a hole.
        ranks.through_first(lambda: _written(file, stream, flat, index, own), commit, group)
        self._done()

    def _commit(self, written: list[_Written], paths: dict[str, StatePath]) -> None:
        """Write `.metadata` and the manifest, and rename the folder; on rank 0."""
        from .foreign.metadata import encoded

        assert self._folder is not None
        files = tuple(file for _, (file, _) in written)
        pinned = tuple(file for _, (_, file) in written if file is not None)
        index = joined([found for found, _ in written])
        for alias, key in self.aliases.items():  # a tied parameter is found under all its names
            index[alias] = index[key]
            paths[alias] = (paths[key][0], alias.removeprefix(f"{paths[key][0]}."))
        manifest = Manifest(
            world_size=self.ranks.world_size,
            sequence=0,  # the folder gives it one
            metadata_nbytes=0,
            metadata_crc32=0,
            files=files,
            about=self._about,
            pinned=pinned,
        )
        check(index, manifest.sizes)
        pickled = encoded(index, paths)
        crc32 = zlib.crc32(pickled)
        tensors = encode_index(index, list(manifest.sizes))
        manifest = replace(
            manifest, metadata_nbytes=len(pickled), metadata_crc32=crc32,
            index={"metadata": crc32, "tensors": tensors},
        )  # fmt: skip
        self._folder.commit(manifest, pickled, self._keep_last)


_Written = tuple[Index, tuple[DataFile, PinnedFile | None]]  # of one rank, synced


def flattened(state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, StatePath]]:
    """(values by key, paths by key) of a nested state, as torch.distributed.checkpoint flattens it:
    a list is entered if there is a mapping or a tensor in it."""
    flat: dict[str, Any] = {}
    paths: dict[str, StatePath] = {}

    def has_inner(value: Any) -> bool:
        return isinstance(value, Mapping | Tensor) or (
            isinstance(value, list) and any(map(has_inner, value))
        )

    def enter(path: StatePath, value: Any) -> None:
        if isinstance(value, Mapping):
            for name, inner in value.items():
                enter((*path, str(name)), inner)
        elif isinstance(value, list) and has_inner(value):
            for place, inner in enumerate(value):
                enter((*path, place), inner)
        else:
            key = ".".join(map(str, path))
            if key in flat:
                raise CheckpointError(f"two values of the state are {key}; rename one of them")
            flat[key], paths[key] = value, path

    enter((), state)
    return flat, paths


def described(flat: Mapping[str, Any]) -> Index:
    """Index of what a rank has; its parts have no place in a file."""
    found: dict[str, SavedValue] = {}
    for key, value in flat.items():
        if isinstance(value, StreamedRuns):
            dtype, shape = value.dtype, value.shape
            boxes = [(box.offsets, box.sizes) for box in value.boxes()]
        elif isinstance(value, Tensor):
            dtype, shape = value.dtype, value.shape
            boxes = [(offsets, tuple(part.shape)) for offsets, part in local_parts(value)]
        else:
            found[key] = SavedValue(None, torch.Size(()), (SavedPart("", 0, 1, (), ()),))
            continue
        parts = [SavedPart("", 0, prod(n) * dtype.itemsize, at, n) for at, n in boxes]
        if parts:
            found[key] = SavedValue(dtype, shape, tuple(parts))
    return found


def share_out(every: Sequence[Index]) -> list[set[Item]]:
    """Items that each rank is to write: one that several have is of the rank with the least to
    write so far."""
    owners: dict[Item, list[int]] = {}
    nbytes: dict[Item, int] = {}
    for rank, index in enumerate(every):
        for key, entry in index.items():
            for part in entry.parts:
                item = (key, None if entry.dtype is None else part.offsets)
                owners.setdefault(item, []).append(rank)
                nbytes[item] = max(1, part.nbytes)
    load = [0] * len(every)
    found: list[set[Item]] = [set() for _ in every]
    for item, ranks in owners.items():
        rank = min(ranks, key=load.__getitem__)
        load[rank] += nbytes[item]
        found[rank].add(item)
    return found


def joined(every: Sequence[Index]) -> dict[str, SavedValue]:
    """Index of all ranks' parts."""
    found: dict[str, SavedValue] = {}
    for index in every:
        for key, entry in index.items():
            there = found.get(key)
            found[key] = entry if there is None else there._replace(parts=there.parts + entry.parts)
    return found


@torch.no_grad()
def _written(
    file: RankFile,
    stream: Callable[[RankFile], None],
    flat: Mapping[str, Any],
    entries: Index,
    own: set[Item],
) -> _Written:
    """Write this rank's items, `own` of `entries`, and sync the file."""
    stream(file)
    index: dict[str, SavedValue] = {}
    for key, entry in entries.items():
        value = flat[key]
        places = [part.offsets if entry.dtype is not None else None for part in entry.parts]
        mine = [place for place in places if (key, place) in own]
        if entry.dtype is None and mine:
            file.add_value(key, value)
        elif not isinstance(value, StreamedRuns):
            for offsets, part in local_parts(value) if mine else ():
                if offsets in mine:
                    file.add_tensor(key, offsets, part)
        if mine:
            parts = [file.places[key, place] for place in mine]
            index[key] = entry._replace(parts=tuple(parts))
    return index, file.finish()


def _bytes_of(value: Any) -> memoryview:
    whole = io.BytesIO()
    torch.save(value, whole)
    return whole.getbuffer()
