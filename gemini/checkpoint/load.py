"""load_checkpoint: find a checkpoint, compare it with the model, then stream it into this rank's
runs."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gemini.arguments import by_name
from gemini.checkpoint.format.manifest import CorruptError, MismatchError
from gemini.checkpoint.format.source import CheckpointSource
from gemini.checkpoint.model.keys import (
    COMMON,
    Keys,
    as_corrupt,
    check_fits,
    check_random_state,
    check_schedule,
    decode,
    differences,
    params_of_group,
    rank_key,
    set_random_state,
    step_count,
    stores_of,
    take_over_stores,
)
from gemini.checkpoint.model.state import (
    RunState,
    alone,
    first_names,
    inside,
    names_of,
    parts_of,
)
from gemini.ddp import GeminiDDP
from gemini.optim.base import TieredOptimizer
from gemini.optim.rules.saved import check_counters
from gemini.saved_names import renamed, without_wrappers

from .ranks import Ranks
from .reader import open_source
from .save import base_of, runs_of, settle

log = logging.getLogger("gemini")


@by_name
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
    is changed, with one exception: damage in the middle of a checkpoint's own file is found while
    it is read. Load another checkpoint then, before you train. Pinned state is verified first.
    """
    return load_accepted(
        path, model, optimizer, scheduler, strict=strict, weights=weights, accept=lambda extra: None
    )


@alone("load_checkpoint()")
def load_accepted(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    scheduler: Any = None,
    *,
    strict: bool = True,
    weights: bool = True,
    accept: Callable[[Any], object],
) -> Any:
    """Load as `load_checkpoint`.

    accept: called with this rank's `extra` before anything is changed; any error that it raises
        becomes a CorruptError.
    """
    model = inside(model)
    ranks = Ranks(model, "load_checkpoint()", parts_of(model))
    settle(ranks)
    where = Path(path).expanduser().absolute()
    ranks.same("the path", str(where))
    with ExitStack() as stack:
        by_position = _names_by_position(model, optimizer)
        source = ranks.together(lambda: open_source(where, by_position, stack))
        names = names_of(model)
        plain = without_wrappers(name for alike in names for name in alike)
        source.rename(plain)
        keys = Keys.find(source.sizes.keys(), names)
        if optimizer is not None:
            keys.check_groups(source.sizes, source.path)
        runs = ranks.together(lambda: runs_of(model, optimizer, ranks.world_size, keys, weights))
        if runs is not None and ranks.is_pipeline:
            mine = {name for names in runs.names for name in names} | runs.buffers.keys()
            runs.on_other_ranks = frozenset().union(*ranks.gather(mine)) - mine
        if strict and weights:
            _check_base(source, base_of(model, ranks), ranks, plain)
        extras = _Extras(source, model, optimizer, scheduler, ranks, plain, accept, weights=weights)
        if runs is None:
            from .foreign.state_dicts import load_plain

            load_plain(
                source, model, optimizer, strict, ranks, plain, by_position, extras.read,
                weights=weights,
            )  # fmt: skip
        else:
            _load_runs(
                source, runs, optimizer, strict, ranks, keys, plain, by_position, extras.read,
                weights=weights,
            )  # fmt: skip
        return extras.put()


def _check_base(
    source: CheckpointSource, mine: Mapping[str, str], ranks: Ranks, plain: Callable[[str], str]
) -> None:
    """Raise MismatchError for a checkpoint that was trained on another base than this model's."""
    found = _decoded(source, [COMMON], ranks) if mine else None
    saved = found[0].get("base", {}) if found else {}
    other = [n for n, digest in saved.items() if mine.get(plain(n), digest) != digest]
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
    plain: Callable[[str], str],
    by_position: Sequence[str],
    read_extras: Callable[[], None],
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
    groups = []
    for number, options in sorted(saved_groups.items()):
        group = {option: small[key] for option, key in options.items()}
        what = f"{source.path}, params of group {number},"
        found = params_of_group(group.get("params"), by_position, what)
        groups.append(group | {"params": [plain(name) for name in found]})
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

    tensors = {key: t for key, t in runs.tensors.items() if source.sizes.get(key) == t.shape}

    def count_of(name: str) -> Tensor:
        # torch's SGD saves no counts: a buffer has begun
        begun = any(keys.plane(name, plane) in source.sizes for plane in runs.planes)
        key = keys.plane(name, "step")
        return step_count(small.get(key, float(begun)), f"{source.path}, {key},")

    counts = ranks.together(lambda: {name: count_of(name) for name in whole})
    read_extras()
    put = ranks.together(lambda: source.filler(tensors))

    def put_or_start(key: str, start: int, values: Tensor) -> bool:
        if key in fresh:
            values.zero_()
            return True
        return put(key, start, values)

    ranks.together(lambda: runs.fill(put_or_start, tensors.keys() | fresh))
    loaded: dict[str, dict[str, Tensor]] = {}
    for name, values in whole.items():
        loaded[name] = {
            plane: small.get(keys.plane(name, plane), torch.zeros(())) for plane in values
        }
        loaded[name]["step"] = counts[name]
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


