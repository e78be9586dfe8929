"""Files on disk that killed processes of a run have left: a checkpoint knows them all by name.

Who goes on from one removes those that hold no later step than it does. A store counts the steps
of its own process, so a checkpoint says what each began at.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from gemini.checkpoint.dcp.ranks import Ranks
from gemini.optim.base import TieredOptimizer


def known(optimizer: torch.optim.Optimizer | None, ranks: Ranks) -> dict[str, Any]:
    """What a checkpoint says of the stores of all ranks, see `stores_of_run`. Collective."""
    mine: tuple[dict[str, int], int | None] = {}, None
    if isinstance(optimizer, TieredOptimizer):
        mine = optimizer.stores_of_run()
    found = ranks.gather(mine)
    began = {name: at for stores, _ in found for name, at in stores.items()}
    return {"began": began, "step": min((n for _, n in found if n is not None), default=0)}


def take_over(saved: Mapping[str, Any], optimizer: TieredOptimizer) -> None:
    """The optimizer goes on from where this was `known`; empty: nothing was."""
    if saved:
        began = {str(name): int(at) for name, at in saved["began"].items()}
        optimizer.go_on_from(int(saved["step"]), began)
