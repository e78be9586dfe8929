"""Modules that only torch's own state dicts can save and load: FSDP2's, or under any optimizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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

from gemini.checkpoint.format.manifest import CorruptError, MismatchError
from gemini.checkpoint.format.source import CheckpointSource
from gemini.checkpoint.model.keys import Keys, check_fits, differences, params_of_group, step_count
from gemini.checkpoint.model.state import names_of
from gemini.checkpoint.ranks import Ranks
from gemini.optim.base import TieredOptimizer
from gemini.optim.rules.saved import is_alike


def plain_state(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, *, weights: bool = True
) -> dict[str, Any]:
    """State nested as in torch's tutorials; tensors are the module's own."""
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
    plain: Callable[[str], str],
    by_position: Sequence[str],
    read_extras: Callable[[], None],
    *,
    weights: bool = True,
) -> None:
    """Load a plain module and its optimizer. Raises MismatchError or CorruptError before anything
    is changed."""
    template = plain_state(model, optimizer, weights=weights)
    flat, paths = flatten_state_dict(template)
    names = [[name] for name in template["model"]] if weights else names_of(model)
    keys = Keys.find(source.sizes.keys(), names)
    prefixes = {"model": keys.model, "optim": keys.optim}
    key_of = {name: prefixes[name.partition(".")[0]] + name.partition(".")[2] for name in flat}
    for tied in names_of(model):  # saved under one of its names, it loads under each
        saved = [name for name in tied if f"{keys.model}{name}" in source.sizes]
        for name in tied if saved else ():
            if name not in saved:
                key_of[f"model.{name}"] = f"{keys.model}{saved[0]}"
    sizes = source.sizes
    wanted = {key_of[name]: v.size() for name, v in flat.items() if isinstance(v, Tensor)}
    has_values = {key for key in wanted if key in sizes and sizes[key] is None}
    texts = differences(sizes, {k: size for k, size in wanted.items() if k not in has_values})
    if weights:
        strangers = keys.unexpected(sizes, set(key_of.values()))
        texts += [f"unexpected {key}" for key in strangers if sizes[key] is not None]
    if strict:
        check_fits(source.path, texts)
    loaded = {
        key_of[name]: value.detach().clone() if isinstance(value, Tensor) else value
        for name, value in flat.items()
        if (key := key_of[name]) in sizes
        and (not isinstance(value, Tensor) or sizes[key] in (value.size(), None))
    }
    ranks.together(lambda: source.load_into(loaded))

    def check() -> None:
        for name, own in flat.items():
            key, value = key_of[name], loaded.get(key_of[name], own)
            if name.startswith("optim.state.") and name.endswith(".step"):
                step_count(value, f"{source.path}, {key},")
            elif name.startswith("optim.param_groups.") and name.endswith(".params"):
                found = params_of_group(value, by_position, f"{source.path}, {key},")
                if {*map(plain, found)} != {*map(plain, own)}:
                    raise MismatchError(
                        f"{source.path}, {key}, has {found!r:.80}, and this optimizer's group "
                        f"{own!r:.80}; make it with the same groups"
                    )
                loaded[key] = own
            elif name.startswith("optim.param_groups.") and not is_alike(own, value):
                raise CorruptError(
                    f"{source.path}, {key}, is {value!r:.80}, expected the like of {own!r:.80}"
                )

    ranks.together(check)
    read_extras()
    flat = {name: loaded.get(key_of[name], value) for name, value in flat.items()}
    state = unflatten_state_dict(flat, paths)
    if weights:
        set_model_state_dict(model, state["model"], options=StateDictOptions(strict=strict))
    if optimizer is not None:
        # a rule that keeps nothing has no state to flatten, and torch asks for the key
        set_optimizer_state_dict(model, optimizer, {"state": {}, **state["optim"]})
