"""load_checkpoint: find a checkpoint, compare it with the model, then stream it into this rank's
runs."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gemini.checkpoint.dcp.ranks import Ranks
from gemini.checkpoint.dcp.reader import CheckpointSource, RunFiller, open_source
from gemini.checkpoint.format.manifest import CorruptError, MismatchError
from gemini.checkpoint.model.keys import (
    COMMON,
    Keys,
    check_fits,
    decode,
    differences,
    rank_key,
    set_random_state,
    take_over_stores,
)
from gemini.checkpoint.model.plain import load_plain
from gemini.checkpoint.model.state import RunState, first_names, names_of, parts_of
from gemini.ddp import GeminiDDP
from gemini.optim.base import TieredOptimizer

from .save import base_of, runs_of, settle

log = logging.getLogger("gemini")


def load_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    scheduler: Any = None,
    *,
    strict: bool = True,
    weights: bool = True,
) -> Any:
    """Load a checkpoint of `save_checkpoint`, at any world size, placement, chunk size or
    precision. All ranks call.

    Three other formats load too: a checkpoint that torch.distributed.checkpoint wrote of any module
    and its optimizer (FSDP2 included), a torch.save file of their state dicts, and safetensors of
    weights, a file or a folder, as Hugging Face's models save them.

    path: a checkpoint, the folder that has several (its `latest` is loaded), or a file.
    model, optimizer: as in `save_checkpoint`; torch loads plain ones.
    strict: the checkpoint must have every parameter and its state, and no other; False loads what
        fits.
    weights: False loads the optimizer's state alone: weights and random numbers stay.

    Returns this rank's `extra`; at another world size, rank 0's. Random numbers continue on ranks
    that the saving run had too; other ranks keep their own.

    Raises, on every rank: MismatchError with all differences at once, CorruptError with the name of
    the file, FormatError, CheckpointError for an optimizer of another module; each before anything
    is changed, with one exception: damage in the middle of a file is found while the file is read.
    Load another checkpoint then, before you train.
    """
    ranks = Ranks(model, "load_checkpoint()", parts_of(model))
    settle(ranks)
    where = Path(path).expanduser().absolute()
    ranks.same("the path", str(where))
    with ExitStack() as stack:
        source = ranks.together(
            lambda: open_source(where, _names_by_position(model, optimizer), stack)
        )
        keys = Keys.find(source.sizes.keys(), names_of(model))
        runs = ranks.together(lambda: runs_of(model, optimizer, ranks.world_size, keys, weights))
        if runs is not None and ranks.is_pipeline:
            mine = {name for names in runs.names for name in names} | runs.buffers.keys()
            runs.on_other_ranks = frozenset().union(*ranks.gather(mine)) - mine
        if strict and weights:
            _check_base(source, base_of(model, ranks), ranks)
        if runs is None:
            load_plain(source, model, optimizer, strict, ranks, weights=weights)
        else:
            _load_runs(source, runs, optimizer, strict, ranks, keys, weights=weights)
        return _load_extras(source, model, optimizer, scheduler, ranks, weights=weights)


def _check_base(source: CheckpointSource, mine: Mapping[str, str], ranks: Ranks) -> None:
    """Raise MismatchError for a checkpoint that was trained on another base than this model's."""
    found = _decoded(source, [COMMON], ranks) if mine else None
    saved = found[0].get("base", {}) if found else {}
    other = [name for name, digest in saved.items() if mine.get(name, digest) != digest]
    if other:
        raise MismatchError(
            f"{source.path} was trained on another base: {other[0]} and {len(other) - 1} more have "
            "other bytes; load the base that it was saved with, or strict=False takes this one"
        )


