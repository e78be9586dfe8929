"""The StorageWriter: what DCP plans goes to one data file a rank, streamed state block by block."""

from __future__ import annotations

import io
import pickle
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from gemini.checkpoint.format.boxes import Region, boxes_of_region
from gemini.checkpoint.format.data_file import HEADER_BYTES, ITEM_ALIGN, UnitWriter
from gemini.checkpoint.format.errors import said_plainly
from gemini.checkpoint.format.folder import SaveFolder
from gemini.checkpoint.format.index import encode_index
from gemini.checkpoint.format.manifest import DataFile, Manifest
from gemini.checkpoint.untrusted.metadata import index_of

from .sharded import can_be_raw, in_run, tensor_header

DCP_VERSION = "1.0.0"


class RankFile:
    """One rank's data file, and where in it the items lie."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._units = UnitWriter(folder / f"__{rank}_0.distcp")
        self._name = f"__{rank}_0.distcp"
        self.places: dict[MetadataIndex, _StorageInfo] = {}

    @property
    def staging_bytes(self) -> int:
        return self._units.staging_bytes

    def reserve(self, nbytes: int, items: int) -> None:
        """Allocate disk space. Raises nvme.DiskFullError."""
        self._units.reserve(nbytes + items * (HEADER_BYTES + ITEM_ALIGN))

    def add_run(self, key: str, region: Region, start: int, values: Tensor) -> None:
        """Write elements [start, start + n) of a flattened region, as one item a box."""
        for box in boxes_of_region(region, start, start + values.numel()):
            mine = in_run(values, start, box, region)
            self.add_tensor(MetadataIndex(key, box.offsets), mine, box.sizes)

    def add_tensor(self, index: MetadataIndex, values: Tensor, sizes: tuple[int, ...]) -> None:
        """Write a whole item."""
        place = self._units.append(tensor_header(values.dtype, sizes), values)
        self.places[index] = _StorageInfo(self._name, *place)

    def add_bytes(self, index: MetadataIndex, data: memoryview) -> None:
        self.places[index] = _StorageInfo(self._name, *self._units.append_bytes(data))

    def finish(self) -> DataFile:
        return self._units.finish()

    def close(self) -> None:
        self._units.close()


@dataclass(frozen=True, slots=True)
class Committing:
    """What rank 0 needs to make the folder a checkpoint."""

    folder: SaveFolder
    manifest: Manifest  # without files
    keep_last: int | None
    aliases: Mapping[str, str]  # further key of a tensor -> the key that it is saved under


class Writer(StorageWriter):
    """Writes one checkpoint; one object a save and rank.

    stream: writes to the file what DCP must not ask the planner for; called once.
    committing: on rank 0.
    """

    def __init__(
        self,
        file: RankFile,
        stream: Callable[[RankFile], None] = lambda file: None,
        committing: Committing | None = None,
        failure: BaseException | None = None,
    ) -> None:
        self._file = file
        self._stream = stream
        self._committing = committing
        self._failure = failure  # of this rank before DCP began: raised where all ranks hear it

    # -- what DCP calls, in order --

    def reset(self, checkpoint_id: Any = None) -> None:
        """Nothing: one object writes once."""

    def storage_meta(self) -> StorageMeta | None:
        return None

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        with said_plainly():
            if self._failure is not None:
                raise self._failure

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        with said_plainly(), torch.no_grad():
            return self._write(plan, planner)

    def _write(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        self._stream(self._file)
        for item in plan.items:
            if item.index in self._file.places:
                continue
            data = planner.resolve_data(item)
            if item.type == WriteItemType.BYTE_IO:
                assert isinstance(data, io.BytesIO)
                self._file.add_bytes(item.index, data.getbuffer())
            else:
                assert isinstance(data, Tensor)
                self._add(item.index, data)
        places = self._file.places
        results: list[Any] = [
            WriteResult(item.index, places[item.index].length, places[item.index])
            for item in plan.items
        ]
        results.append(self._file.finish())
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On rank 0, when all files are complete and synced."""
        with said_plainly():
            self._commit(metadata, results)

    def _commit(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        assert self._committing is not None
        files, storage = [], {}
        for one_rank in results:
            *items, file = one_rank
            assert isinstance(file, DataFile)
            files.append(file)
            storage.update({item.index: item.storage_data for item in items})
        metadata.storage_data = storage
        metadata.version = DCP_VERSION
        _add_aliases(metadata, self._committing.aliases)
        pickled = pickle.dumps(metadata)
        bare = self._committing.manifest
        self._committing.folder.commit(
            Manifest(
                world_size=bare.world_size,
                sequence=bare.sequence,
                metadata_nbytes=len(pickled),
                metadata_crc32=zlib.crc32(pickled),
                files=tuple(files),
                about=bare.about,
                index={
                    "metadata": zlib.crc32(pickled),
                    "tensors": encode_index(index_of(metadata), [file.name for file in files]),
                },
            ),
            pickled,
            self._committing.keep_last,
        )

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True

    def _add(self, index: MetadataIndex, data: Tensor) -> None:
        data = data.detach()
        if can_be_raw(data.dtype):
            self._file.add_tensor(index, data, tuple(data.shape))
        else:
            whole = io.BytesIO()
            torch.save(data.cpu().clone(), whole)
            self._file.add_bytes(index, whole.getbuffer())


def _add_aliases(metadata: Metadata, aliases: Mapping[str, str]) -> None:
    """Tied parameters are saved once and found under each of their names."""
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
