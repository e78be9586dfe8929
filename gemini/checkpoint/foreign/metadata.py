"""`.metadata`, a pickle of torch.distributed.checkpoint's: our index for its readers, and back.

It is read if another program or an older version wrote the folder. Only listed classes and
functions are allowed in the pickle. Sizes of tensors are compared with the bytes of the files
before any memory is taken for a tensor.
"""

from __future__ import annotations

import pickle
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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

from gemini import strangers
from gemini.checkpoint.format.manifest import (
    METADATA,
    NAME,
    CorruptError,
    FormatError,
    Index,
    Manifest,
    SavedPart,
    SavedValue,
    check,
    is_plain_name,
    memory_limit,
    metadata_of,
    own_index,
    reading,
)
from gemini.checkpoint.untrusted.pickles import OBJECT, PickleError, PickleMachine, no_collection

DCP_VERSION = "1.0.0"
Paths = Mapping[str, tuple[str | int, ...]]  # of keys in the nested state
_MOST_DIMENSIONS = 64  # of torch
_MOST_FIELDS = 64  # of an object

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
_KINDS = frozenset(_CLASSES.values())


def _size(*sizes: Any) -> torch.Size:
    """torch.Size of at most 64 ints. Raises ValueError for others."""
    (values,) = sizes
    # Places are keys of a dict: other values would bring hash functions of their own.
    if len(values) > _MOST_DIMENSIONS or any(type(value) is not int for value in values):
        raise ValueError("sizes that are none")
    return torch.Size(values)


def _empty(*nothing: Any) -> OrderedDict[Any, Any]:
    """OrderedDict without content: later instructions fill it, and those are counted."""
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


def _check_key(fields: Mapping[Any, Any]) -> None:
    """Raise PickleError unless a MetadataIndex can be hashed by a string and a torch.Size."""
    if type(fields.get("fqn")) is not str or type(fields.get("offset")) not in (
        type(None),
        torch.Size,
    ):
        raise PickleError("it has a place of something that is no tensor")


@dataclass(frozen=True, slots=True)
class _Class:
    """Class in a pickle, until an object of it is made."""

    kind: type


@dataclass(frozen=True, slots=True)
class _Function:
    """Function in a pickle, until it is called."""

    call: Callable[..., Any]


