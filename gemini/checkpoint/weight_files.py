"""Folders of weights as Hugging Face lays them out, with an index, written a tensor at a time.

A file of safetensors is the length of a JSON header (u64), the header, and raw tensors: the header
is known from shapes, so tensors are streamed behind it. A file of torch.save is held in memory
until all of its tensors are there.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from gemini.checkpoint.format.errors import CheckpointError, on_disk
from gemini.checkpoint.format.manifest import is_plain_name
from gemini.checkpoint.untrusted.lazy_tensors import DTYPE_NAMES, INDEX, TORCH_INDEX, TensorSpec
from gemini.nvme.files import calls

from .format import unfinished


class WeightFile(Protocol):
    """A file of weights that is being written."""

    def add(self, name: str, value: Tensor) -> None:
        """The next tensor, on the CPU and contiguous."""
        ...

    def close(self) -> None:
        """All were added."""
        ...

    def abandon(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Format:
    """How files are named, and what makes one from its path and the specs of its tensors."""

    stem: str
    suffix: str
    index: str
    open: Callable[[Path, Sequence[TensorSpec]], WeightFile]


class _SafetensorsWeightFile:
    def __init__(self, path: Path, specs: Sequence[TensorSpec]) -> None:
        self._file = path.open("xb")
        self._file.write(_header(specs))

    def add(self, name: str, value: Tensor) -> None:
        self._file.write(value.reshape(-1).view(torch.uint8).numpy().data)

    def close(self) -> None:
        self._file.close()

    abandon = close


class _TorchWeightFile:
    def __init__(self, path: Path, specs: Sequence[TensorSpec]) -> None:
        self._path = path
        self._state: dict[str, Tensor] = {}

    def add(self, name: str, value: Tensor) -> None:
        self._state[name] = value.clone()  # else the file would have all of what it is a view of

    def close(self) -> None:
        torch.save(self._state, self._path)
        self._state = {}

    def abandon(self) -> None:
        self._state = {}


SAFETENSORS = Format("model", ".safetensors", INDEX, _SafetensorsWeightFile)
TORCH = Format("pytorch_model", ".bin", TORCH_INDEX, _TorchWeightFile)


class WeightsWriter:
    """Writes tensors in the order of their specs into as many files as it takes."""

    def __init__(
        self,
        target: Path,
        specs: Sequence[TensorSpec],
        limit: int,
        prefix: str = "",
        kind: Format = SAFETENSORS,
    ) -> None:
        """target: a new or empty folder. limit: bytes of tensors in a file.

        Raises CheckpointError for a folder that is not empty or is named as a file is, and for a
        prefix that is no name.
        """
        before = f"{prefix}." if prefix else ""
        if before and not is_plain_name(before):
            raise CheckpointError(f"cannot export with prefix={prefix!r}; expected no slash in it")
        if target.suffix == kind.suffix:
            raise CheckpointError(
                f"cannot export to {target}: that names a file; expected a folder, where files of "
                "weights, their index and a config go"
            )
        self._index_name = f"{before}{kind.index}"
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise CheckpointError(f"cannot export to {target}: it exists; give a new folder")
        self._target = target
        self._kind = kind
        self.folder = target.parent / f".{target.name}.exporting"
        with on_disk("export to", target):
            calls.make_folders(target.parent)
            with unfinished.locked_if_dead(self.folder) as is_dead:
                if is_dead:
                    unfinished.remove(self.folder)
            try:
                self._lock = unfinished.make(self.folder)
            except FileExistsError:
                unfinished.refuse(self.folder, target, "export")
        files = _files(specs, limit)
        names = [
            f"{before}{kind.stem}-{i + 1:05}-of-{len(files):05}{kind.suffix}"
            for i in range(len(files))
        ]
        self._files = dict(zip(names, files, strict=True))
        self._coming = [(n, spec, i) for n, file in self._files.items()
                        for i, spec in enumerate(file)][::-1]  # fmt: skip
        self._index = {
            "metadata": {"total_size": sum(spec.nbytes for spec in specs)},
            "weight_map": {spec.name: n for n, file in self._files.items() for spec in file},
        }
        self._open: WeightFile | None = None

    def add(self, name: str, value: Tensor) -> None:
        """The next tensor."""
        file, spec, number = self._coming.pop()
        assert name == spec.name and tuple(value.shape) == spec.shape
        value = value.detach().to("cpu", spec.dtype).contiguous()
        with on_disk("write", self.folder / file):
            if number == 0:
                self._close()
                self._open = self._kind.open(self.folder / file, self._files[file])
            assert self._open is not None
            self._open.add(name, value)

    def commit(self) -> None:
        """Everything was added: sync and rename."""
        assert not self._coming
        with on_disk("export to", self._target):
            self._close()
            text = json.dumps(self._index, indent=2).encode()
            calls.write_whole(self.folder / self._index_name, text)
            for path in self.folder.iterdir():
                calls.sync_file(path)
            calls.sync_folder(self.folder)
            calls.rename(self.folder, self._target)
            calls.sync_folder(self._target.parent)
            calls.unlink(self._target / unfinished.LOCK)
        calls.close(self._lock)

    def abandon(self) -> None:
        """It cannot be finished: its folder goes."""
        if self._open is not None:
            self._open.abandon()
        unfinished.remove(self.folder)
        calls.close(self._lock)

    def _close(self) -> None:
        if self._open is not None:
            self._open.close()
            self._open = None


def spec_of(
    name: str, own: torch.dtype, shape: Sequence[int], asked: torch.dtype | None
) -> TensorSpec:
    """What a file holds of a tensor of dtype `own`. Raises CheckpointError for a strange one."""
    dtype = asked if asked is not None and own.is_floating_point else own
    if dtype not in DTYPE_NAMES:
        raise CheckpointError(f"{name} has dtype {dtype}, which safetensors does not hold")
    return TensorSpec(name, dtype, tuple(shape))


def _files(specs: Sequence[TensorSpec], limit: int) -> list[list[TensorSpec]]:
    """Specs in order, cut where a file would pass `limit`; a larger tensor has its own."""
    files: list[list[TensorSpec]] = [[]]
    filled = 0
    for spec in specs:
        if files[-1] and filled + spec.nbytes > limit:
            files.append([])
            filled = 0
        files[-1].append(spec)
        filled += spec.nbytes
    return files


def _header(specs: Sequence[TensorSpec]) -> bytes:
    fields: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for spec in specs:
        fields[spec.name] = {
            "dtype": DTYPE_NAMES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [end, end + spec.nbytes],
        }
        end += spec.nbytes
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
