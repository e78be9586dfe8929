"""Tensors in files of safetensors, read one by one."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gemini.checkpoint.format.errors import FormatError
from gemini.checkpoint.format.manifest import is_plain_name
from gemini.checkpoint.format.small_files import read_json

INDEX = "model.safetensors.index.json"
DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class LazyTensors(Mapping[str, Tensor]):
    """Tensors of a file of safetensors, or of a folder of them, each read when it is asked for."""

    def __init__(self, path: Path, stack: ExitStack) -> None:
        from safetensors import safe_open

        folder = path.parent if path.is_file() else path
        self.folder = folder
        indices = sorted(folder.glob(f"*{INDEX}"))
        if path.is_file():
            names = [path.name]
        elif len(indices) == 1:
            names = _names_in(indices[0])
        else:
            names = sorted(path.name for path in folder.glob("*.safetensors"))
        if not names:
            raise FormatError(f"{folder} has no safetensors")
        self._file_of: dict[str, Any] = {}
        for name in names:
            try:
                file = stack.enter_context(safe_open(folder / name, framework="pt"))
            except Exception as error:
                raise FormatError(f"{folder / name} cannot be read: {error}") from error
            self._file_of.update((key, (file, key)) for key in file.keys())  # noqa: SIM118

    def tie(self, tied: Iterable[Sequence[str]]) -> None:
        """A tied parameter is there under each of its names if it is under one."""
        for names in tied:
            there = [name for name in names if name in self._file_of]
            for name in names if there else ():
                self._file_of.setdefault(name, self._file_of[there[0]])

    def __getitem__(self, name: str) -> Tensor:
        file, key = self._file_of[name]
        tensor: Tensor = file.get_tensor(key)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_of)

    def __len__(self) -> int:
        return len(self._file_of)

    def __contains__(self, name: object) -> bool:
        return name in self._file_of  # and nothing is read, as by Mapping's own

    def spec_of(self, name: str) -> TensorSpec:
        """Its dtype and shape, which take no reading. Raises FormatError for another dtype."""
        file, key = self._file_of[name]
        found = file.get_slice(key)
        dtypes = [dtype for dtype, said in DTYPE_NAMES.items() if said == found.get_dtype()]
        if not dtypes:
            raise FormatError(
                f"{name} in {self.folder} has dtype {found.get_dtype()}; expected one of "
                f"{', '.join(DTYPE_NAMES.values())}"
            )
        return TensorSpec(name, dtypes[0], tuple(found.get_shape()))

    def sizes(self) -> dict[str, torch.Size]:
        """Of all, read from headers."""
        return {
            name: torch.Size(file.get_slice(key).get_shape())
            for name, (file, key) in self._file_of.items()
        }

    def copy(self) -> dict[str, Tensor]:
        """What a plain module's `load_state_dict` makes first; files are mapped, not read."""
        return {name: self[name] for name in self}


def _names_in(index: Path) -> list[str]:
    """Of the files that an index names."""
    try:
        names = set(json.loads(read_json(index))["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise FormatError(f"{index} is no index of safetensors: {error!r:.200}") from error
    for name in names:
        if not is_plain_name(name):
            raise FormatError(f"{index} names {name!r:.80}, expected files of its folder")
    return sorted(names)
