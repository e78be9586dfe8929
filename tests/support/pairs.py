"""Rows in which any two values of two columns occur together, in place of all combinations."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from allpairspy import AllPairs


def pairs(*columns: Iterable[Any]) -> list[tuple[Any, ...]]:
    """The same rows every time."""
    return [tuple(row) for row in AllPairs([list(column) for column in columns])]
