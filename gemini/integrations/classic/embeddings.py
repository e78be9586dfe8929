"""Cached embeddings of `colossalai.nn.parallel.layers`: ours, with the options of the documents.

`cache_ratio` is the share of all rows that each rank caches. Rows of a step's batches must fit, and
are updated by `step()` of the module; an optimizer over `parameters()` does not see them. Which
rows leave is planned from the loader (`prefetch`), so an order by frequency is not taken.
"""

from __future__ import annotations

from math import ceil
from typing import Any

from gemini import CachedEmbedding as _CachedEmbedding
from gemini import CachedEmbeddingBag as _CachedEmbeddingBag
from gemini.api import passes_on


def _cache_rows(num_embeddings: int, cache_ratio: float) -> int:
    """Rows of a share of them, at least one. Raises ValueError for what is no share."""
    if not 0 < cache_ratio <= 1:
        raise ValueError(f"cache_ratio={cache_ratio}; expected a share above 0, and at most 1")
    return max(1, ceil(num_embeddings * cache_ratio))


@passes_on(_CachedEmbedding)
def CachedEmbedding(
    num_embeddings: int,
    embedding_dim: int,
    padding_idx: int | None = None,
    *,
    cache_ratio: float = 0.01,
    sparse: bool = False,
    **options: Any,
) -> _CachedEmbedding:
    """Make a `gemini.CachedEmbedding` that caches a share of the rows.

    sparse: either; only rows of a batch are updated.
    """
    options.setdefault("cache_rows", _cache_rows(num_embeddings, cache_ratio))
    return _CachedEmbedding(num_embeddings, embedding_dim, padding_idx, **options)


@passes_on(_CachedEmbeddingBag)
def CachedEmbeddingBag(
    num_embeddings: int,
    embedding_dim: int,
    padding_idx: int | None = None,
    *,
    cache_ratio: float = 0.01,
    sparse: bool = False,
    **options: Any,
) -> _CachedEmbeddingBag:
    """Make a `gemini.CachedEmbeddingBag` that caches a share of the rows; see `CachedEmbedding`.

    Each rank of the process group has some of the rows: so it is the parallel one, too.
    """
    options.setdefault("cache_rows", _cache_rows(num_embeddings, cache_ratio))
    return _CachedEmbeddingBag(num_embeddings, embedding_dim, padding_idx=padding_idx, **options)


ParallelCachedEmbeddingBag = CachedEmbeddingBag
