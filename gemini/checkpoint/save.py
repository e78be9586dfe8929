"""save_checkpoint: agree, describe, stream, commit. A process has at most one save in a thread.

    1. ranks agree on the path, and rank 0 makes a temporary folder next to it
    2. every rank describes what it has, and rank 0 shares out what several have
    3. every rank streams its runs into one file and syncs it
    4. rank 0 writes `.metadata` and the manifest, syncs, and renames the folder into its place

An asynchronous save returns before step 2. State on disk keeps its version until the thread has
copied it. State in memory is copied to host memory, up to `async_ram_budget`; the rest is written
before the call returns.

A pinned save (ADR 0016) streams state in memory alone. State on disk is not copied: its store keeps
that version, and step 3 writes the names of its files.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor, nn

from gemini.arguments import by_name
from gemini.checkpoint.format.boxes import Region, StreamedRuns
from gemini.checkpoint.format.manifest import CheckpointError
from gemini.checkpoint.model.keys import Keys, encode, known_stores, random_state
from gemini.checkpoint.model.plain import can_be_runs, plain_runs
from gemini.checkpoint.model.state import (
    RunState,
    alone,
    check_parts,
    first_names,
    inside,
    parts_of,
    sharded_runs,
)
from gemini.comm.leaving import ask_at_the_end
from gemini.ddp import GeminiDDP
from gemini.nvme import is_gone
from gemini.optim.base import TieredOptimizer
from gemini.optim.groups import as_torchs
from gemini.optim.state.deferred_signals import DeferredSignals
from gemini.runtime.inspect.digest import base_digests
from gemini.runtime.step.target import ShardTarget
from gemini.tickets import Done, Ticket
from gemini.units import parse_bytes

from .ranks import Ranks
from .writer import RankFile, Save

log = logging.getLogger("gemini")

_SHARE_OF_FREE_MEMORY = 0.5  # of an asynchronous save's copies, over all ranks of this machine


@by_name
@alone()
def save_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    scheduler: Any = None,
    extra: Any = None,
    async_save: bool = False,
    *,
    keep_last: int | None = None,
    async_ram_budget: int | str | None = None,
    weights: bool = True,
    pinned: bool = False,
) -> Ticket[None]:
    """Save everything that training needs to go on with the same bits. All ranks call.

    A checkpoint is a folder that torch.distributed.checkpoint can read as it is, with a manifest of
    checksums. It is complete when it appears at `path`; the link `latest` in the parent folder then
    points to it.

    path: the folder: a new one, or a checkpoint, which is replaced in one step.
    model, optimizer: a `GeminiDDP` and its optimizer, or a plain module and any optimizer.
    scheduler: anything with a `state_dict`.
    extra: tensors, numbers, strings and containers of them; each rank's own is saved.
    async_save: return at once and write in a thread. An error of the thread is raised by the
        ticket's `wait()`, else by the next call.
    keep_last: number of checkpoints to keep in the parent folder, this one included; older ones
        are deleted once it is complete. None keeps all.
    async_ram_budget: bytes (or `"2GiB"`) of host memory on this rank that copies may take; state
        that does not fit is written before this returns. None: half of this machine's free memory,
        divided by its ranks.
    weights: False leaves the module's weights out, fp32 masters too: the optimizer's state alone.
    pinned: write no state. The optimizer's files keep this version, in place of one of its
        `NvmeConfig(keep_versions=)`, until the checkpoint is deleted or replaced, and stay when the
        process ends. The checkpoint loads where those files are, and torch alone cannot read it; do
        not move its folder. With `async_save` it is complete when this returns, and a thread copies
        the state out: the result is a checkpoint that is not pinned.

    Returns a ticket, which is done already unless `async_save`.
    Raises CheckpointError on every rank if any rank fails; earlier checkpoints stay.
    """
    model = inside(model)
    ranks = Ranks(model, "save_checkpoint()", parts_of(model))
    target = Path(path).expanduser().absolute()
    _check_call(ranks, target, keep_last, pinned)
    keeper = ranks.together(lambda: _keeper(model, optimizer, target)) if pinned else None
    if pinned and async_save:
        # The pinned checkpoint is complete before the copy begins, and the copy replaces it in one
        # step: a process that dies between the two still leaves a checkpoint.
        save_checkpoint(target, model, optimizer, scheduler, extra, weights=weights, pinned=True)
        keeper = None
    save = Save(ranks, target, keep_last)
    with save.or_nothing():
        common: dict[str, Any] = {
            "files": known_stores(optimizer, ranks) if weights else {},
            "base": base_of(model, ranks) if weights else {},
        }
        if weights and any(part.engine.is_swapped for part in parts_of(model)):
            common["averaged"] = True  # by gemini.EMA, while the optimizer's state is of others
        if isinstance(optimizer, TieredOptimizer) and weights:
            save.when_done(partial(optimizer.remove_left_stores, common["files"]["step"]))
        state, runs = ranks.together(
            lambda: _content(model, optimizer, scheduler, extra, ranks, weights, common)
        )
        if ranks.is_pipeline and optimizer is not None:
            state["optim"].pop("param_groups", None)
            state["optim"] |= _groups_of_all(ranks, optimizer, model)
        save.take(state, {} if runs is None else runs.aliases)

        def open_file() -> RankFile:
            file = save.open_file()
            # Space for all runs now: a full disk is an error of all ranks, before any run is read.
            if runs is not None and keeper is None:
                file.reserve(runs.nbytes, runs.num_items)
            return file

        file = ranks.together(open_file)
        if async_save:
            return _save_later(save, runs, file, _budget(async_ram_budget))
        if runs is None:
            save.write()
        elif keeper is None:
            save.write(lambda file: runs.visit(file.add_run))
        else:
            _save_pinned(save, runs, keeper)
    return Done(None)


def _save_pinned(save: Save, runs: RunState, keeper: ShardTarget) -> None:
    """Write runs in memory, and for state on disk the places of its version."""
    hosts = set(save.ranks.gather(socket.gethostname()))
    if len(hosts) > 1 and save.ranks.rank == 0:
        log.warning(
            "%s is pinned to files on the disks of %d hosts: it loads where all of these are, and "
            "is lost with one of them; save without pinned=True, or with async_save=True, what is "
            "to outlive a host",
            save.target, len(hosts),
        )  # fmt: skip
    with ExitStack() as stack:

        def stream(file: RankFile) -> None:
            runs.visit_weights(file.add_run)
            # The pin's witness is a file of the finished checkpoint. `settle` runs when the save
            # has ended, well or not: only then is it known whether that file exists.
            version, settle = keeper.pin_state(save.target / file.pinned_name)
            stack.callback(settle)
            file.pin(version)
            runs.visit_pinned(version, file.add_pinned)

        save.write(stream)


def _keeper(model: nn.Module, optimizer: torch.optim.Optimizer | None, target: Path) -> ShardTarget:
    """The state that a pinned save keeps. Raises CheckpointError where it cannot be pinned."""
    found = model.engine.find_optimizer() if isinstance(model, GeminiDDP) else None
    if found is None or optimizer is None or found.kept_steps is None:
        raise CheckpointError(
            "pinned=True is for a GeminiDDP and its optimizer, made with nvme_offload_fraction=1.0 "
            "and nvme=NvmeConfig(keep_versions=...): it keeps versions of the state on disk"
        )
    if not found.kept_steps.has_checksums:
        raise CheckpointError(
            "pinned=True of state without checksums could not be verified; leave "
            "NvmeConfig(checksums=) at its default, or save without pinned=True"
        )
    versions = found.kept_steps.versions
    others = {pin.witness.parent for pin in versions.pinned if not is_gone(pin.witness)} - {target}
    if len(others) >= versions.most:
        raise CheckpointError(
            f"{len(others)} checkpoints are pinned already, {min(others)} among them, and "
            f"keep_versions={versions.most}; delete one, copy it out, or give a larger "
            "NvmeConfig(keep_versions=...)"
        )
    return found


def _save_later(save: Save, runs: RunState | None, file: RankFile, budget: int) -> Ticket[None]:
    """Copy or write all that the next step changes in place; a thread does the rest."""
    save.take(_copied(save.state), save.aliases)
    failure: BaseException | None = None
    copies: list[tuple[str, Region, int, Tensor]] = []
    snapshot = runs.snapshot() if runs is not None else None
    left = budget

    def keep(key: str, region: Region, start: int, values: Tensor) -> None:
        nonlocal left
        if values.nbytes <= left:
            left -= values.nbytes
            copies.append((key, region, start, values.detach().to("cpu", copy=True)))
        else:
            file.add_run(key, region, start, values)

    try:
        if snapshot is not None:
            snapshot.visit_memory(keep)
    except BaseException as error:
        # Not raised here: the other ranks are on their way into the collectives of `write`, where
        # this rank tells them.
        failure = error

    def stream(file: RankFile) -> None:
        if snapshot is not None:
            snapshot.visit_disk(file.add_run)  # first: a step may wait for it
            snapshot.close()
        # `pop` and not `for`: each copy's memory is freed once it is written.
        while copies:
            file.add_run(*copies.pop())

    def work() -> None:
        try:
            with save.or_nothing():
                save.write(stream, failure)
        finally:
            if snapshot is not None:
                snapshot.close()

    return in_background(str(save.target), work)


def _check_call(ranks: Ranks, target: Path, keep_last: int | None, pinned: bool) -> None:
    """Raise CheckpointError on every rank for arguments that differ, a save under way, or a failed
    one that nobody was told of."""
    if keep_last is not None and keep_last < 1:
        raise CheckpointError(f"keep_last={keep_last}; expected at least 1, or None for all")
    raise_pending(ranks)
    under_way = [path for path in ranks.gather(_running()) if path]
    if under_way:
        raise CheckpointError(
            f"a save to {under_way[0]} is under way; wait() for its ticket before the next one"
        )
    ranks.same("the path", str(target))
    ranks.same("keep_last", str(keep_last))
    ranks.same("pinned", str(pinned))


def raise_pending(ranks: Ranks) -> None:
    """Raise CheckpointError on every rank for a background save of any rank that failed."""
    errors = [error for error in ranks.gather(_take_error()) if error]
    if errors:
        raise CheckpointError(errors[0])


def settle(ranks: Ranks) -> None:
    """Wait for the save under way, before a load. Raises CheckpointError on every rank."""
    _wait()
    raise_pending(ranks)


def _content(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    scheduler: Any,
    extra: Any,
    ranks: Ranks,
    weights: bool,
    common: dict[str, Any],
) -> tuple[dict[str, Any], RunState | None]:
    """(nested state of this rank, its runs that are streamed); None if there are none."""
    own = {"random": random_state(), "extra": extra, "buffers": {}}
    common["scheduler"] = None if scheduler is None else scheduler.state_dict()
    runs = runs_of(model, optimizer, ranks.world_size, Keys(), weights, once=True)
    if runs is not None:
        state = state_of(runs, model, optimizer, first=ranks.first)
        if not ranks.first:
            own["buffers"] = dict(runs.buffers)
        if isinstance(optimizer, TieredOptimizer):
            common["counters"] = [alike[0].state_dict() for alike in optimizer.counters]
        if isinstance(model, GeminiDDP) and not ranks.is_pipeline:
            common["memory"] = model.engine.sampler.state_dict()
    else:
        from .foreign.state_dicts import plain_state

        state = plain_state(model, optimizer, weights=weights)
    gemini = state.setdefault("gemini", {})
    if ranks.rank == 0:
        gemini["common"] = encode("the state of the scheduler", common)
    gemini["rank"] = {str(ranks.rank): encode("extra", own)}
    return state, runs


def base_of(model: nn.Module, ranks: Ranks) -> dict[str, str]:
    """Digests of opaque parameters by name: a checkpoint has them in their place. Collective."""
    found = [
        base_digests(engine.weights)
        for engine in (part.engine for part in parts_of(model))
        if engine.sharding.opaque
    ]
    mine = {name: digest for of_part in found for name, digest in of_part.items()}
    if not any(ranks.gather(bool(found))):
        return {}
    return {name: digest for of_rank in ranks.gather(mine) for name, digest in of_rank.items()}


def runs_of(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    world_size: int,
    keys: Keys,
    weights: bool = True,
    *,
    once: bool = False,
) -> RunState | None:
    """Runs that are streamed; None for a module that only torch's own state dicts can save.

    once: True for a save, see `sharded_runs`.
    Raises CheckpointError for an optimizer that is not the module's.
    """
    parts = parts_of(model)
    if parts:
        if optimizer is None or isinstance(optimizer, TieredOptimizer):
            if parts[0].engine.together is not None and optimizer is not None:
                check_parts(parts, optimizer)
            modules = [sharded_runs(part, optimizer, weights=weights, once=once) for part in parts]
            has_optimizer = optimizer is not None
            return RunState(modules, keys, with_optimizer=has_optimizer, with_weights=weights)
        raise CheckpointError(
            f"a {type(optimizer).__name__} has no state of a GeminiDDP; give its HybridAdam or the "
            "like"
        )
    if isinstance(optimizer, TieredOptimizer) and world_size == 1 and can_be_runs(model):
        modules = [plain_runs(model, optimizer, weights=weights)]
        return RunState(modules, keys, with_optimizer=True, with_weights=weights)
    return None


def state_of(
    runs: RunState, model: nn.Module, optimizer: torch.optim.Optimizer | None, *, first: bool
) -> dict[str, Any]:
    """State nested as torch's own state dicts are.

    first: this rank describes values that all ranks with the same parameters share.
    """
    keys = Keys()
    weights: dict[str, Any] = {}
    planes: dict[str, dict[str, Any]] = {}
    for key, tensor in runs.tensors.items():
        value: Tensor | StreamedRuns = tensor
        if not tensor.shape.numel():  # no rank has a part of it
            if not first:
                continue
            value = torch.empty(tensor.shape, dtype=tensor.dtype)
        if key.startswith(keys.model):
            weights[key.removeprefix(keys.model)] = value
        else:
            name, _, plane = key.removeprefix(f"{keys.optim}state.").rpartition(".")
            planes.setdefault(name, {})[plane] = value
    if first:
        weights |= runs.buffers
    state: dict[str, Any] = {"model": weights} if weights else {}
    if optimizer is not None:
        state["optim"] = {"state": planes}
        if first:
            for name, whole in runs.small_state().items():
                copies = {plane: value.detach().clone() for plane, value in whole.items()}
                planes.setdefault(name, {}).update(copies)
            state["optim"]["param_groups"] = _groups(optimizer, first_names(model))
    return state


def _groups(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> list[dict[str, Any]]:
    """Param groups with parameters by name, and with the options that torch's optimizers need."""
    groups = []
    for group in optimizer.param_groups:
        options = {key: value for key, value in group.items() if key != "params"}
        params = [names[id(param)] for param in group["params"]]
        groups.append({**as_torchs(options), "params": params})
    return groups


