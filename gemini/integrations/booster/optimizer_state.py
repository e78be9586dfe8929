"""An optimizer's whole state by the names of its parameters, under any plugin; and the way back."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from gemini.checkpoint.dcp.ranks import Ranks
from gemini.checkpoint.format.manifest import FormatError, MismatchError
from gemini.checkpoint.model.state import first_names
from gemini.checkpoint.untrusted.torch_files import first_line, load_mapped
from gemini.ddp import GeminiDDP
from gemini.integrations.plugins.optimizers import Boosted
from gemini.optim.base import TieredOptimizer
from gemini.optim.rules.loss_scale import ScaleState

State = dict[str, Any]


def full_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    """As `optimizer.state_dict()` with names for positions; whole on rank 0. Collective."""
    if isinstance(model, GeminiDDP):
        return optimizer.state_dict()
    if hasattr(model, "set_requires_gradient_sync"):
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        return dict(get_optimizer_state_dict(model, optimizer, options=options))
    state = optimizer.state_dict()
    names = _names(model, optimizer)
    groups = [
        {**group, "params": [names[i] for i in group["params"]]} for group in state["param_groups"]
    ]
    by_name = {names[i]: planes for i, planes in state["state"].items()}
    found = {**state, "state": by_name, "param_groups": groups}
    scale = scale_of(optimizer)
    return found if scale is None else {**found, "counters": scale}


def load_full_state(
    path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, ranks: Ranks
) -> None:
    """From a file of `full_state`, or of an optimizer's own state dict. Collective.

    Raises FormatError for another file, MismatchError for the state of another optimizer.
    """
    state = ranks.together(lambda: _read(path))
    if isinstance(optimizer, TieredOptimizer) and isinstance(model, GeminiDDP):
        optimizer.load_state_dict(state)
        return
    names = _names(model, optimizer)
    state = ranks.together(lambda: _named(path, state, names))
    groups = ranks.together(lambda: _own_groups(path, optimizer, names, state["param_groups"]))
    if hasattr(model, "set_requires_gradient_sync"):
        options = StateDictOptions(full_state_dict=True)
        there: dict[str, Any] = {"state": _without_masters(state["state"]), "param_groups": groups}
        set_optimizer_state_dict(model, optimizer, there, options=options)
        return
    position = {name: i for i, name in enumerate(names)}
    planes = _without_masters(state["state"])
    by_position = {position[name]: planes[name] for name in names if name in planes}
    numbered = [{**group, "params": [position[n] for n in group["params"]]} for group in groups]
    optimizer.load_state_dict({"state": by_position, "param_groups": numbered})
    set_scale(optimizer, state.get("counters"))


def scale_of(optimizer: torch.optim.Optimizer) -> dict[str, float] | None:
    """Where the loss scale is, of an optimizer of plain parameters that has one."""
    scaling = optimizer._extras.scaling if isinstance(optimizer, Boosted) else None
    if scaling is None:
        return None
    state = scaling.state
    return {
        "scale": state.scale,
        "good_steps": state.good_steps,
        "hysteresis_left": state.hysteresis_left,
    }


def set_scale(optimizer: torch.optim.Optimizer, saved: Any) -> None:
    """Go on with it, where both have one."""
    scaling = optimizer._extras.scaling if isinstance(optimizer, Boosted) else None
    if scaling is not None and isinstance(saved, Mapping) and "scale" in saved:
        scaling.state = ScaleState(
            float(saved["scale"]), int(saved["good_steps"]), int(saved["hysteresis_left"])
        )


def _read(path: Path) -> State:
    try:
        state = load_mapped(path)
    except Exception as error:
        raise FormatError(
            f"{path} is no file of torch.save that is safe: {first_line(error)}"
        ) from error
    if not isinstance(state, dict) or not {"state", "param_groups"} <= state.keys():
        raise FormatError(f"{path} has no state of an optimizer; expected a file of save_optimizer")
    return state


def _names(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """Of the optimizer's parameters, by position."""
    names = first_names(model)
    return [names[id(p)] for group in optimizer.param_groups for p in group["params"]]


def _named(path: Path, state: State, names: list[str]) -> State:
    """The same by names, where it is by position."""

    def name_of(key: Any) -> str:
        if isinstance(key, int) and not 0 <= key < len(names):
            raise MismatchError(
                f"{path} has state of a parameter {key}, and the optimizer has {len(names)}; "
                "expected the state of an optimizer over the same parameters"
            )
        return names[key] if isinstance(key, int) else str(key)

    groups = [
        {**group, "params": [name_of(key) for key in group["params"]]}
        for group in state["param_groups"]
    ]
    by_name = {name_of(key): planes for key, planes in state["state"].items()}
    unknown = sorted(by_name.keys() - set(names))
    if unknown:
        raise MismatchError(
            f"{path} has state of {unknown[0]}, which this optimizer has not; expected the state "
            "of an optimizer over the same parameters"
        )
    return {**state, "state": by_name, "param_groups": groups}


def _own_groups(
    path: Path, optimizer: torch.optim.Optimizer, names: list[str], saved: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Saved options where this optimizer has them, and its own parameters."""
    own = optimizer.param_groups
    if [len(group["params"]) for group in own] != [len(group["params"]) for group in saved]:
        raise MismatchError(
            f"{path} has groups of {[len(group['params']) for group in saved]} parameters, and the "
            f"optimizer of {[len(group['params']) for group in own]}; expected the same groups"
        )
    groups, first = [], 0
    for mine, theirs in zip(own, saved, strict=True):
        last = first + len(mine["params"])
        taken = {key: value for key, value in theirs.items() if key in mine}
        groups.append({**mine, **taken, "params": names[first:last]})
        first = last
    return groups


def _without_masters(state: Mapping[str, Any]) -> dict[str, dict[str, Tensor]]:
    return {
        name: {plane: value for plane, value in planes.items() if plane != "master"}
        for name, planes in state.items()
    }
