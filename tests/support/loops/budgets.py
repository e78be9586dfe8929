"""Budgets under which `tests.support.loops.tails.wrapped` has parameters and gradients in files."""

from __future__ import annotations

import functools
from typing import Any

import gemini
from bench.shared.models import Tower
from gemini import AutoPlacement
from gemini.placement.tiers import Tier
from tests.support.loops.tails import batches

MOST_IN_FILES = "280KiB"  # most parameters, and some of the gradients
MIXED = "300KiB"  # some of both
SHARED = "500KiB"  # by two ranks


@functools.cache
def of_an_iteration() -> Any:
    """With what activations take, so that nothing is left to an assumption."""
    ids = batches(1)[0]
    return gemini.trace(Tower(), (ids,), loss=lambda logits: logits.float().sum())


def within(budget: str = MOST_IN_FILES) -> dict[str, Any]:
    """Options of `wrapped`."""
    return {"placement_policy": AutoPlacement(budget), "trace": of_an_iteration()}


def in_files(model: Any) -> tuple[int, int]:
    """How many shards, and how many gradients."""
    shards = model.engine.planning.plan.shards
    params = sum(shard.param_home is Tier.NVME for shard in shards)
    return params, sum(shard.grad_home is Tier.NVME for shard in shards)


def stores(model: Any, optimizer: Any) -> dict[str, Any]:
    """Of each kind of file that there is, the one that a step uses."""
    storage = model.engine.storage
    found = {"state": optimizer.targets[0].tiered_state.nvme.store}
    if storage.params is not None:
        found["parameters"] = storage.params.store
    if storage.gradient_files is not None:
        found["gradients"] = storage.gradient_files.files[0].store
    return found