def _groups_of_all(
    ranks: Ranks, optimizer: torch.optim.Optimizer, model: nn.Module
) -> dict[str, Any]:
    """Param groups with the parameters of all stages, on rank 0. Collective."""
    said = ranks.gather(_groups(optimizer, first_names(model)) if ranks.first else [])
    found = [groups for groups in said if groups]
    if len({len(groups) for groups in found}) > 1:
        raise CheckpointError(
            f"the optimizers of the stages have {[len(groups) for groups in found]} param groups; "
            "expected the same groups in the same order, empty ones too"
        )
    if ranks.rank:
        return {}
    whole = []
    for alike in zip(*found, strict=True):
        params = [*dict.fromkeys(name for group in alike for name in group["params"])]
        whole.append({**alike[0], "params": params})
    return {"param_groups": whole}


def _budget(asked: int | str | None) -> int:
    if asked is not None:
        return parse_bytes(asked)
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return int(psutil.virtual_memory().available * _SHARE_OF_FREE_MEMORY / here)


def _copied(value: Any) -> Any:
    """A nested state with its tensors copied to the CPU; runs have no values."""
    if isinstance(value, dict):
        return {key: _copied(inner) for key, inner in value.items()}
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value


# -- in the background --


class BackgroundSave:
    """Ticket of a save in a thread."""

    def __init__(self, path: str, work: Callable[[], None]) -> None:
        self.path = path
        self._error: BaseException | None = None
        self.was_raised = False
        self._thread = threading.Thread(target=self._run, args=(work,), name="checkpoint")
        with DeferredSignals():  # a handler that raised in `start` would leave half a thread
            self._thread.start()

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            self._error = error
            log.error("the save to %s failed: %s", self.path, error)

    def ready(self) -> bool:
        """Whether it has ended, well or not."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Return when the checkpoint is complete. Raises CheckpointError."""
        self._thread.join()
        if self._error is not None:
            self.was_raised = True
            raise self._error

    @property
    def error(self) -> str:
        """Error that was not raised yet, in words; empty if none, or while the save runs."""
        if self._error is None or self.was_raised:
            return ""
        return f"the asynchronous save to {self.path} failed: {self._error}"


_last: BackgroundSave | None = None


def in_background(path: str, work: Callable[[], None]) -> BackgroundSave:
    """Run `work` in a thread. Raises CheckpointError where another thread has begun a save since
    the caller waited for the last one."""
    global _last
    if _last is not None and not _last.ready():
        raise CheckpointError(
            f"the save to {_last.path} was begun by another thread meanwhile, and goes on; "
            "expected one asynchronous save at a time in a process: wait for its ticket, then save"
        )
    _last = BackgroundSave(path, work)
    ask_at_the_end("save", _error_at_the_end)
    return _last


def _error_at_the_end() -> str:
    _wait()
    return "" if _last is None else _last.error


def _running() -> str:
    """Path of the save under way, or an empty string."""
    return "" if _last is None or _last.ready() else _last.path


def _take_error() -> str:
    """Error of the last save, in words; the second call returns an empty string."""
    if _last is None or not _last.ready():
        return ""
    error = _last.error
    _last.was_raised = True
    return error


def _wait() -> None:
    """Wait until no save is under way."""
    if _last is not None:
        _last._thread.join()


# At its end the interpreter forbids threads to begin anything before it joins them, so a save must
# end earlier.
threading._register_atexit(_wait)  # type: ignore[attr-defined]