def _load_runs(
    source: CheckpointSource,
    runs: RunState,
    optimizer: torch.optim.Optimizer | None,
    strict: bool,
    ranks: Ranks,
    keys: Keys,
    *,
    weights: bool,
) -> None:
    assert optimizer is None or isinstance(optimizer, TieredOptimizer)
    buffers = runs.buffers
    texts, fresh = _differences(source, keys, runs, optimizer is not None, weights)
    if strict:
        check_fits(source.path, texts)
    whole = runs.small_state() if optimizer is not None else {}
    small: dict[str, Any] = {
        key: torch.zeros(value.shape, dtype=value.dtype)
        for name, values in whole.items()
        for plane, value in values.items()
        if (key := keys.plane(name, plane)) in source.sizes
        and (plane == "step" or source.sizes[key] == value.shape)
    }
    small |= {
        keys.weight(name): torch.empty_like(buffer, device="cpu")
        for name, buffer in buffers.items()
        if source.sizes.get(keys.weight(name)) == buffer.size()
    }
    saved_groups = keys.groups(source.sizes.keys()) if optimizer is not None else {}
    small |= {key: None for options in saved_groups.values() for key in options.values()}
    # Small values and param groups are read and checked before any run is filled: until then an
    # error leaves the model as it was.
    ranks.together(lambda: source.load_into(small))
    groups = [
        {option: small[key] for option, key in options.items()}
        for _, options in sorted(saved_groups.items())
    ]
    copies = Counter(first for first, *_ in runs.names)  # of a weight that stages tie
    for group in groups if ranks.is_pipeline else ():
        group["params"] = [
            name
            for name in group["params"]
            if name not in runs.on_other_ranks
            for _ in range(max(1, copies[name]))
        ]
    if optimizer is not None and groups:
        ranks.together(lambda: _as_mismatch(lambda: optimizer.check_param_groups(groups)))

    tensors = {key: t for key, t in runs.tensors.items() if source.sizes.get(key) == t.size()}

    def fill(put: RunFiller) -> None:
        def put_or_start(key: str, start: int, values: Tensor) -> bool:
            if key in fresh:
                values.zero_()
                return True
            return put(key, start, values)

        runs.fill(put_or_start, tensors.keys() | fresh)

    ranks.together(lambda: source.fill(tensors, fill))
    loaded: dict[str, dict[str, Tensor]] = {}
    for name, values in whole.items():
        # torch's SGD saves no counts: a buffer has begun
        begun = any(keys.plane(name, plane) in source.sizes for plane in runs.planes)
        key = keys.plane(name, "step")
        loaded[name] = {
            plane: small.get(keys.plane(name, plane), torch.zeros(())) for plane in values
        }
        loaded[name]["step"] = _count(small.get(key, float(begun)), f"{source.path}, {key},")
    runs.set_small_state(loaded)
    for name, buffer in buffers.items():
        if keys.weight(name) in small:
            buffer.copy_(small[keys.weight(name)])
    if optimizer is not None and groups:
        optimizer.load_param_groups(groups)


def _as_mismatch(work: Callable[[], Any]) -> None:
    try:
        work()
    except (TypeError, ValueError) as error:
        raise MismatchError(str(error)) from error


def _of_weights(path: Path) -> str:
    """What to do with a file of weights alone."""
    if not path.is_file() or path.suffix == ".safetensors":
        return ""
    return (
        ": this is a torch file of weights, which model.load_state_dict(torch.load(...)) takes, or "
        "load_checkpoint without the optimizer"
    )


def _differences(
    source: CheckpointSource,
    keys: Keys,
    runs: RunState,
    with_optimizer: bool,
    with_weights: bool,
) -> tuple[list[str], set[str]]:
    """(differences between a checkpoint and a model with its optimizer, as texts; keys of state
    that starts at zero, because its parameter had no update before the save)."""
    sizes, texts = source.sizes, list[str]()
    fresh: set[str] = set()
    unexpected: list[str] = []
    names = {name for alike in runs.names for name in alike} | runs.on_other_ranks
    if with_weights:
        weights = {keys.weight(name): shape for name, shape in runs.shapes.items()}
        weights |= {keys.weight(name): buffer.size() for name, buffer in runs.buffers.items()}
        texts += differences(sizes, weights)
        unexpected += keys.unexpected(
            sizes, {f"{keys.model}{name}" for name in names} | weights.keys()
        )
    if with_optimizer:
        optims = f"{keys.optim}state."
        whole, trained = runs.small_state(), dict[str, dict[str, torch.Size]]()
        for name, shape in runs.shapes.items():
            planes = {keys.plane(name, plane): shape for plane in runs.planes}
            trained[name] = {key: s for key, s in planes.items() if key in runs.tensors}
            lines = {p: v.shape for p, v in whole.get(name, {}).items() if p != "step"}
            trained[name] |= {keys.plane(name, p): size for p, size in lines.items()}
        if not keys.groups(sizes) and not any(key.startswith(optims) for key in sizes):
            texts.append(f"it has no optimizer state{_of_weights(source.path)}")
            trained = {}
        for name, planes in trained.items():
            if any(key in sizes for key in (*planes, keys.plane(name, "step"))):
                texts += differences(sizes, planes)
            else:
                fresh.update(planes)
        unexpected += [
            key
            for key in sizes
            if key.startswith(optims) and key.removeprefix(optims).rpartition(".")[0] not in names
        ]
    return texts + [f"unexpected {key}" for key in unexpected], fresh