class _MetadataReader(PickleMachine):
    """Machine that makes plain values and objects of `_CLASSES`; each object is filled once."""

    def named(self, module: str, name: str) -> Any:
        self.take(OBJECT)
        key = (module, name)
        if key in _CLASSES:
            return _Class(_CLASSES[key])
        if key in _FUNCTIONS:
            return _Function(_FUNCTIONS[key])
        found = getattr(torch, name, None) if module == "torch" else None
        if not isinstance(found, torch.dtype):
            raise FormatError(f"it holds a {module}.{name}, which no checkpoint needs; not loaded")
        return found

    def made(self, kind: Any, arguments: tuple[Any, ...]) -> Any:
        if type(kind) is not _Class or arguments:
            self.wrong("a class", kind)
        return object.__new__(kind.kind)

    def called(self, function: Any, arguments: tuple[Any, ...]) -> Any:
        if type(function) is not _Function or len(arguments) > _MOST_FIELDS:
            self.wrong("a function", function)
        self.take(sum(8 * len(a) for a in arguments if type(a) in (tuple, list, str)))
        try:
            return function.call(*arguments)
        except Exception as error:  # any kind: the arguments are a stranger's
            raise PickleError(f"it calls {function.call.__name__} with {error}") from error

    def fill(self, made: Any, fields: Any) -> None:
        kind = type(made)
        # Once: a key that is in a dict already must not change its hash.
        if kind not in _KINDS or vars(made):
            self.wrong("a new object", made)
        if hasattr(made, "__setstate__"):
            try:
                made.__setstate__(fields)
            except Exception as error:
                raise PickleError(f"a {kind.__name__} is filled with {error}") from error
            return
        if type(fields) is not dict or len(fields) > _MOST_FIELDS:
            self.wrong("a dict of fields", fields)
        if kind is MetadataIndex:
            _check_key(fields)
        vars(made).update(fields)

    def extend(self, there: Any, values: list[Any]) -> None:
        if type(there) is not list:
            self.wrong("a list", there)
        there.extend(values)

    def update(self, there: Any, values: list[Any]) -> None:
        if not isinstance(there, dict):
            self.wrong("a dict", there)
        self.take_entries(len(there), len(values) // 2)
        for key, value in zip(values[::2], values[1::2], strict=True):
            if type(key) not in (str, int) and not (type(key) is MetadataIndex and vars(key)):
                self.wrong("a key", key)
            there[key] = value


@no_collection()
def encoded(index: Index, paths: Paths) -> bytes:
    """Bytes of the `.metadata` of an index."""
    tensors: dict[str, Any] = {}
    places: dict[MetadataIndex, filesystem._StorageInfo] = {}
    for key, entry in index.items():
        for number, part in enumerate(entry.parts):
            box = (part.offsets, number) if entry.dtype is not None else ()
            place = filesystem._StorageInfo(part.file, part.at, part.nbytes)
            places[MetadataIndex(key, *box)] = place
        if entry.dtype is None:
            tensors[key] = BytesStorageMetadata()
            continue
        chunks = [
            ChunkStorageMetadata(torch.Size(part.offsets), torch.Size(part.sizes))
            for part in entry.parts
        ]
        properties = TensorProperties(dtype=entry.dtype)
        tensors[key] = TensorStorageMetadata(properties, entry.size, chunks)
    found = Metadata(tensors, planner_data=dict(paths), storage_data=places, version=DCP_VERSION)
    return pickle.dumps(found)


@no_collection()
def read_index(pickled: bytes, folder: Path, manifest: Manifest | None) -> Index:
    """Index of the `.metadata` of a folder.

    Raises CorruptError if it is damaged or does not fit the files, FormatError for a class that no
    checkpoint needs.
    """
    return _index_of(_load(pickled, folder), folder, manifest)


@no_collection()
def read_metadata(folder: Path, manifest: Manifest | None) -> Metadata:
    """Content of `.metadata`, checked. Raises the errors of `read_index`, and CorruptError if the
    manifest has another index."""
    found = _load(metadata_of(folder, manifest), folder)
    index, own = _index_of(found, folder, manifest), own_index(folder, manifest)
    other = [
        key for key in (*index, *(own or {})) if own is not None and index.get(key) != own.get(key)
    ]
    if other:
        raise CorruptError(f"{folder / NAME} and {METADATA} do not say the same of {other[0]}")
    return found


def index_of(found: Metadata) -> dict[str, SavedValue]:
    """Our index of a checkpoint, from DCP's description. Raises CorruptError."""
    tensors = _is(vars(found).get("state_dict_metadata"), dict, "its list of tensors")
    places = _is(vars(found).get("storage_data"), dict, "its list of places")
    for index, place in places.items():
        _is(index, MetadataIndex, "the key of a place")
        _check_place(index.fqn, vars(_is(place, filesystem._StorageInfo, index.fqn)))
    return {_is(key, str, "a key"): _entry(key, entry, places) for key, entry in tensors.items()}


def _load(pickled: bytes, folder: Path) -> Metadata:
    path = folder / METADATA
    try:
        limit = memory_limit(len(pickled), 0)
        found = _MetadataReader(pickled, limit).load()
    except FormatError as error:
        raise FormatError(f"{path}: {error}") from error
    except PickleError as error:
        raise CorruptError(f"{path} cannot be read: {error}") from error
    if not isinstance(found, Metadata):
        raise FormatError(f"{path} holds a {type(found).__name__}; expected DCP's Metadata")
    return found


def _index_of(found: Metadata, folder: Path, manifest: Manifest | None) -> dict[str, SavedValue]:
    """Index of DCP's description, checked against the files of the folder."""
    try:
        index = index_of(found)
        names = sorted({place.relative_path for place in found.storage_data.values()})
        if manifest is None:
            nbytes = {}
            for name in names:  # each is opened, so that none of them is found missing by a load
                with reading(folder / name):
                    nbytes[name] = strangers.size_of(folder / name)
        else:
            nbytes = manifest.sizes
        missing = [name for name in names if name not in nbytes]
        if missing:
            raise CorruptError(f"the manifest does not know the file {missing[0]}")
        check(index, nbytes)
    except CorruptError as error:
        raise CorruptError(f"{folder / METADATA}: {error}") from error
    return index


def _check_place(key: str, fields: Mapping[str, Any]) -> None:
    name, offset, length = (fields.get(n) for n in ("relative_path", "offset", "length"))
    if not is_plain_name(name):
        raise CorruptError(f"{key} lies in {name!r:.80}, expected a file of the folder")
    if fields.get("transform_descriptors"):
        raise CorruptError(f"{key} is compressed, which this code does not read")
    if type(offset) is not int or type(length) is not int or offset < 0 or length < 0:
        raise CorruptError(f"{key} has no place in {name}")


def _entry(key: str, entry: Any, places: Any) -> SavedValue:
    if type(entry) is BytesStorageMetadata:
        return SavedValue(None, torch.Size(()), (_part(places, MetadataIndex(key), ()),))
    fields = vars(_is(entry, TensorStorageMetadata, key))
    size = _is(fields.get("size"), torch.Size, f"the size of {key}")
    properties = _is(fields.get("properties"), TensorProperties, f"the dtype of {key}")
    dtype = _is(vars(properties).get("dtype"), torch.dtype, f"the dtype of {key}")
    parts = []
    for chunk in _is(fields.get("chunks"), list, f"the parts of {key}"):
        part = vars(_is(chunk, ChunkStorageMetadata, f"a part of {key}"))
        offsets = _is(part.get("offsets"), torch.Size, f"a part of {key}")
        sizes = _is(part.get("sizes"), torch.Size, f"a part of {key}")
        parts.append(_part(places, MetadataIndex(key, offsets), sizes))
    return SavedValue(dtype, size, tuple(parts))


def _part(places: Any, index: MetadataIndex, sizes: Sequence[int]) -> SavedPart:
    if index not in places:
        raise CorruptError(f"{index.fqn} has no place in any file")
    place = places[index]
    offsets = tuple(index.offset or ())
    return SavedPart(place.relative_path, place.offset, place.length, offsets, tuple(sizes))


def _is(value: Any, kind: type, what: str) -> Any:
    if type(value) is not kind:
        raise CorruptError(f"{what} is a {type(value).__name__}, expected a {kind.__name__}")
    return value
