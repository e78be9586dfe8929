"""Modules that are not wrapped, with any optimizer: torch's own state dicts, through our files."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint._nested_dict import flatten_state_dict, unflatten_state_dict
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from gemini.checkpoint.dcp.ranks import Ranks
from gemini.checkpoint.dcp.sources import CheckpointSource
from gemini.checkpoint.format.errors import MismatchError
from gemini.checkpoint.format.keys import Keys
from gemini.optim.base import TieredOptimizer

from .state import names_of


def plain_state(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, *, weights: bool = True
) -> dict[str, Any]:
    """Nested, as torch's tutorials save it; tensors are the module's own."""
    state: dict[str, Any] = {}
    if weights:
        state["model"] = dict(get_model_state_dict(model))
    if isinstance(optimizer, TieredOptimizer):
        optimizer.bind()
    if optimizer is not None:
        state["optim"] = dict(get_optimizer_state_dict(model, optimizer))
    return state


def load_plain(
    source: CheckpointSource,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    strict: bool,
    ranks: Ranks,
    *,
    weights: bool = True,
) -> None:
    """Raises MismatchError before anything is changed."""
    template = plain_state(model, optimizer, weights=weights)
    flat, paths = flatten_state_dict(template)
    names = [[name] for name in template["model"]] if weights else names_of(model)
    keys = Keys.find(source.sizes.keys(), names)
    key_of = {name: _renamed(name, keys) for name in flat}
    for tied in names_of(model):  # saved under one of its names, it is there under each
        saved = [name for name in tied if f"{keys.model}{name}" in source.sizes]
        for name in tied if saved else ():
            if name not in saved:
                key_of[f"model.{name}"] = f"{keys.model}{saved[0]}"
    texts = []
    for name, value in flat.items():
        key = key_of[name]
        if key not in source.sizes:
            if isinstance(value, Tensor):
                texts.append(f"missing {key}")
        elif isinstance(value, Tensor) and source.sizes[key] not in (value.size(), None):
            there = source.sizes[key]
            texts.append(f"{key} is of shape {tuple(there or ())}, expected {tuple(value.size())}")
    known = set(key_of.values())
    texts += [
        f"unexpected {key}"
        for key, size in source.sizes.items()
        if weights
        and size is not None
        and key not in known
        and key.startswith(keys.model)
        and not key.startswith(("gemini.", keys.optim))
    ]
    if strict and texts:
        raise MismatchError(
            f"{source.path} does not fit the model; strict=False loads what does: "
            + "; ".join(texts)
        )
    loaded = {
        key_of[name]: value.detach().clone() if isinstance(value, Tensor) else value
        for name, value in flat.items()
        if _fits(source, key_of[name], value)
    }
    source.load_into(loaded, ranks)
    flat = {name: loaded.get(key_of[name], value) for name, value in flat.items()}
    state = unflatten_state_dict(flat, paths)
    if weights:
        set_model_state_dict(model, state["model"], options=StateDictOptions(strict=strict))
    if optimizer is not None:
        # a rule that keeps nothing has no state to flatten, and torch asks for the key
        set_optimizer_state_dict(model, optimizer, {"state": {}, **state["optim"]})


def _fits(source: CheckpointSource, key: str, value: Any) -> bool:
    if key not in source.sizes:
        return False
    return not isinstance(value, Tensor) or source.sizes[key] in (value.size(), None)


def _renamed(name: str, keys: Keys) -> str:
    """A key of ours as the checkpoint has it."""
    if name.startswith("model."):
        return keys.model + name.removeprefix("model.")
    return keys.optim + name.removeprefix("optim.")
