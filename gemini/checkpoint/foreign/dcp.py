"""torch.distributed.checkpoint's own files and values: what ours is for its readers, and back.

`parts_in` and `local_part` are of tensors that torch has split (DTensors of FSDP2, shards of its
older FSDP, `FlatRuns`); `DcpItems` reads the files of its writer, which have no checksums, and runs
no code of their pickles.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import _create_chunk_list
from torch.distributed.checkpoint.utils import find_state_dict_object
from torch.distributed.tensor import DTensor

from gemini import strangers
from gemini.checkpoint.format.boxes import Box, StreamedRuns, in_run
from gemini.checkpoint.format.manifest import CorruptError, SavedPart, SavedValue, reading
from gemini.checkpoint.untrusted.torch_files import FileSlice, safe_tensor

WHOLE_ITEMS = 8  # of files that are not ours, kept in memory: planes of a few parameters
Place = tuple[tuple[int, ...], tuple[int, ...]]  # offsets and sizes in the whole tensor


def parts_in(value: Tensor) -> list[Place]:
    """Parts of a tensor that this rank has; none of a DTensor of other ranks."""
    if isinstance(value, DTensor) and value.device_mesh.get_coordinate() is None:
        return []
    return [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in _create_chunk_list(value)]


def local_part(value: Tensor, offsets: tuple[int, ...]) -> Tensor:
    """The part that begins at `offsets`, detached."""
    found: Tensor = find_state_dict_object({"": value}, MetadataIndex("", offsets))
    return found.detach()


class FlatRuns(Tensor):
    """Tensor of which this rank has some runs, for torch.distributed.checkpoint.

    held: values [n] of each run by its first element.
    """

    part: StreamedRuns
    held: dict[int, Tensor]

    @staticmethod
    def __new__(cls, part: StreamedRuns) -> FlatRuns:
        self: FlatRuns = torch.Tensor._make_wrapper_subclass(
            cls, part.shape, dtype=part.dtype, device=torch.device("cpu")
        )
        self.part, self.held = part, {}
        return self

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        shape, number = tuple(self.shape), len(self.part.runs)
        return f"FlatRuns(shape={shape}, dtype={self.dtype}, runs={number})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            (self,) = args
            copy = FlatRuns(self.part)
            copy.held = self.held
            return copy
        raise RuntimeError(
            f"{func} on a FlatRuns: it describes a part of a tensor to "
            "torch.distributed.checkpoint and is no tensor to compute with"
        )

    # -- the protocol of torch.distributed._checkpointable --

    def __create_write_items__(self, fqn: str, obj: Any) -> list[WriteItem]:
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                index=MetadataIndex(fqn, box.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(_chunk(box), properties, self.size()),
            )
            for box in self.part.boxes()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [_chunk(box) for box in self.part.boxes()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        runs = self.part
        box = next(box for box in runs.boxes() if torch.Size(box.offsets) == index.offset)
        start, _ = next(run for run in runs.runs if run[0] <= box.start < run[0] + run[1])
        return in_run(self.held[start], start, box, runs.region)


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))


class DcpItems:
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
            return safe_tensor(view, f"{path}, {key}", entry.dtype, part.sizes)

    def close(self) -> None:
        self._recent.clear()
