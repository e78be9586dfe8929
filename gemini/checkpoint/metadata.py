"""`.metadata`, the one pickle of a checkpoint: read with a list of what may be in it."""

from __future__ import annotations

import io
import pickle
import zlib
from collections import OrderedDict
from pathlib import Path, PosixPath, PurePosixPath
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.metadata import Metadata

from .errors import CorruptError, FormatError
from .manifest import METADATA, Manifest

_PLAIN = {
    (kind.__module__, kind.__qualname__): kind
    for kind in (
        metadata.BytesStorageMetadata,
        metadata.ChunkStorageMetadata,
        metadata.Metadata,
        metadata.MetadataIndex,
        metadata.StorageMeta,
        metadata.TensorProperties,
        metadata.TensorStorageMetadata,
        metadata._MEM_FORMAT_ENCODING,
        filesystem._StorageInfo,
        OrderedDict,
        PosixPath,
        PurePosixPath,
        torch.Size,
    )
}
_FUNCTIONS = {("torch.serialization", "_get_layout"): torch.serialization._get_layout}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _PLAIN:
            return _PLAIN[module, name]
        if (module, name) in _FUNCTIONS:
            return _FUNCTIONS[module, name]
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if module == "pathlib" and name in ("Path", "PosixPath", "PurePosixPath"):
            return PosixPath
        raise FormatError(f"it holds a {module}.{name}, which no checkpoint needs; not loaded")


def read_metadata(folder: Path, manifest: Manifest | None) -> Metadata:
    """Raises CorruptError where it is not what the manifest says, FormatError for what it holds."""
    path = folder / METADATA
    try:
        data = path.read_bytes()
    except OSError as error:
        raise CorruptError(f"{path} cannot be read: {error.strerror}") from error
    if manifest is not None and (
        len(data) != manifest.metadata_nbytes or zlib.crc32(data) != manifest.metadata_crc32
    ):
        raise CorruptError(f"{path} is damaged: its checksum does not match")
    try:
        found = _Unpickler(io.BytesIO(data)).load()
    except FormatError as error:
        raise FormatError(f"{path}: {error}") from error
    except Exception as error:  # a pickle that was changed fails in any way
        raise CorruptError(f"{path} cannot be read: {error}") from error
    if not isinstance(found, Metadata):
        raise FormatError(f"{path} holds a {type(found).__name__}; expected DCP's Metadata")
    return found
