"""Modules that are not wrapped, through our files: torch's own state dicts with any optimizer; runs
with one of ours, so that state on disk is streamed here too."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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

from gemini.checkpoint.dcp.ranks import Ranks
from gemini.checkpoint.dcp.reader import RunFiller
from gemini.checkpoint.dcp.sharded import can_be_raw
from gemini.checkpoint.dcp.sources import CheckpointSource
from gemini.checkpoint.format.errors import CheckpointError, MismatchError
from gemini.checkpoint.format.keys import Keys
from gemini.module_face import saved_buffers
from gemini.optim.base import TieredOptimizer
from gemini.optim.plain.target import PlainTarget
from gemini.optim.state.lines import LINES
from gemini.units import BLOCK_NUMEL

from .state import RunState, RunVisitor, StatePart, WeightRun, names_of


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
    ranks.together(lambda: source.load_into(loaded))
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


def can_be_runs(module: nn.Module) -> bool:
    """Whether its state dict is parameters and buffers that lie in memory as they are saved."""
    params = dict(module.named_parameters(remove_duplicate=False))
    known = params.keys() | dict(saved_buffers(module)).keys()
    return known == module.state_dict().keys() and all(
        param.is_contiguous() and can_be_raw(param.dtype) and not isinstance(param, DTensor)
        for param in params.values()
    )


class PlainRuns(RunState):
    """The parameters of a module that `can_be_runs`, and the state of its optimizer."""

    def __init__(
        self, module: nn.Module, optimizer: TieredOptimizer, keys: Keys, *, weights: bool = True
    ) -> None:
        """Raises CheckpointError for an optimizer over other parameters."""
        self.names = names_of(module)
        params = {names[0]: module.get_parameter(names[0]).detach() for names in self.names}
        self.shapes = {name: param.size() for name, param in params.items()}
        self._params = params if weights else {}
        self.buffers = dict(saved_buffers(module)) if weights else {}
        by_id = {id(module.get_parameter(names[0])): names[0] for names in self.names}
        targets = [target for target in optimizer.targets if isinstance(target, PlainTarget)]
        self._whole: dict[str, dict[str, Tensor]] = {}
        parts = []
        for target in targets:
            strangers = [param for param in target.params if id(param) not in by_id]
            if strangers or len(targets) < len(optimizer.targets):
                raise CheckpointError(
                    "the optimizer updates parameters that the module does not have; save a "
                    "module that holds all of them"
                )
            trained = [by_id[id(param)] for param in target.params]
            parts.append(StatePart(target, trained, _by_position(trained)))
            shown = target.shown_state()
            self._whole |= {
                by_id[id(param)]: {name: state[name] for name in ("step", *LINES) if name in state}
                for param, state in shown.items()
            }
        super().__init__(
            keys,
            parts,
            [run for name, param in self._params.items() for run in _cut(name, param.numel())],
            {name: param.dtype for name, param in self._params.items()},
            with_optimizer=True,
            with_weights=weights,
        )

    def small_state(self) -> Mapping[str, Mapping[str, Tensor]]:
        return self._whole

    def visit_weights(self, look: RunVisitor) -> None:
        for name, param in self._params.items():
            flat = param.view(-1)
            for _, start, numel in _cut(name, param.numel()):
                values = flat[start : start + numel]
                look(self._keys.weight(name), self.region(name), start, values)

    def _fill_weights(self, put: RunFiller) -> None:
        for name, param in self._params.items():
            flat = param.view(-1)
            for _, start, numel in _cut(name, param.numel()):
                values = torch.empty(numel, dtype=param.dtype)
                if put(self._keys.weight(name), start, values):
                    flat[start : start + numel].copy_(values)


def _by_position(names: Sequence[str]) -> Callable[[str], str]:
    return lambda position: names[int(position)]


def _cut(name: str, numel: int) -> list[WeightRun]:
    """A parameter in runs of at most a block."""
    return [
        (name, first, min(BLOCK_NUMEL, numel - first)) for first in range(0, numel, BLOCK_NUMEL)
    ]
