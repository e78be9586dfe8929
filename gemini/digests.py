"""Digests of values that ranks or plans compare."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from typing import Any


def digest_of(value: Any) -> str:
    """Digest of dataclasses, sequences, sets and mappings, and what their `repr` says of all else.

    A dataclass is not asked for its own `repr`: once an exception out of a signal's handler has
    left that in the middle, Python answers "..." for the object ever after.
    """
    return hashlib.sha256(repr(_spelt(value)).encode()).hexdigest()[:16]


def _spelt(value: Any) -> Any:
    """Lists of a value's parts, without a dataclass among them."""
    if isinstance(value, (list, tuple)):
        return [_spelt(part) for part in value]
    if isinstance(value, (set, frozenset)):  # each process has its own order of these
        return sorted((_spelt(part) for part in value), key=repr)
    if isinstance(value, Mapping):
        return [(key, _spelt(part)) for key, part in value.items()]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = [_spelt(getattr(value, f.name)) for f in dataclasses.fields(value) if f.repr]
        return [type(value).__name__, *parts]
    return value