class _Extras:
    """Counters, the scheduler, random numbers, and buffers of a rank."""

    def __init__(
        self,
        source: CheckpointSource,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        scheduler: Any,
        ranks: Ranks,
        plain: Callable[[str], str],
        accept: Callable[[Any], object],
        *,
        weights: bool,
    ) -> None:
        self._source, self._model, self._scheduler = source, model, scheduler
        self._plain = plain
        self._optimizer = optimizer if isinstance(optimizer, TieredOptimizer) else None
        self._ranks, self._accept, self._weights = ranks, accept, weights
        self._trains = weights and optimizer is not None
        self._found: list[dict[str, Any]] | None = None
        self._extra: Any = None
        sizes = source.sizes
        self._has_own = rank_key(ranks.rank) in sizes
        self._same_world = rank_key(ranks.world_size - 1) in sizes
        self._same_world &= rank_key(ranks.world_size) not in sizes

    def read(self) -> None:
        """Read all of it and compare it with what it takes the place of. Collective. Raises
        CorruptError."""
        wanted = [COMMON, rank_key(self._ranks.rank if self._has_own else 0)]
        self._found = _decoded(self._source, wanted, self._ranks)
        if self._found is not None:
            extra = self._found[1]["extra"]
            if not self._same_world:
                first = _decoded(self._source, [rank_key(0)], self._ranks)
                extra = None if first is None else first[0]["extra"]
            self._extra = extra
        self._ranks.together(self._check)

    def _check(self) -> None:
        where = str(self._source.path)
        as_corrupt(where, "an extra", lambda: self._accept(self._extra))
        if self._found is None:
            return  # another program saved it
        common, own = self._found
        if self._optimizer is not None:
            as_corrupt(where, "counters", lambda: [*map(check_counters, _listed(common))])
            as_corrupt(where, "names of stores", lambda: stores_of(common.get("files", {})))
        if self._scheduler is not None and common["scheduler"] is not None:
            saved = common["scheduler"]
            as_corrupt(where, "a schedule", lambda: check_schedule(self._scheduler, saved))
        if not self._weights:
            return
        if self._has_own:
            as_corrupt(where, "random numbers", lambda: check_random_state(own["random"]))
        as_corrupt(where, "buffers", lambda: [b.shape for *_, b in self._buffers(own)])
        if "memory" in common:  # each trace in it is checked when it is taken
            memory = common["memory"]
            as_corrupt(where, "traces", lambda: (memory["device"], iter(memory["traces"])))

    def _buffers(self, own: Mapping[str, Any]) -> Iterator[tuple[Tensor, Tensor]]:
        """(buffer, saved values) of every buffer that this rank has and has saved."""
        if not self._same_world:
            return
        saved = renamed(own["buffers"], self._plain)
        for part in parts_of(self._model):
            for name, buffer in part.saved_tensors():
                if name in saved:
                    yield buffer, saved[name].reshape(buffer.shape)

    def put(self) -> Any:
        """Put it in its places; return `extra`. Collective."""
        if self._found is None:
            return None
        common, own = self._found

        def put_back() -> None:
            counters = () if self._optimizer is None else self._optimizer.counters
            for alike, saved in zip(counters, _listed(common), strict=False):
                for counted in alike:
                    counted.load_state_dict(saved)
            if not self._weights:
                return
            if isinstance(self._model, GeminiDDP) and "memory" in common:
                engine = self._model.engine
                engine.sampler.load_state_dict(
                    common["memory"], told_apart=engine.calls.tells_inputs_apart
                )
            for buffer, values in self._buffers(own):
                buffer.copy_(values)
            if self._has_own:
                set_random_state(own["random"])

        where = str(self._source.path)
        self._ranks.together(lambda: as_corrupt(where, "values", put_back))
        if (optimizer := self._optimizer) is not None:
            files = common.get("files", {})
            self._ranks.together(
                lambda: as_corrupt(where, "stores", lambda: take_over_stores(files, optimizer))
            )
        if self._trains and common.get("averaged") and self._ranks.rank == 0:
            log.warning(
                "%s was saved inside ema.swapped(): its weights are the average, and not those of "
                "its optimizer's state; go on from a checkpoint that was saved outside",
                self._source.path,
            )
        if self._scheduler is not None and common["scheduler"] is not None:
            self._scheduler.load_state_dict(common["scheduler"])
        return self._extra


def _listed(common: Mapping[str, Any]) -> Sequence[Any]:
    """Saved counters, as `TieredOptimizer.counters` has them."""
    found = common.get("counters", ())
    if not isinstance(found, (list, tuple)):
        raise ValueError(f"a {type(found).__name__}, expected a list")
    return found


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


def _names_by_position(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> list[str]:
    """Names of the optimizer's parameters, in its order."""
    names = first_names(model)
    if optimizer is None:
        return list(names.values())
    flat = [param for group in optimizer.param_groups for param in group["params"]]
    return [names[id(param)] for param in flat if id(param) in names]
