"""Tensors inside what modules take and return: lists, mappings, dataclasses."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Every tensor in a nest of sequences, mappings and dataclasses, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name))


def map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same nest with every tensor changed. What holds no tensor is returned as it is.

    Mappings and dataclasses keep their type.
    """
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple):
        items = [map_tensors(item, change) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, list):
        return [map_tensors(item, change) for item in value]
    if isinstance(value, Mapping):
        changed = {key: map_tensors(item, change) for key, item in value.items()}
        if type(value) is dict:
            return changed
        if dataclasses.is_dataclass(value):  # Hugging Face's ModelOutput is both
            return type(value)(**changed)
        copy: Any = type(value)
        return copy(changed)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {
            field.name: map_tensors(getattr(value, field.name), change)
            for field in dataclasses.fields(value)
            if field.init
        }
        return dataclasses.replace(value, **fields)
    return value
