"""Files on disk that killed processes of a run have left: a checkpoint knows them all by name.

Who goes on from one removes those that hold no later step than it does. A store counts the steps
of its own process, so a checkpoint says what each began at.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from gemini.checkpoint.dcp.ranks import Ranks
from gemini.nvme import remove_superseded
from gemini.optim.base import TieredOptimizer


def known(optimizer: torch.optim.Optimizer | None, ranks: Ranks) -> dict[str, Any]:
    """For a checkpoint of the optimizer as it is: the step of the run, and of every store of it, of
    any rank and of processes before, what it began at. Collective."""
    began: dict[str, int] = {}
    steps: list[int] = []
    if isinstance(optimizer, TieredOptimizer):
        began |= optimizer.left_stores
        for store in optimizer.stores:
            if store.layout.num_versions > 1:
                began[store.name] = optimizer.steps_before
                steps.append(optimizer.steps_before + store.committed_step)
    found = ranks.gather((began, steps))
    all_began = {name: at for began, _ in found for name, at in began.items()}
    return {"began": all_began, "step": min((n for _, some in found for n in some), default=0)}


def take_over(saved: Mapping[str, Any], optimizer: TieredOptimizer) -> None:
    """The optimizer goes on from where this was `known`: remove what is superseded."""
    if not saved:
        return
    step = int(saved["step"])
    began = {str(name): int(at) for name, at in saved["began"].items()}
    stores = optimizer.stores
    folders = dict.fromkeys(path.parent for store in stores for path in store.paths)
    left = remove_superseded(folders, {name: step - at for name, at in began.items()})
    optimizer.left_stores = {name: began[name] for name in left}
    optimizer.steps_before = step - max((store.committed_step for store in stores), default=0)
