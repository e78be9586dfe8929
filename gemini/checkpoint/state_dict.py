"""State dicts for torch.distributed.checkpoint with any writer or reader, like torch's functions.

    model_state, optim_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optim": optim_state}, checkpoint_id=path)
    dcp.load({"model": model_state, "optim": optim_state}, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optim_state)

State dicts have copies of this rank's runs in host memory. `save_checkpoint` streams runs instead,
and also saves checksums, random numbers, counters and schedulers.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from gemini.checkpoint.foreign.dcp import FlatRuns
from gemini.checkpoint.format.boxes import Region, StreamedRuns
from gemini.checkpoint.model.keys import Keys
from gemini.checkpoint.model.state import RunState, sharded_runs
from gemini.ddp import GeminiDDP
from gemini.optim.base import TieredOptimizer

from .save import state_of


def get_state_dict(
    model: GeminiDDP, optimizer: TieredOptimizer | None = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """(state dict of the module, of the optimizer), sharded, with the inner module's names."""
    runs = _runs_of(model, optimizer, Keys())
    there = {key: FlatRuns(part) for key, part in runs.tensors.items()}

    def keep(key: str, region: Region, start: int, values: Tensor) -> None:
        there[key].held[start] = values.detach().to("cpu", copy=True)

    runs.visit(keep)
    of_part = {id(part): there[key] for key, part in runs.tensors.items()}

    def with_flat_runs(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: with_flat_runs(inner) for name, inner in value.items()}
        return of_part[id(value)] if isinstance(value, StreamedRuns) else value

    state = with_flat_runs(state_of(runs, model, optimizer, first=True))
    return state["model"], state.get("optim", {})


def set_state_dict(
    model: GeminiDDP,
    optimizer: TieredOptimizer | None = None,
    *,
    model_state_dict: dict[str, Any],
    optim_state_dict: dict[str, Any] | None = None,
) -> None:
    """Load state dicts that `get_state_dict` made on this rank and torch has filled."""
    keys = Keys()
    given = {keys.weight(name): value for name, value in model_state_dict.items()}
    planes = (optim_state_dict or {}).get("state", {})
    for name, values in planes.items():
        given |= {keys.plane(name, plane): value for plane, value in values.items()}

    def put(key: str, start: int, values: Tensor) -> bool:
        runs = given.get(key)
        if not isinstance(runs, FlatRuns):
            return False
        values.copy_(runs.held[start])
        return True

    runs = _runs_of(model, optimizer, keys)
    runs.fill(put)
    for name, buffer in runs.buffers.items():
        if name in model_state_dict:
            buffer.copy_(model_state_dict[name])
    if optimizer is not None and optim_state_dict:
        for name, whole in runs.small_state().items():
            for plane in sorted(whole.keys() & planes.get(name, {}).keys()):
                whole[plane].copy_(planes[name][plane])
        optimizer.load_param_groups(optim_state_dict["param_groups"])


def _runs_of(model: GeminiDDP, optimizer: TieredOptimizer | None, keys: Keys) -> RunState:
    return RunState([sharded_runs(model, optimizer)], keys, with_optimizer=optimizer is not None)
