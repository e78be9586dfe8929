"""Sources of a load that are no checkpoints: a file of torch.save, or weights of safetensors."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from gemini import strangers
from gemini.checkpoint.format.boxes import StreamedRuns
from gemini.checkpoint.format.manifest import (
    METADATA,
    CorruptError,
    FormatError,
    check_kind,
    memory_limit,
    reading,
)
from gemini.checkpoint.format.source import RunFiller
from gemini.checkpoint.untrusted.lazy_tensors import LazyTensors, weight_files
from gemini.checkpoint.untrusted.torch_files import first_line, has_own_bytes, load_mapped
from gemini.optim.rules.saved import number_of
from gemini.saved_names import renamed

_MOST_LEVELS = 32  # of a state dict
_VALUE_BYTES = 160  # of memory that one more name takes


class WholeSource:
    """Whole tensors and values by key, of files of weights or of a file of torch.save."""

    def __init__(
        self, path: Path, values: Mapping[str, Any], sizes: Mapping[str, torch.Size | None]
    ) -> None:
        self.path, self.sizes, self._values = path, sizes, values
        self._key_of: Mapping[str, str] = {key: key for key in sizes}

    def rename(self, name_of: Callable[[str], str]) -> None:
        self.sizes = renamed(self.sizes, name_of)
        self._key_of = renamed(self._key_of, name_of)

    def load_into(self, state: dict[str, Any]) -> None:
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
            check_kind(key, value.dtype, there.dtype)
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

    def filler(self, tensors: Mapping[str, StreamedRuns]) -> RunFiller:
        if isinstance(self._values, dict):  # others are files, whose tensors are read on request
            for key, tensor in tensors.items():
                check_kind(key, self._values[self._key_of[key]].dtype, tensor.dtype)
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


def files_at(path: Path, names: Sequence[str], stack: ExitStack) -> WholeSource | None:
    """Open a file, or a folder of weights; None for another folder.

    names, stack: see `gemini.checkpoint.reader.open_source`. Raises FormatError.
    """
    if path.is_file():
        path = path.resolve()  # a link that the caller names is followed, and none in a folder
    if _has_weights_alone(path):
        tensors = LazyTensors(path, stack)
        return WholeSource(path, tensors, tensors.sizes())
    if not path.is_file():
        return None
    values = _values_of_file(path, names)
    sizes = {k: v.size() if isinstance(v, Tensor) else None for k, v in values.items()}
    return WholeSource(path, values, sizes)


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
