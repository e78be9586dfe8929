"""Choosing the capacity of chunks. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from gemini.units import MIB, Numel

from .layout import ParamSpec


def search_chunk_configuration(
    specs: Sequence[ParamSpec],
    *,
    search_range_m: float | None = None,
    hidden_dim: int | None = None,
    min_chunk_size_m: float = 32,
) -> Numel:
    """The capacity of chunks, in elements. Arguments are in units of 2**20 elements."""
    if not min_chunk_size_m > 0:
        raise ValueError(f"min_chunk_size_m={min_chunk_size_m} must be positive")
    return Numel(round(min_chunk_size_m * MIB))
