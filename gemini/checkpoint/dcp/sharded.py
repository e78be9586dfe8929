"""Sharded tensors of this project, as torch.distributed.checkpoint wants them.

A `FlatRuns` stands for a whole parameter, or a plane of its state, of which this rank holds some
runs of the flattened elements. It tells DCP the boxes of its runs. Mostly it holds no values: those
are streamed by the writer and the reader of this package.
"""

from __future__ import annotations

import functools
import io
import pickle
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from gemini.checkpoint.format.boxes import Box, Region, boxes_of_region
from gemini.chunk.local import part_of

FlatRun = tuple[int, int]  # first element, and how many


class FlatRuns(Tensor):
    """A tensor of `shape` of which this rank has `runs`; see the top of the file."""

    runs: tuple[FlatRun, ...]
    order: tuple[int, ...]  # of each run among all runs of this rank, as they are stored
    held: dict[int, Tensor]  # [n] by first element; empty where they are streamed
    region: Region  # in whose elements runs count

    @staticmethod
    def __new__(
        cls,
        shape: Sequence[int],
        dtype: torch.dtype,
        runs: Sequence[FlatRun],
        order: Sequence[int] = (),
        region: Region | None = None,
    ) -> FlatRuns:
        self: FlatRuns = torch.Tensor._make_wrapper_subclass(
            cls, torch.Size(shape), dtype=dtype, device=torch.device("cpu")
        )
        self.runs = tuple(runs)
        self.order = tuple(order) or tuple(range(len(self.runs)))
        self.held = {}
        self.region = Region.whole(shape) if region is None else region
        return self

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"FlatRuns(shape={tuple(self.shape)}, dtype={self.dtype}, runs={len(self.runs)})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            (self,) = args
            copy = FlatRuns(self.shape, self.dtype, self.runs, self.order, self.region)
            copy.held = self.held
            return copy
        raise RuntimeError(
            f"{func} on a FlatRuns: it describes a part of a tensor to "
            "torch.distributed.checkpoint and holds no values"
        )

    def flat_part(self, whole: Tensor) -> Tensor:
        """The elements in which runs count, flat, of values of `shape`."""
        return part_of(whole, self.region.segments).reshape(-1)

    def boxes_by_run(self) -> list[tuple[int, tuple[Box, ...]]]:
        """(first element, boxes) of all runs, in order."""
        return [(s, boxes_of_region(self.region, s, s + n)) for s, n in self.runs]

    def boxes(self) -> list[Box]:
        """Of all runs, in order."""
        return [box for _, boxes in self.boxes_by_run() for box in boxes]

    # -- the protocol of torch.distributed._checkpointable --

    def __create_write_items__(self, fqn: str, obj: Any) -> list[WriteItem]:
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                index=MetadataIndex(fqn, box.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(_chunk(box), properties, self.size()),
            )
            for box in self.boxes()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [_chunk(box) for box in self.boxes()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        if not self.held:
            raise RuntimeError(f"{index.fqn} is streamed by the writer of gemini.checkpoint only")
        box = next(box for box in self.boxes() if torch.Size(box.offsets) == index.offset)
        start, _ = next(run for run in self.runs if run[0] <= box.start < run[0] + run[1])
        return in_run(self.held[start], start, box, self.region)


def in_run(values: Tensor, start: int, box: Box, region: Region) -> Tensor:
    """A box in the elements [start, start + n) of a flattened region, `values` [n]: a view."""
    return values[box.start - start :].as_strided(box.sizes, region.strides)


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))


# -- what one item is on disk --

_MAGIC, _PROTOCOL = 0x1950A86A20F9469CFC6C, 1001  # of torch.save's streaming format
_STORAGES = {
    torch.float64: torch.DoubleStorage,
    torch.float32: torch.FloatStorage,
    torch.bfloat16: torch.BFloat16Storage,
    torch.float16: torch.HalfStorage,
    torch.uint8: torch.ByteStorage,
    torch.int8: torch.CharStorage,
    torch.int16: torch.ShortStorage,
    torch.int32: torch.IntStorage,
    torch.int64: torch.LongStorage,
    torch.bool: torch.BoolStorage,
}


class _Storage:
    """Stands for a storage of `numel` elements."""

    def __init__(self, dtype: torch.dtype, numel: int) -> None:
        self.reference = ("storage", _STORAGES[dtype], "0", "cpu", numel, None)


class _Rebuilt:
    """Pickles as a contiguous tensor over a storage."""

    def __init__(self, dtype: torch.dtype, sizes: tuple[int, ...], numel: int) -> None:
        strides: list[int] = []
        stride = 1
        for size in reversed(sizes):
            strides.insert(0, stride)
            stride *= size
        self._arguments: tuple[Any, ...] = (
            _Storage(dtype, numel),
            0,
            sizes,
            tuple(strides),
            False,
            OrderedDict(),
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return torch._utils._rebuild_tensor_v2, self._arguments


class _Pickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> Any:
        return obj.reference if isinstance(obj, _Storage) else None


def can_be_raw(dtype: torch.dtype) -> bool:
    """Whether `tensor_header` knows this dtype."""
    return dtype in _STORAGES


@functools.lru_cache(maxsize=4096)
def tensor_header(dtype: torch.dtype, sizes: tuple[int, ...]) -> bytes:
    """What stands before a tensor's raw elements so that `torch.load(weights_only=True)` reads it.

    torch.save's format from before zip files: all there is to say comes first, so that elements
    can be streamed behind it, and DCP's own reader can read what this package writes.
    """
    numel = 1
    for size in sizes:
        numel *= size
    out = io.BytesIO()
    pickle.dump(_MAGIC, out, 2)
    pickle.dump(_PROTOCOL, out, 2)
    kinds = {"short": 2, "int": 4, "long": 4}
    pickle.dump({"protocol_version": _PROTOCOL, "little_endian": True, "type_sizes": kinds}, out, 2)
    _Pickler(out, 2).dump(_Rebuilt(dtype, sizes, numel))
    pickle.dump(["0"], out, 2)
    out.write(numel.to_bytes(8, "little"))
    return out.getvalue()
