"""Tensors inside the inputs and outputs of modules: one walker for all of them.

It opens sequences, mappings, dataclasses (also those that torch's pytree does not know), and
classes that are registered with pytree.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from types import NoneType
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import SUPPORTED_NODES

_LEAVES = frozenset((str, bytes, int, float, complex, bool, NoneType))


def tensors_in(value: Any, *, objects: int = 0) -> list[Tensor]:
    """Tensors in a nested value, in order.

    objects: levels of other objects that are opened too, by their attributes; modules are not.
    """
    if isinstance(value, Tensor):
        return [value]
    found: list[Tensor] = []
    if type(value) not in _LEAVES:
        _collect(value, found, objects)
    return found


def _collect(value: Any, found: list[Tensor], objects: int) -> None:
    """Append the tensors inside a value that is neither a tensor nor a leaf."""
    kind = type(value)
    parts = value if kind is tuple else value.values() if kind is dict else _parts(value)
    if parts is None and objects and _has_attributes(value):
        parts, objects = list(vars(value).values()), objects - 1
    for part in parts or ():
        if isinstance(part, Tensor):
            found.append(part)
        elif type(part) not in _LEAVES:
            _collect(part, found, objects)


def _has_attributes(value: Any) -> bool:
    return hasattr(value, "__dict__") and not isinstance(value, (type, nn.Module))


def _parts(value: Any) -> Iterable[Any] | None:
    """Children of a value; None if the walker does not open its class."""
    if isinstance(value, (list, tuple)):
        return value
    if isinstance(value, Mapping):
        return value.values()
    if _is_dataclass(value):
        return [getattr(value, f.name) for f in dataclasses.fields(value) if hasattr(value, f.name)]
    node = SUPPORTED_NODES.get(type(value))
    return None if node is None else node.flatten_fn(value)[0]


def map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Nested value with every tensor replaced by `change(tensor)`.

    A part in which no tensor changes is the same object. Mappings, dataclasses and classes that are
    registered with pytree keep their type.
    """
    if isinstance(value, Tensor):
        return change(value)
    if type(value) in _LEAVES:
        return value
    if isinstance(value, (list, tuple)):
        items = [map_tensors(item, change) for item in value]
        if _same(items, value):
            return value
        return _like_sequence(value, items)
    if isinstance(value, Mapping):
        changed = {key: map_tensors(item, change) for key, item in value.items()}
        if _same(changed.values(), value.values()):
            return value
        return _like_mapping(value, changed)
    if _is_dataclass(value):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}
        changed = {name: map_tensors(item, change) for name, item in fields.items()}
        if _same(changed.values(), fields.values()):
            return value
        return dataclasses.replace(value, **changed)
    node = SUPPORTED_NODES.get(type(value))
    if node is None:
        return value
    parts, context = node.flatten_fn(value)
    items = [map_tensors(item, change) for item in parts]
    return value if _same(items, parts) else node.unflatten_fn(items, context)


def _is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _same(new: Iterable[Any], old: Iterable[Any]) -> bool:
    return all(one is other for one, other in zip(new, old, strict=True))


def _like_sequence(value: list[Any] | tuple[Any, ...], items: list[Any]) -> Any:
    if isinstance(value, list):
        return items
    return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)


def _like_mapping(value: Mapping[Any, Any], changed: dict[Any, Any]) -> Any:
    if type(value) is dict:
        return changed
    if dataclasses.is_dataclass(value):  # Hugging Face's ModelOutput is both
        return type(value)(**changed)
    node = SUPPORTED_NODES.get(type(value))  # a defaultdict has more than its items
    if node is not None:
        return node.unflatten_fn(list(changed.values()), node.flatten_fn(value)[1])
    copy: Any = type(value)
    return copy(changed)