def _load_extras(
    source: CheckpointSource,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    scheduler: Any,
    ranks: Ranks,
    *,
    weights: bool,
) -> Any:
    """Load counters, the scheduler, and this rank's random numbers and buffers; return `extra`."""
    mine = rank_key(ranks.rank)
    wanted = [COMMON, mine if mine in source.sizes else rank_key(0)]
    found = _decoded(source, wanted, ranks)
    if found is None:
        return None  # another program saved it
    common, own = found
    same_world = rank_key(ranks.world_size - 1) in source.sizes
    same_world = same_world and rank_key(ranks.world_size) not in source.sizes

    def put_back() -> None:
        if isinstance(optimizer, TieredOptimizer):
            counted = [t.counters for t in optimizer.targets if t.counters is not None]
            for counters, saved in zip(counted, common.get("counters", ()), strict=False):
                counters.load_state_dict(saved)
        if not weights:
            return
        if isinstance(model, GeminiDDP) and "memory" in common:
            engine = model.engine
            engine.sampler.load_state_dict(
                common["memory"], told_apart=engine.calls.tells_inputs_apart
            )
        for part in parts_of(model) if same_world else ():
            for name, buffer in part.saved_tensors():
                if name in own["buffers"]:
                    buffer.copy_(own["buffers"][name])
        if wanted[1] == mine:
            set_random_state(own["random"])

    ranks.together(lambda: _as_corrupt(put_back, source))
    if isinstance(optimizer, TieredOptimizer):
        take_over = partial(take_over_stores, common.get("files", {}), optimizer)
        ranks.together(lambda: _as_corrupt(take_over, source))
    if scheduler is not None and common["scheduler"] is not None:
        scheduler.load_state_dict(common["scheduler"])
    if same_world:
        return own["extra"]
    first = _decoded(source, [rank_key(0)], ranks)
    return None if first is None else first[0]["extra"]


def _decoded(
    source: CheckpointSource, keys: Sequence[str], ranks: Ranks
) -> list[dict[str, Any]] | None:
    """Decoded values of these keys; None if the checkpoint lacks one of them."""
    blobs: dict[str, Any] = {
        key: torch.empty(size, dtype=torch.uint8)
        for key in keys
        if (size := source.sizes.get(key)) is not None
    }
    if len(blobs) < len(set(keys)):
        return None
    ranks.together(lambda: source.load_into(blobs))
    needed = {COMMON: {"scheduler"}}
    found = ranks.together(lambda: [decode(blobs[key], f"{source.path}, {key},") for key in keys])
    for key, values in zip(keys, found, strict=True):
        missing = needed.get(key, {"extra", "random", "buffers"}) - values.keys()
        if missing:
            raise CorruptError(f"{source.path}, {key}, cannot be read: it has no {min(missing)}")
    return found


def _as_corrupt(work: Callable[[], None], source: CheckpointSource) -> None:
    """Run `work`; any error becomes a CorruptError.

    Counters and random numbers have no schema: a damaged value fails in any way.
    """
    try:
        work()
    except Exception as error:
        raise CorruptError(
            f"{source.path} holds counters, buffers or random numbers that cannot be read: "
            f"{type(error).__name__}: {error}"
        ) from error


def _count(value: Any, where: str) -> Tensor:
    """Step count [], fp32 if it was saved as a number. Raises CorruptError for anything else."""
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.reshape(())
    if isinstance(value, (int, float)):
        return torch.tensor(float(value))
    raise CorruptError(f"{where} cannot be read: it is no number of steps")


def _names_by_position(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> list[str]:
    """Names of the optimizer's parameters, in its order."""
    names = first_names(model)
    if optimizer is None:
        return list(names.values())
    flat = [param for group in optimizer.param_groups for param in group["params"]]
    return [names[id(param)] for param in flat if id(param) in names]
