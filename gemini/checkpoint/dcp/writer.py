"""Writer of a save: one data file a rank, state streamed block by block, and the commit."""

from __future__ import annotations

import io
import pickle
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner

from gemini.checkpoint.format.data_file import (
    HEADER_BYTES,
    ITEM_ALIGN,
    UnitWriter,
    can_be_raw,
    pinned_name,
    tensor_header,
    write_pinned,
)
from gemini.checkpoint.format.folder import SaveFolder, saving_path
from gemini.checkpoint.format.manifest import (
    CheckpointError,
    DataFile,
    Manifest,
    PinnedFile,
    encode_index,
)
from gemini.checkpoint.untrusted.metadata import index_of
from gemini.optim.state.disk.state_version import StateVersion
from gemini.optim.state.state_stream import StateRun

from .boxes import Region, boxes_of_region, in_run, is_contiguous
from .ranks import Ranks

DCP_VERSION = "1.0.0"


class RankFile:
    """One rank's data file, with the place of each item in it."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder = folder
        self._name = f"__{rank}_0.distcp"
        self._units = UnitWriter(folder / self._name)
        self.pinned_name = pinned_name(rank)
        self._pinned: PinnedFile | None = None
        self.places: dict[MetadataIndex, _StorageInfo] = {}

    def reserve(self, nbytes: int, items: int) -> None:
        """Allocate disk space. Raises nvme.DiskFullError."""
        self._units.reserve(nbytes + items * (HEADER_BYTES + ITEM_ALIGN))

    def add_run(self, key: str, region: Region, start: int, values: Tensor) -> None:
        """Write elements [start, start + n) of a flattened region, one item for each box."""
        for box in boxes_of_region(region, start, start + values.numel()):
            mine = in_run(values, start, box, region)
            self.add_tensor(MetadataIndex(key, box.offsets), mine, box.sizes)

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
            place = _StorageInfo(self.pinned_name, first, box.numel * itemsize)
            self.places[MetadataIndex(key, box.offsets)] = place

    def add_tensor(self, index: MetadataIndex, values: Tensor, sizes: tuple[int, ...]) -> None:
        """Write a whole item."""
        place = self._units.append(tensor_header(values.dtype, sizes), values)
        self.places[index] = _StorageInfo(self._name, *place)

    def add_bytes(self, index: MetadataIndex, data: memoryview) -> None:
        self.places[index] = _StorageInfo(self._name, *self._units.append_bytes(data))

    def finish(self) -> tuple[DataFile, PinnedFile | None]:
        return self._units.finish(), self._pinned

    def close(self) -> None:
        self._units.close()


class Save:
    """One save on one rank: DCP's items go to its file, and rank 0 makes the folder a checkpoint.

    state: nested, for DCP. aliases: another key of a tensor -> the key under which it is saved.
    """

    def __init__(self, ranks: Ranks, target: Path, keep_last: int | None) -> None:
        """Make the folder, on rank 0. Collective. Raises CheckpointError on every rank."""
        self.ranks, self.target = ranks, target
        self.state: dict[str, Any] = {}
        self.aliases: Mapping[str, str] = {}
        self.done: Callable[[], object] = bool  # called on every rank once it is complete
        self._group = ranks.group()
        self._keep_last = keep_last
        self._about = {
            "saved": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "torch": torch.__version__,
        }
        self._folder = ranks.together(lambda: SaveFolder(target) if ranks.rank == 0 else None)
        self._file: RankFile | None = None

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
        """Write the checkpoint by DCP's plan. Collective, in any thread.

        stream: writes the runs that DCP must not ask for.
        failure: an earlier error of this rank. Raises CheckpointError on every rank if one failed.
        """
        planner = DefaultSavePlanner(flatten_sharded_tensors=False)
        ranks, group, file = self.ranks, self._group, self._file
        assert file is not None
        described: list[Metadata] = []  # on rank 0

        def plan_mine() -> SavePlan:
            if failure is not None:
                raise failure
            planner.set_up_planner(self.state, None, ranks.rank == 0)
            return planner.create_local_plan()

        def plan_all(plans: list[SavePlan]) -> list[SavePlan]:
            plans, metadata = planner.create_global_plan(plans)
            described.append(metadata)
            return plans

        def commit(written: list[_Written]) -> list[None]:
            self._commit(described[0], written)
            return [None] * len(written)

        plan = planner.finish_plan(ranks.through_first(plan_mine, plan_all, group))
        # Rank 0 commits only when all ranks have written and synced: one failure keeps all of them
        # from a checkpoint with a hole.
        ranks.through_first(lambda: _written(file, stream, plan, planner), commit, group)
        self.done()

    def _commit(self, metadata: Metadata, written: list[_Written]) -> None:
        """Write `.metadata` and the manifest, and rename the folder; on rank 0."""
        assert self._folder is not None
        files = tuple(file for _, (file, _) in written)
        pinned = tuple(file for _, (_, file) in written if file is not None)
        metadata.storage_data = {i: place for places, _ in written for i, place in places.items()}
        metadata.version = DCP_VERSION
        _add_aliases(metadata, self.aliases)
        pickled = pickle.dumps(metadata)
        crc32 = zlib.crc32(pickled)
        names = [file.name for file in files] + [file.name for file in pinned]
        tensors = encode_index(index_of(metadata), names)
        manifest = Manifest(
            world_size=self.ranks.world_size,
            sequence=0,  # the folder gives it one
            metadata_nbytes=len(pickled),
            metadata_crc32=crc32,
            files=files,
            about=self._about,
            index={"metadata": crc32, "tensors": tensors},
            pinned=pinned,
        )
        self._folder.commit(manifest, pickled, self._keep_last)


# places of one rank's items, and its files, all synced
_Written = tuple[dict[MetadataIndex, _StorageInfo], tuple[DataFile, PinnedFile | None]]


@torch.no_grad()
def _written(
    file: RankFile, stream: Callable[[RankFile], None], plan: SavePlan, planner: SavePlanner
) -> _Written:
    stream(file)
    for item in plan.items:
        if item.index in file.places:
            continue
        data = planner.resolve_data(item)
        if isinstance(data, io.BytesIO):
            file.add_bytes(item.index, data.getbuffer())
        elif can_be_raw(data.dtype):
            file.add_tensor(item.index, data.detach(), tuple(data.shape))
        else:
            whole = io.BytesIO()
            torch.save(data.detach().cpu().clone(), whole)
            file.add_bytes(item.index, whole.getbuffer())
    return {item.index: file.places[item.index] for item in plan.items}, file.finish()


def _add_aliases(metadata: Metadata, aliases: Mapping[str, str]) -> None:
    """Let a tied parameter, which is saved once, be found under each of its names."""
    items: dict[str, list[tuple[MetadataIndex, Any]]] = {}
    for index, place in metadata.storage_data.items():
        items.setdefault(index.fqn, []).append((index, place))
    for alias, key in aliases.items():
        metadata.state_dict_metadata[alias] = metadata.state_dict_metadata[key]
        for index, place in items.get(key, ()):
            metadata.storage_data[MetadataIndex(alias, index.offset, index.index)] = place
        if metadata.planner_data is not None and key in metadata.planner_data:
            prefix = metadata.planner_data[key][0]
            metadata.planner_data[alias] = (prefix, alias.removeprefix(f"{prefix}."))
