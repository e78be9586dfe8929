"""Digests of values that ranks or plans compare."""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Any


def digest_of(value: Any) -> str:
    """Digest of dataclasses, sequences and what their `repr` says of all else.

    A dataclass is not asked for its own `repr`: once an exception out of a signal's handler has
    left that in the middle, Python answers "..." for the object ever after.
    """
    return hashlib.sha256(repr(_spelt(value)).encode()).hexdigest()[:16]


def _spelt(value: Any) -> Any:
    """Lists of a value's parts, without a dataclass among them."""
    if isinstance(value, (list, tuple)):
        return [_spelt(part) for part in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = [_spelt(getattr(value, f.name)) for f in dataclasses.fields(value) if f.repr]
        return [type(value).__name__, *parts]
    return value
