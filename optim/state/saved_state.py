"""Saved state in the form of torch's optimizers, completed before it is loaded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

State = Mapping[Tensor, Mapping[str, Any]]


def unflattened(
    flat: Mapping[str, Any], names: Iterable[str], planes: Iterable[str]
) -> dict[str, dict[str, Any]]:
    """State by name from `{"state.NAME.PLANE": value}`."""
    state: dict[str, dict[str, Any]] = {}
    for name in names:
        keys = {plane: f"state.{name}.{plane}" for plane in (*planes, "step")}
        state[name] = {plane: flat[key] for plane, key in keys.items() if key in flat}
    return state


def with_steps(state: State, planes: Sequence[str]) -> State:
    """`state` with a step count for every parameter that has a plane.

    torch's SGD saves none: a parameter with a buffer has been updated, so its next step is not the
    first.
    """
    whole: dict[Tensor, Mapping[str, Any]] = {}
    for param, values in state.items():
        has_begun = any(values.get(plane) is not None for plane in planes)
        counted = "step" in values or not has_begun
        whole[param] = values if counted else {**values, "step": 1.0}
    return whole


def filled_up(state: State, params: Sequence[Tensor], planes: Sequence[str]) -> State:
    """`state` with zeros for what it lacks of `params`: they begin anew, as in torch.

    The zeros take no memory.
    """
    whole = dict(state)
    for param in params:
        given = {name: value for name, value in state.get(param, {}).items() if value is not None}
        zeros = torch.zeros(()).expand(param.shape)
        whole[param] = {**dict.fromkeys(planes, zeros), "step": 0.0, **given}
    return whole
