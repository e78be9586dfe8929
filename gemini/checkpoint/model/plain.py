"""Checkpoints of plain modules: torch's own state dicts with any optimizer, or runs with one of
ours, so that state on disk is streamed."""

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
from torch.distributed.tensor import DTensor

from gemini.checkpoint.dcp.boxes import Region
from gemini.checkpoint.dcp.ranks import Ranks
from gemini.checkpoint.dcp.reader import CheckpointSource
from gemini.checkpoint.format.data_file import can_be_raw
from gemini.checkpoint.format.manifest import CheckpointError, CorruptError, MismatchError
from gemini.chunk.layout import ShardSegment, saved_params
from gemini.module_face import saved_buffers
from gemini.optim.base import TieredOptimizer
from gemini.optim.plain.target import PlainTarget
from gemini.optim.rules.saved import is_alike
from gemini.saved_names import SavedNames
from gemini.units import ParamId

from .keys import Keys, check_fits, differences, params_of_group, step_count
from .state import ModuleRuns, WeightStream, names_of


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


def can_be_runs(module: nn.Module) -> bool:
    """Whether a module's state dict has only parameters and buffers, in memory as in a file."""
    params = saved_params(module)
    known = {name for _, names in params for name in names} | dict(saved_buffers(module)).keys()
    return known == {*map(SavedNames(module).saved, module.state_dict())} and all(
        param.is_contiguous() and can_be_raw(param.dtype) and not isinstance(param, DTensor)
        for param, _ in params
    )


def plain_runs(
    module: nn.Module, optimizer: TieredOptimizer, *, weights: bool = True
) -> ModuleRuns:
    """Runs of a module that `can_be_runs`, and of the state of its optimizer.

    Raises CheckpointError for an optimizer over other parameters.
    """
    named = saved_params(module)
    params = {names[0]: param.detach() for param, names in named}
    flats = {n: param.view(-1) for n, param in params.items()} if weights else {}
    by_id = {id(param): names[0] for param, names in named}
    targets = [target for target in optimizer.targets if isinstance(target, PlainTarget)]
    whole: dict[str, dict[str, Tensor]] = {}
    for target in targets:
        strangers = [param for param in target.params if id(param) not in by_id]
        if strangers or len(targets) < len(optimizer.targets):
            raise CheckpointError(
                "the optimizer updates parameters that the module does not have; save a "
                "module that holds all of them"
            )
        planes = {plane.name for plane in target.planes}
        whole |= {
            by_id[id(param)]: {name: state[name] for name in state if name not in planes}
            for param, state in target.shown_state().items()
        }
    segments = [
        (flat, [ShardSegment(ParamId(i), 0, flat.numel(), 0)])
        for i, flat in enumerate(flats.values())
        if flat.numel()
    ]
    return ModuleRuns(
        names=[names for _, names in named],
        regions={name: Region.whole(param.shape) for name, param in params.items()},
        buffers=dict(saved_buffers(module)) if weights else {},
        weights=WeightStream(list(flats), segments, lambda flat: flat),
        states=[stream for target in targets for stream in target.streams(by_id)],
        dtypes={name: flat.dtype for name, flat in flats.items()},
        whole=lambda: whole,
    )
