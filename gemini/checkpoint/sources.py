"""What can be loaded from: a folder of DCP, ours or not, or a file of torch.save."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, TensorStorageMetadata

from .errors import CorruptError, FormatError
from .folder import find, read_manifest
from .manifest import METADATA, Manifest
from .metadata import read_metadata
from .ranks import Ranks
from .reader import Fill, Reader
from .sharded import FlatRuns


class Source(Protocol):
    """Tensors and small values by key."""

    path: Path

    @property
    def sizes(self) -> Mapping[str, torch.Size | None]:
        """Of every tensor; None for what is none."""
        ...

    def load_into(self, state: dict[str, Any], ranks: Ranks) -> None:
        """Fill tensors in place, replace other values. Collective."""
        ...

    def fill(self, tensors: Mapping[str, FlatRuns], fill: Fill, ranks: Ranks) -> None:
        """Hand every run of `tensors` to `fill`. Collective."""
        ...


class DcpSource:
    """A folder with `.metadata`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.manifest: Manifest | None = read_manifest(path)
        if not (path / METADATA).exists():
            if self.manifest is not None:
                raise CorruptError(f"{path / METADATA} is missing")
            raise FormatError(f"{path} is no checkpoint: it has no {METADATA}")
        metadata = read_metadata(path, self.manifest)
        for file in self.manifest.files if self.manifest is not None else ():
            _check_there(path / file.name, file.nbytes)
        self.sizes: dict[str, torch.Size | None] = {}
        for key, entry in metadata.state_dict_metadata.items():
            if isinstance(entry, BytesStorageMetadata):
                self.sizes[key] = None
                continue
            assert isinstance(entry, TensorStorageMetadata)
            held = sum(chunk.sizes.numel() for chunk in entry.chunks)
            if held != entry.size.numel():
                raise CorruptError(
                    f"{path / METADATA}: {key} has {entry.size.numel()} elements, of which "
                    f"{held} were saved"
                )
            self.sizes[key] = entry.size
        self._metadata = metadata

    def load_into(self, state: dict[str, Any], ranks: Ranks) -> None:
        ranks.load(state, Reader(self.path, self.manifest))

    def fill(self, tensors: Mapping[str, FlatRuns], fill: Fill, ranks: Ranks) -> None:
        ranks.load(dict(tensors), Reader(self.path, self.manifest, fill))


class FileSource:
    """A file of torch.save: a module's state dict, or one with an optimizer's beside it."""

    def __init__(self, path: Path, names: Sequence[str]) -> None:
        """names: of the optimizer's parameters in order, for states that are keyed by position."""
        self.path = path
        try:
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except Exception as error:  # damaged zip files and pickles fail in any way
            first = str(error).strip().splitlines()[0]
            raise FormatError(f"{path} is no file of torch.save that is safe: {first}") from error
        if not isinstance(content, Mapping):
            raise FormatError(f"{path} holds a {type(content).__name__}; expected a state dict")
        self._values = dict(_flat("", content, names))

    @property
    def sizes(self) -> dict[str, torch.Size | None]:
        return {
            key: value.size() if isinstance(value, Tensor) else None
            for key, value in self._values.items()
        }

    def load_into(self, state: dict[str, Any], ranks: Ranks) -> None:
        for key, there in state.items():
            value = self._values[key]
            if isinstance(there, Tensor):
                there.copy_(torch.as_tensor(value))
            else:
                state[key] = value

    def fill(self, tensors: Mapping[str, FlatRuns], fill: Fill, ranks: Ranks) -> None:
        def put(key: str, start: int, values: Tensor) -> bool:
            if key not in tensors:
                return False
            values.copy_(self._values[key].reshape(-1)[start : start + values.numel()])
            return True

        ranks.together(lambda: fill(put))


def open_source(path: Path, names: Sequence[str]) -> Source:
    """Raises FormatError for what is no checkpoint, CorruptError for one that is damaged."""
    if path.is_file():
        return FileSource(path, names)
    return DcpSource(find(path))


def _check_there(path: Path, nbytes: int) -> None:
    try:
        found = path.stat().st_size
    except OSError as error:
        raise CorruptError(f"{path} cannot be read: {error.strerror}") from error
    if found != nbytes:
        raise CorruptError(f"{path} has {found} bytes, expected {nbytes}: it was cut or replaced")


def _flat(prefix: str, value: Any, names: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Leaves by their path, as DCP flattens; state by position under the names of parameters."""
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            if isinstance(key, int) and key < len(names):
                key = names[key]
            yield from _flat(f"{prefix}.{key}" if prefix else str(key), inner, names)
    elif isinstance(value, list) and any(isinstance(inner, Mapping) for inner in value):
        for i, inner in enumerate(value):
            yield from _flat(f"{prefix}.{i}", inner, names)
    else:
        yield prefix, value
