"""What can be loaded from: a folder of DCP, ours or not, a file of torch.save, or weights alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from gemini.checkpoint.format.errors import CorruptError, FormatError
from gemini.checkpoint.format.folder import find
from gemini.checkpoint.format.manifest import METADATA, Manifest
from gemini.checkpoint.format.small_files import memory_limit, read_manifest
from gemini.checkpoint.untrusted.lazy_tensors import LazyTensors, weight_files
from gemini.checkpoint.untrusted.metadata import read_index
from gemini.checkpoint.untrusted.torch_files import first_line, has_own_bytes, load_mapped

from .ranks import Ranks
from .reader import Reader, RunFiller, RunWalk
from .sharded import FlatRuns

_MOST_LEVELS = 32  # of a state dict
_VALUE_BYTES = 160  # of memory that one more name takes


class CheckpointSource(Protocol):
    """Tensors and small values by key."""

    path: Path

    @property
    def sizes(self) -> Mapping[str, torch.Size | None]:
        """Of every tensor; None for what is none."""
        ...

    def load_into(self, state: dict[str, Any], ranks: Ranks) -> None:
        """Fill tensors in place, replace other values. Collective."""
        ...

    def fill(self, tensors: Mapping[str, FlatRuns], fill: RunWalk, ranks: Ranks) -> None:
        """Hand every run of `tensors` to `fill`. Collective."""
        ...


class DcpSource:
    """A folder with `.metadata`."""

    def __init__(self, path: Path, stack: ExitStack) -> None:
        self.path = path
        self.manifest: Manifest | None = read_manifest(path)
        if not (path / METADATA).exists():
            if self.manifest is not None:
                raise CorruptError(f"{path / METADATA} is missing")
            raise FormatError(f"{path} is no checkpoint: it has no {METADATA}")
        self.index = read_index(path, self.manifest)
        self.sizes: dict[str, torch.Size | None] = {
            key: None if entry.dtype is None else entry.size for key, entry in self.index.items()
        }
        self._reader = Reader(path, self.manifest, self.index)
        stack.callback(self._reader.close)

    def load_into(self, state: dict[str, Any], ranks: Ranks) -> None:
        ranks.together(lambda: self._reader.load_into(state))

    def fill(self, tensors: Mapping[str, FlatRuns], fill: RunWalk, ranks: Ranks) -> None:
        ranks.together(lambda: self._reader.fill(tensors, fill))


class FileSource:
    """A file of torch.save: a module's state dict, or one with an optimizer's beside it."""

    def __init__(self, path: Path, names: Sequence[str]) -> None:
        """names: of the optimizer's parameters in order, for states that are keyed by position."""
        self.path = path
        try:
            content = load_mapped(path)
        except Exception as error:  # damaged zip files and pickles fail in any way
            first = first_line(error)
            raise FormatError(f"{path} is no file of torch.save that is safe: {first}") from error
        if not isinstance(content, Mapping):
            raise FormatError(f"{path} holds a {type(content).__name__}; expected a state dict")
        self._values: dict[str, Any] = {}
        left = memory_limit(path.stat().st_size, 0)
        for key, value in _flat("", content, names, _MOST_LEVELS):
            left -= _VALUE_BYTES + len(key)
            if left < 0:
                raise FormatError(f"{path} holds more values than it has bytes")
            if isinstance(value, Tensor) and not has_own_bytes(value):
                raise FormatError(f"{path}: {key:.80} is a tensor without all of its elements")
            self._values[key] = value

    @property
    def sizes(self) -> dict[str, torch.Size | None]:
        return {
            key: value.size() if isinstance(value, Tensor) else None
            for key, value in self._values.items()
        }

    def load_into(self, state: dict[str, Any], ranks: Ranks) -> None:
        def load() -> None:
            for key, there in state.items():
                value = self._values[key]
                if isinstance(there, Tensor):
                    _put(there, torch.as_tensor(value))
                else:
                    state[key] = value

        ranks.together(load)

    def fill(self, tensors: Mapping[str, FlatRuns], fill: RunWalk, ranks: Ranks) -> None:
        ranks.together(lambda: fill(_putting(self._values, tensors)))


class WeightsSource:
    """Weights in a file of safetensors, or in a folder that `LazyTensors` reads."""

    def __init__(self, path: Path, stack: ExitStack) -> None:
        self.path = path
        self._tensors = LazyTensors(path, stack)
        self.sizes: dict[str, torch.Size | None] = dict(self._tensors.sizes())

    def load_into(self, state: dict[str, Any], ranks: Ranks) -> None:
        def load() -> None:
            for key, there in state.items():
                _put(there, self._tensors[key])

        ranks.together(load)

    def fill(self, tensors: Mapping[str, FlatRuns], fill: RunWalk, ranks: Ranks) -> None:
        ranks.together(lambda: fill(_putting(self._tensors, tensors)))


def _putting(whole: Mapping[str, Tensor], tensors: Mapping[str, FlatRuns]) -> RunFiller:
    """Gives runs of these tensors their values out of whole ones."""
    read: dict[str, Tensor] = {}  # the last one: runs of a tensor come one after the other

    def put(key: str, start: int, values: Tensor) -> bool:
        if key not in tensors:
            return False
        if key not in read:
            read.clear()
            read[key] = tensors[key].flat_part(whole[key])
        values.copy_(read[key][start : start + values.numel()])
        return True

    return put


def open_source(path: Path, names: Sequence[str], stack: ExitStack) -> CheckpointSource:
    """Raises FormatError for what is no checkpoint, CorruptError for one that is damaged.

    stack: closes what stays open meanwhile.
    """
    if _has_weights_alone(path):
        return WeightsSource(path, stack)
    if path.is_file():
        return FileSource(path, names)
    return DcpSource(find(path), stack)


def _has_weights_alone(path: Path) -> bool:
    """A file that begins as safetensors do, or a folder of weights and no checkpoint."""
    if path.is_dir():
        return not (path / METADATA).exists() and bool(weight_files(path))
    if not path.is_file():
        return False
    with path.open("rb") as file:
        start = file.read(9)
    return start[8:] == b"{" and int.from_bytes(start[:8], "little") < path.stat().st_size


def _put(there: Tensor, value: Tensor) -> None:
    """A whole value into a tensor that may be one rank's part of it."""
    if isinstance(there, DTensor):
        value = distribute_tensor(
            value.to(there.device), there.device_mesh, there.placements, src_data_rank=None
        )
    there.copy_(value)


def _flat(prefix: str, value: Any, names: Sequence[str], levels: int) -> Iterator[tuple[str, Any]]:
    """Leaves by their path, as DCP flattens; state by position under the names of parameters."""
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
