"""Embedding tables larger than the device's memory: a cache of rows over a home.

    planner.py    PURE. batches that were announced -> `RowPlan`, a frozen value: which rows come,
                  which leave, and their slots
    rules.py      updates of touched rows: `RowSGD`, `RowAdagrad`, `LazyAdam`
    homes.py      what a home of records does; the one in host memory
    file_home.py  the one in a file: cells in place, a journal of steps
    table.py      the executor: carries plans and steps out on one rank
    exchange.py   which rank has a row; ids, rows and gradients between ranks
    saving.py     checkpoints, of any world size
    modules.py    `CachedEmbedding`, `CachedEmbeddingBag`

A record is one row with its optimizer state beside it: they come, leave and are saved together.

Invariants, each said where it is kept:

1. A row of the current batch, or one whose gradient waits for a step, stays in the cache
   (`planner.RowPlan`).
2. A resident record is the last confirmed step's; a slot that is not dirty equals its home
   (`table.RowTable`).
3. A step is durable before it counts, and counts on all ranks or on none (`homes.RowHome`,
   `file_home` [Note: redo], [Note: one step apart]).
4. A gradient belongs to one backward. Those of one backward are added up first, then backwards in
   their order, then ranks in theirs: as autograd and a mean over ranks do on a whole table
   (`modules.py`).
5. No collective runs inside a backward: a rank whose loss does not use the rows holds up nobody.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .modules import CachedEmbedding as CachedEmbedding
    from .modules import CachedEmbeddingBag as CachedEmbeddingBag
    from .rules import LazyAdam as LazyAdam
    from .rules import RowAdagrad as RowAdagrad
    from .rules import RowSGD as RowSGD
    from .table import RowReport as RowReport

_HOME = {
    "CachedEmbedding": "modules",
    "CachedEmbeddingBag": "modules",
    "LazyAdam": "rules",
    "RowAdagrad": "rules",
    "RowReport": "table",
    "RowSGD": "rules",
}
__all__ = list(_HOME)


def __dir__() -> list[str]:
    return list(__all__)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'gemini.embedding' has no attribute {name!r}")
    return getattr(importlib.import_module(f"gemini.embedding.{_HOME[name]}"), name)
