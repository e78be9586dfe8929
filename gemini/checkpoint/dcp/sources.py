"""What can be loaded from: a folder of DCP, ours or not, a file of torch.save, or weights alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from gemini.checkpoint.format.errors import FormatError
from gemini.checkpoint.format.folder import find
from gemini.checkpoint.format.manifest import METADATA
from gemini.checkpoint.format.small_files import memory_limit
from gemini.checkpoint.untrusted.lazy_tensors import LazyTensors, weight_files
from gemini.checkpoint.untrusted.torch_files import first_line, has_own_bytes, load_mapped

from .reader import Reader, RunFiller, RunWalk
from .sharded import FlatRuns

_MOST_LEVELS = 32  # of a state dict
_VALUE_BYTES = 160  # of memory that one more name takes


class CheckpointSource(Protocol):
    """Tensors and small values by key: a folder (`Reader`), or whole ones."""

    path: Path
    sizes: Mapping[str, torch.Size | None]  # of every tensor; None for what is none

    def load_into(self, state: dict[str, Any]) -> None:
        """Fill tensors in place, of sharded ones this rank's part; replace other values."""
        ...

    def fill(self, tensors: Mapping[str, FlatRuns], walk: RunWalk) -> None:
        """Hand `walk` what gives every run of `tensors` its values."""
        ...


class WholeSource:
    """Whole tensors and values by key."""

    def __init__(
        self, path: Path, values: Mapping[str, Any], sizes: Mapping[str, torch.Size | None]
    ) -> None:
        self.path, self.sizes, self._values = path, sizes, values

    def load_into(self, state: dict[str, Any]) -> None:
        for key, there in state.items():
            value = self._values[key]
            if isinstance(there, Tensor):
                _put(there, torch.as_tensor(value))
            else:
                state[key] = value

    def fill(self, tensors: Mapping[str, FlatRuns], walk: RunWalk) -> None:
        walk(_putting(self._values, tensors))


def _values_of_file(path: Path, names: Sequence[str]) -> dict[str, Any]:
    """Of a file of torch.save: a module's state dict, or one with an optimizer's beside it.

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
