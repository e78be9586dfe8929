"""Weights in files of safetensors, or in torch.save files with Hugging Face's names, read one by
one."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gemini import strangers
from gemini.checkpoint.format.manifest import (
    CorruptError,
    FormatError,
    is_plain_name,
    read_json,
    reading,
)
from gemini.saved_names import renamed

from .torch_files import first_line, has_own_bytes, load_mapped

INDEX = "model.safetensors.index.json"
TORCH_INDEX = "pytorch_model.bin.index.json"
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
_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name, dtype and shape of one tensor in a file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class LazyTensors(Mapping[str, Tensor]):
    """Tensors of a file of safetensors, or of a folder of weights, each read on request.

    A folder has safetensors, or else `pytorch_model*.bin`, which are mapped. Raises FormatError for
    a folder without either, and for a file that cannot be read.
    """

    def __init__(self, path: Path, stack: ExitStack) -> None:
        folder = path.parent if path.is_file() else path
        self.folder = folder
        names = [path.name] if path.is_file() else weight_files(folder)
        if not names:
            raise FormatError(f"{folder} has no safetensors, and no pytorch_model*.bin")
        self._file_of: dict[str, Any] = {}
        homes: dict[str, str] = {}
        for name in names:
            try:
                path = folder / name
                file = _TorchFile(path) if name.endswith(".bin") else _Safetensors(path, stack)
            except Exception as error:
                raise FormatError(f"{folder / name} cannot be read: {first_line(error)}") from error
            for key in file.keys():  # noqa: SIM118
                if key in homes:
                    raise FormatError(
                        f"{folder} has {key:.80} in {homes[key]} and in {name}; expected it once: "
                        "give the file that is meant"
                    )
                self._file_of[key], homes[key] = (file, key), name

    def tie(self, tied: Iterable[Sequence[str]]) -> None:
        """Let a tied parameter be found under each of its names if it has one of them."""
        for names in tied:
            there = [name for name in names if name in self._file_of]
            for name in names if there else ():
                self._file_of.setdefault(name, self._file_of[there[0]])

    def rename(self, name_of: Callable[[str], str]) -> None:
        """Let each tensor be found under the name that `name_of` makes of the one it has."""
        self._file_of = dict(renamed(self._file_of, name_of))

    def with_others(self, others: Mapping[str, Any]) -> LazyTensors:
        """Copy of this mapping with further names. others: an object with a file's methods each."""
        found = copy.copy(self)
        found._file_of = self._file_of | {name: (made, name) for name, made in others.items()}
        return found

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
        """Dtype and shape of a tensor, from the header. Raises FormatError for an unknown dtype."""
        file, key = self._file_of[name]
        dtype, shape = file.described(key)
        if dtype not in _DTYPES:
            raise FormatError(
                f"{name} in {self.folder} has dtype {dtype}; expected one of {', '.join(_DTYPES)}"
            )
        return TensorSpec(name, _DTYPES[dtype], tuple(shape))

    def sizes(self) -> dict[str, torch.Size]:
        """Shapes of all tensors, from headers."""
        return {name: file.described(key)[1] for name, (file, key) in self._file_of.items()}

    def copy(self) -> dict[str, Tensor]:
        """Dict of all tensors, mapped and not read, for `load_state_dict` of a plain module."""
        return {name: file.mapped(key) for name, (file, key) in self._file_of.items()}


def weight_files(folder: Path) -> list[str]:
    """Names of a folder's files of weights, from its index if it has one."""
    for index_name, pattern in ((INDEX, "*.safetensors"), (TORCH_INDEX, "*pytorch_model*.bin")):
        indices = sorted(folder.glob(f"*{index_name}"))
        if len(indices) == 1:
            return _names_in(indices[0])
        names = sorted(path.name for path in folder.glob(pattern))
        if names:
            return names
    return []


class _Safetensors:
    """A file of safetensors. A tensor is read into memory of its own: pages of a mapping stay
    resident once they are read, and count as data of the process."""

    def __init__(self, path: Path, stack: ExitStack) -> None:
        from safetensors import safe_open

        self._path, self._stack = path, stack
        with strangers.opened(path) as file:
            with safe_open(path, framework="numpy"):  # which checks the header
                pass
            nbytes = int.from_bytes(file.read(8), "little")
            entries = strangers.parsed(file.read(nbytes))
        self._start = 8 + nbytes
        self._entries = {key: entry for key, entry in entries.items() if key != "__metadata__"}
        self._mapping: Any = None

    def keys(self) -> Iterable[str]:
        return self._entries.keys()

    def described(self, key: str) -> tuple[str, torch.Size]:
        """Dtype and shape."""
        entry = self._entries[key]
        return entry["dtype"], torch.Size(entry["shape"])

    def get_tensor(self, key: str) -> Tensor:
        entry = self._entries[key]
        dtype = _DTYPES.get(entry["dtype"])
        if dtype is None:  # of a few bits
            return self.mapped(key)
        begin, end = entry["data_offsets"]
        into = torch.empty(end - begin, dtype=torch.uint8)
        with reading(self._path), strangers.opened(self._path) as file:
            file.seek(self._start + begin)
            read: Any = file
            if read.readinto(into.numpy()) < end - begin:
                raise CorruptError(f"{self._path} ends before byte {self._start + end}")
        return into.view(dtype).reshape(entry["shape"])

    def mapped(self, key: str) -> Tensor:
        """Tensor of a mapping of the file; the mapping stays until the stack closes."""
        from safetensors import safe_open

        if self._mapping is None:
            self._mapping = self._stack.enter_context(safe_open(self._path, framework="pt"))
        tensor: Tensor = self._mapping.get_tensor(key)
        return tensor


class _TorchFile:
    """A state dict of torch.save, mapped. It has the methods of `_Safetensors`."""

    def __init__(self, path: Path) -> None:
        content = load_mapped(path)
        if not isinstance(content, Mapping):
            raise FormatError(f"it holds a {type(content).__name__}; expected a state dict")
        for key, value in content.items():
            if not (isinstance(key, str) and isinstance(value, Tensor) and has_own_bytes(value)):
                raise FormatError(f"{key!r:.80} is no tensor with all of its elements")
        self._content: Mapping[str, Tensor] = content

    def keys(self) -> Iterable[str]:
        return self._content.keys()

    def get_tensor(self, key: str) -> Tensor:
        return self._content[key]

    mapped = get_tensor

    def described(self, key: str) -> tuple[str, torch.Size]:
        tensor = self._content[key]
        return DTYPE_NAMES.get(tensor.dtype, str(tensor.dtype)), tensor.shape


def _names_in(index: Path) -> list[str]:
    """Sorted names of the files in an index. Raises FormatError for a damaged one, or for a name
    outside of its folder."""
    try:
        names = sorted({*strangers.parsed(read_json(index))["weight_map"].values()})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise FormatError(f"{index} is no index of weights: {error!r:.200}") from error
    for name in names:
        if not is_plain_name(name):
            raise FormatError(f"{index} names {name!r:.80}, expected files of its folder")
    return names
