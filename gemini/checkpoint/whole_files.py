"""Files of torch.save and safetensors that rank 0 writes whole, by names of parameters.

They are the same for a module that is sharded here, by FSDP2 or not at all. What is too large for
rank 0 is saved by `save_checkpoint` or `export_weights`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from gemini.checkpoint.export import Format, WeightsWriter, spec_of
from gemini.checkpoint.format.manifest import (
    CheckpointError,
    CorruptError,
    FormatError,
    MismatchError,
    on_disk,
)
from gemini.checkpoint.model.state import first_names, parts_of
from gemini.checkpoint.ranks import Ranks
from gemini.checkpoint.save import in_background, settle
from gemini.checkpoint.untrusted.lazy_tensors import TensorSpec
from gemini.checkpoint.untrusted.torch_files import first_line, load_mapped
from gemini.ddp import GeminiDDP
from gemini.nvme.files import calls
from gemini.optim.base import TieredOptimizer
from gemini.optim.rules.saved import check_counters, check_steps
from gemini.optim.rules.state_layout import MASTER
from gemini.parallel.pipelined import Pipelined, gathered_weights
from gemini.saved_config import save_config, written_dtype
from gemini.saved_names import SavedNames
from gemini.tickets import Done, Ticket

State = dict[str, Any]
WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)  # on rank 0


def begin(model: nn.Module, call: str) -> Ranks:
    """Ranks of a save or load that begins. Waits for the last async save, and raises its error on
    every rank. Collective."""
    ranks = Ranks(model, call, parts_of(model))
    settle(ranks)
    return ranks


def full_weights(model: nn.Module, ranks: Ranks) -> Mapping[str, Any]:
    """State dict of a model, whole on rank 0. Collective."""
    if isinstance(model, Pipelined):
        return gathered_weights(model, ranks)
    if hasattr(model, "set_requires_gradient_sync"):
        return get_model_state_dict(model, options=WHOLE)
    state: Mapping[str, Any] = model.state_dict()
    return state


def written(
    ranks: Ranks, path: Path, write: Callable[[], None] | None, use_async: bool = False
) -> Ticket[None]:
    """Write on rank 0, now or in a thread; `write` is None if all is written. Collective."""
    if use_async and write is not None:
        return Done(None) if ranks.rank else in_background(str(path), write)
    # an error of rank 0 is raised on all ranks, which would go on as if the file were whole
    if write is not None:
        ranks.together(lambda: None if ranks.rank else write())
    return Done(None)


def write_file(path: Path, state: Any) -> None:
    """Save a file of torch.save that is complete when it appears. Raises CheckpointError."""
    if path.is_dir():
        raise CheckpointError(f"cannot save to {path}: it is a folder; give a file, or shard=True")
    unfinished = beside(path)
    with on_disk("save to", path):
        calls.make_folders(path.parent)
        torch.save(state, unfinished)
        # synced before it has its name, and the folder after: a crash leaves the old file or this
        calls.sync_file(unfinished)
        calls.rename(unfinished, path)
        calls.sync_folder(path.parent)


def beside(path: Path) -> Path:
    return path.parent / f".{path.name}.saving"


def write_folder(
    model: nn.Module,
    state: Mapping[str, Tensor],
    path: Path,
    limit: int,
    prefix: str | None,
    kind: Format,
    *,
    one: bool,
) -> None:
    """Write a state dict as a folder of weights at `path`, or (`one`) as one file."""
    folder = beside(path) if one else path
    first: dict[int, tuple[str, Tensor]] = {}  # a tied tensor under its first name
    saved = SavedNames(model).saved
    for name, value in state.items():
        first.setdefault(value.data_ptr() or id(value), (saved(name), value))
    specs: list[TensorSpec] = [
        spec_of(name, value.dtype, value.shape, None) for name, value in first.values()
    ]
    writer = WeightsWriter(folder, specs, limit, prefix or "", kind)
    dtype = written_dtype(model, {spec.name: spec.dtype for spec in specs})
    writer.write(first.values(), partial(save_config, model, dtype))
    if one:
        take_out(folder, path)


def take_out(folder: Path, path: Path) -> None:
    """Move the one file of weights in `folder` to `path`, and remove the folder."""
    with on_disk("save to", path):
        (file,) = folder.glob("*.safetensors")
        calls.rename(file, path)
        for rest in sorted(folder.iterdir()):
            calls.unlink(rest)
        folder.rmdir()
        calls.sync_folder(path.parent)


def copied(value: Any) -> Any:
    """Copy of nested dicts and lists, with all tensors copied to the CPU."""
    if isinstance(value, Mapping):
        return {key: copied(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [copied(inner) for inner in value]
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value


# -- the state of an optimizer --


def full_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    """State dict of an optimizer with names for positions, whole on rank 0. Collective."""
    if isinstance(model, GeminiDDP):
        return optimizer.state_dict()
    if hasattr(model, "set_requires_gradient_sync"):
        return dict(get_optimizer_state_dict(model, optimizer, options=WHOLE))
    state = optimizer.state_dict()
    names = _names(model, optimizer)
    groups = [
        {**group, "params": [names[i] for i in group["params"]]} for group in state["param_groups"]
    ]
    by_name = {names[i]: planes for i, planes in state["state"].items()}
    return {**state, "state": by_name, "param_groups": groups}


def load_full_state(
    path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, ranks: Ranks
) -> Any:
    """Load a file of `full_state`, or of an optimizer's own state dict. Collective.

    Returns checked counters of the file, of a loss scale that the optimizer does not keep itself;
    None without any. Raises FormatError for another file, MismatchError for the state of another
    optimizer.
    """
    # together: a rank that fails alone would leave the others waiting in the load's collectives
    state = ranks.together(lambda: _read(path))
    if isinstance(optimizer, TieredOptimizer) and isinstance(model, GeminiDDP):
        optimizer.load_state_dict(state)
        return None
    names = _names(model, optimizer)
    state = ranks.together(lambda: _named(path, state, names))
    groups = ranks.together(lambda: _own_groups(path, optimizer, names, state["param_groups"]))
    if hasattr(model, "set_requires_gradient_sync"):
        options = StateDictOptions(full_state_dict=True)
        there: dict[str, Any] = {"state": without_masters(state["state"]), "param_groups": groups}
        set_optimizer_state_dict(model, optimizer, there, options=options)
        return None
    optimizer.load_state_dict(by_position({**state, "param_groups": groups}, names))
    return state.get("counters")


def without_masters(state: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    return {
        name: {plane: value for plane, value in planes.items() if plane != MASTER}
        for name, planes in state.items()
    }


def by_position(state: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Convert an optimizer's state from names to positions, as in torch's optimizers."""
    position = {name: i for i, name in enumerate(names)}
    planes = {position[name]: found for name, found in without_masters(state["state"]).items()}
    groups = [
        {**group, "params": [position[name] for name in group["params"]]}
        for group in state["param_groups"]
    ]
    return {"state": planes, "param_groups": groups}


def _read(path: Path) -> State:
    try:
        state = load_mapped(path)
    except Exception as error:
        raise FormatError(
            f"{path} is no file of torch.save that is safe: {first_line(error)}"
        ) from error
    if not isinstance(state, dict) or not {"state", "param_groups"} <= state.keys():
        raise FormatError(f"{path} has no state of an optimizer; expected a file of save_optimizer")
    try:
        if not isinstance(state["state"], dict):
            raise ValueError(f"its state is a {type(state['state']).__name__}; expected a dict")
        check_steps(state["state"].values())
        check_counters(state.get("counters") or {})
    except ValueError as error:
        raise CorruptError(f"{path} cannot be read: {error}") from error
    return state


def _names(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """Names of the optimizer's parameters, by position."""
    names = first_names(model)
    return [names[id(p)] for group in optimizer.param_groups for p in group["params"]]


def _named(path: Path, state: State, names: list[str]) -> State:
    """State with names for positions. Raises MismatchError for another optimizer's parameters."""

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
    """Groups of this optimizer with its own parameters, and the saved values of its options."""
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
