"""Rows in which any two values of two columns occur together, in place of all combinations."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

try:
    from allpairspy import AllPairs
except ImportError:  # a bare machine with a GPU

    def AllPairs(columns: list[list[Any]]) -> Iterable[Iterable[Any]]:
        return itertools.product(*columns)


def pairs(*columns: Iterable[Any]) -> list[tuple[Any, ...]]:
    """The same rows every time; all combinations without allpairspy."""
    return [tuple(row) for row in AllPairs([list(column) for column in columns])]
