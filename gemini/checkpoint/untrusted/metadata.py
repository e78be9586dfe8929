"""`.metadata`, a pickle of DCP's: read with a list of what may be in it, then checked.

A checkpoint may come from anybody. What it says of tensors is compared with the bytes that its
files have before any memory is taken for one.
"""

from __future__ import annotations

import zlib
from collections import OrderedDict
from collections.abc import Mapping
from math import prod
from pathlib import Path, PosixPath, PurePosixPath
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from gemini.checkpoint.format.errors import CorruptError, FormatError
from gemini.checkpoint.format.manifest import METADATA, Manifest, is_plain_name
from gemini.checkpoint.format.small_files import folder_bytes, memory_limit, read_file

from .object_reader import ObjectReader
from .pickles import PickleError

_MOST_DIMENSIONS = 64  # of torch

_CLASSES = {
    (kind.__module__, kind.__qualname__): kind
    for kind in (
        BytesStorageMetadata,
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        metadata.StorageMeta,
        TensorProperties,
        TensorStorageMetadata,
        filesystem._StorageInfo,
    )
}


def _size(*sizes: Any) -> torch.Size:
    """torch.Size of a few numbers; what it holds is hashed later."""
    (values,) = sizes
    if len(values) > _MOST_DIMENSIONS or any(type(value) is not int for value in values):
        raise ValueError("sizes that are none")
    return torch.Size(values)


def _empty(*nothing: Any) -> OrderedDict[Any, Any]:
    """Filled by the instructions that follow, which are counted."""
    if nothing:
        raise ValueError("content")
    return OrderedDict()


_FUNCTIONS: dict[tuple[str, str], Any] = {
    ("torch", "Size"): _size,
    ("collections", "OrderedDict"): _empty,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    ("pathlib", "Path"): PosixPath,
    (metadata.__name__, "_MEM_FORMAT_ENCODING"): metadata._MEM_FORMAT_ENCODING,
    **{
        (module, kind.__name__): kind
        for module in ("pathlib", "pathlib._local")  # the second from Python 3.13 on
        for kind in (PosixPath, PurePosixPath)
    },
}


def _dtype(module: str, name: str) -> torch.dtype:
    found = getattr(torch, name, None) if module == "torch" else None
    if not isinstance(found, torch.dtype):
        raise FormatError(f"it holds a {module}.{name}, which no checkpoint needs; not loaded")
    return found


def _check_key(fields: Mapping[Any, Any]) -> None:
    """Of a MetadataIndex, which is a key."""
    if type(fields.get("fqn")) is not str or type(fields.get("offset")) not in (
        type(None),
        torch.Size,
    ):
        raise PickleError("it has a place of something that is no tensor")


def read_metadata(folder: Path, manifest: Manifest | None) -> Metadata:
    """Raises CorruptError where it is not what the manifest says, FormatError for what it holds."""
    path = folder / METADATA
    data = read_file(path)
    if manifest is not None and (
        len(data) != manifest.metadata_nbytes or zlib.crc32(data) != manifest.metadata_crc32
    ):
        raise CorruptError(f"{path} is damaged: its checksum does not match")
    try:
        limit = memory_limit(len(data), folder_bytes(folder))
        keys: dict[type, Any] = {MetadataIndex: _check_key}
        found = ObjectReader(data, limit, _CLASSES, _FUNCTIONS, _dtype, keys).load()
    except FormatError as error:
        raise FormatError(f"{path}: {error}") from error
    except PickleError as error:
        raise CorruptError(f"{path} cannot be read: {error}") from error
    if not isinstance(found, Metadata):
        raise FormatError(f"{path} holds a {type(found).__name__}; expected DCP's Metadata")
    try:
        _check(found, folder, manifest)
    except CorruptError as error:
        raise CorruptError(f"{path}: {error}") from error
    return found


def _check(found: Metadata, folder: Path, manifest: Manifest | None) -> None:
    """Every field is of its type, every item inside its file, and no tensor larger than that."""
    tensors = _is(vars(found).get("state_dict_metadata"), dict, "its list of tensors")
    places = _is(vars(found).get("storage_data"), dict, "its list of places")
    _check_places(places, folder, manifest)
    for key, entry in tensors.items():
        _is(key, str, "a key")
        if type(entry) is BytesStorageMetadata:
            _place(places, MetadataIndex(key), key)
        else:
            _check_tensor(key, vars(_is(entry, TensorStorageMetadata, key)), places)


def _check_places(places: Any, folder: Path, manifest: Manifest | None) -> None:
    nbytes = {} if manifest is None else {file.name: file.nbytes for file in manifest.files}
    for index, place in places.items():
        _is(index, MetadataIndex, "the key of a place")
        fields = vars(_is(place, filesystem._StorageInfo, index.fqn))
        name, offset, length = (fields.get(n) for n in ("relative_path", "offset", "length"))
        if not isinstance(name, str) or not is_plain_name(name):
            raise CorruptError(f"{index.fqn} lies in {name!r:.80}, expected a file of the folder")
        if fields.get("transform_descriptors"):
            raise CorruptError(f"{index.fqn} is compressed, which this code does not read")
        if name not in nbytes:
            if manifest is not None:
                raise CorruptError(f"the manifest does not know the file {name}")
            nbytes[name] = _file_bytes(folder / name)
        if type(offset) is not int or type(length) is not int or offset < 0 or length < 0:
            raise CorruptError(f"{index.fqn} has no place in {name}")
        if offset + length > nbytes[name]:
            raise CorruptError(
                f"{index.fqn} lies at bytes {offset} to {offset + length} of {name}, which has "
                f"{nbytes[name]}"
            )


def _check_tensor(key: str, fields: Mapping[str, Any], places: Any) -> None:
    size = _is(fields.get("size"), torch.Size, f"the size of {key}")
    properties = _is(fields.get("properties"), TensorProperties, f"the dtype of {key}")
    dtype = _is(vars(properties).get("dtype"), torch.dtype, f"the dtype of {key}")
    held = 0
    for chunk in _is(fields.get("chunks"), list, f"the parts of {key}"):
        part = vars(_is(chunk, ChunkStorageMetadata, f"a part of {key}"))
        offsets = _is(part.get("offsets"), torch.Size, f"a part of {key}")
        sizes = _is(part.get("sizes"), torch.Size, f"a part of {key}")
        if not len(offsets) == len(sizes) == len(size) or not all(
            o >= 0 and n >= 0 and o + n <= whole
            for o, n, whole in zip(offsets, sizes, size, strict=True)
        ):
            raise CorruptError(f"a part of {key} lies outside of it")
        numel = prod(sizes)
        held += numel
        place = _place(places, MetadataIndex(key, offsets), key)
        if place.length < numel * dtype.itemsize:
            raise CorruptError(
                f"{key} has {place.length} bytes in {place.relative_path}, fewer than its {numel} "
                f"elements of {dtype} take"
            )
    if held != prod(size):
        raise CorruptError(f"{key} has {prod(size)} elements, of which {held} were saved")


def _place(places: Any, index: MetadataIndex, key: str) -> Any:
    if index not in places:
        raise CorruptError(f"{key} has no place in any file")
    return places[index]


def _file_bytes(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        raise CorruptError(f"{path} cannot be read: {error.strerror}") from error


def _is(value: Any, kind: type, what: str) -> Any:
    if type(value) is not kind:
        raise CorruptError(f"{what} is a {type(value).__name__}, expected a {kind.__name__}")
    return value
