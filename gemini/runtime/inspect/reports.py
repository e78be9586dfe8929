"""Reports on a wrapped module's memory: at the start, of one parameter, of all, and over time."""

from __future__ import annotations

import difflib
import logging
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

from gemini.chunk.local import group_of
from gemini.chunk.opaque import leaf_bytes
from gemini.memtracer.forecast import sizes_of
from gemini.memtracer.trace import Trace
from gemini.optim.rules.config import StateConfig
from gemini.placement.plan import Plan
from gemini.placement.policy import StaticPlacement
from gemini.placement.predict import KINDS, TIERS
from gemini.placement.start import Start
from gemini.placement.tiers import Tier
from gemini.placement.timetable.updates import (
    SERIAL,
    TAIL,
    goes_on,
    is_early,
    priced_in_words,
    said,
)
from gemini.runtime.gradients.cycle import GradientCycle
from gemini.runtime.memory.backend import Backend
from gemini.runtime.memory.ledger import MemoryLedger
from gemini.runtime.overlap import UpdateOverlap
from gemini.runtime.schedule.planning import Planning
from gemini.runtime.schedule.sampler import Sampler
from gemini.runtime.sharding import Sharding
from gemini.units import WORLD, format_bytes

if TYPE_CHECKING:
    from gemini.activations.saved_tensors import SavedTensors

log = logging.getLogger("gemini")


@dataclass(frozen=True, slots=True)
class MemoryRow:
    """Bytes of one kind on one tier. `measured_bytes` is None before anything was measured."""

    tier: str
    kind: str
    predicted_bytes: int
    measured_bytes: int | None


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """Table of the peak bytes of every tier, predicted and, in a sampled iteration, measured.

    overruns: budgets that were passed, and measured iterations that no plan fits, in words.
    moves: of homes so far, in words; "" where none moved.
    activations: where those saved for backward are, as planned, in words; "" where all stay.
    evaluations: the largest evaluation, and the largest forward of one token (decoding), as a total
        of the device; none where none was measured.
    frozen_bytes: of frozen parameters, by tier; also counted in the rows.
    frozen_read_bytes: of frozen parameters that one iteration reads from files, as planned.
    ignored_bytes: of `ignored_params`, by device; in no row, plan or budget.
    """

    rows: tuple[MemoryRow, ...]  # of training
    overruns: tuple[str, ...] = ()
    moves: str = ""
    frozen_bytes: Mapping[str, int] = field(default_factory=dict)
    frozen_read_bytes: int = 0
    ignored_bytes: Mapping[str, int] = field(default_factory=dict)
    evaluations: tuple[MemoryRow, ...] = ()
    activations: str = ""

    def as_dict(self) -> dict[str, int]:
        """Flat numbers for a log: the peak of every tier in bytes, and the number of overruns."""
        found = {"overruns": len(self.overruns)}
        if self.frozen_bytes:
            found["frozen_bytes"] = sum(self.frozen_bytes.values())
            found["frozen_read_bytes"] = self.frozen_read_bytes
        if self.ignored_bytes:
            found["ignored_bytes"] = sum(self.ignored_bytes.values())
        for row in self.rows:
            if row.kind == "total":
                found[f"{row.tier}_predicted_bytes"] = row.predicted_bytes
                if row.measured_bytes is not None:
                    found[f"{row.tier}_measured_bytes"] = row.measured_bytes
        for row in self.evaluations:
            assert row.measured_bytes is not None
            found[f"{row.kind}_predicted_bytes"] = row.predicted_bytes
            found[f"{row.kind}_measured_bytes"] = row.measured_bytes
        return found

    def __str__(self) -> str:
        lines = [f"{'tier':<8} {'kind':<12} {'predicted':>12} {'measured':>12}"]
        for row in (*self.rows, *self.evaluations):
            measured = "-" if row.measured_bytes is None else format_bytes(row.measured_bytes)
            lines.append(
                f"{row.tier:<8} {row.kind:<12} {format_bytes(row.predicted_bytes):>12} "
                f"{measured:>12}"
            )
        if self.frozen_bytes:
            read = f"; an iteration reads {format_bytes(self.frozen_read_bytes)} of files"
            lines.append(f"of it frozen: {_places(self.frozen_bytes)}{read}")
        if self.ignored_bytes:
            lines.append(f"ignored, in no budget: {_places(self.ignored_bytes)}")
        if self.moves:
            lines.append(self.moves)
        if self.activations:
            lines.append(self.activations)
        return "\n".join((*lines, *self.overruns))


def _places(nbytes: Mapping[str, int]) -> str:
    return ", ".join(f"{format_bytes(n)} on {where}" for where, n in nbytes.items())


def _update_lines(planning: Planning, overlap: UpdateOverlap) -> list[str]:
    """Lines on the update of state off the device: when it runs, and its hidden seconds."""
    result = planning.result
    costs, update = result.overlapped, overlap.in_use()
    prices = [priced_in_words(result.seconds_by_update), _speeds(planning)] if costs else []
    if overlap.asked == SERIAL:
        if overlap.against_tail() is not None or TAIL not in costs:
            return []
        said_of_tail = f'with update="tail" it would be predicted to take {costs[TAIL]}'
        return [f"update: serial; {said_of_tail}", *prices]
    lines = [f"update: {when_updated(overlap)}", *prices]
    if update == SERIAL:
        return lines
    if (cost := costs.get(update)) is not None:
        lines.append(f"predicted of the update: {cost}")
    behind = overlap.behind
    if behind.ready() and (last := behind.wait()).seconds:
        lines.append(f"measured of the last update: {said(last.seconds, last.waited_seconds)}")
    return lines


def _speeds(planning: Planning) -> str:
    return f"speeds of predictions: {planning.machine.speeds.origin}"


def when_updated(overlap: UpdateOverlap) -> str:
    """Time of the update of state off the device, in words, with the rule against a tail that was
    asked for, if one applies."""
    update, reason = overlap.in_use(), overlap.against()
    if update == SERIAL:
        return "in step()" if overlap.asked == SERIAL else f"serial, as {reason}"
    when = "behind the next forward" if goes_on(update) else "in step()"
    if is_early(update):
        when = f"during backward, as far as gradients are final, and {when}"
    return when if reason is None else f'{when}; no update="{overlap.asked}", as {reason}'


def explain(
    sharding: Sharding,
    planning: Planning,
    overlap: UpdateOverlap,
    cycle: GradientCycle,
    name: str,
    ignored: Mapping[str, nn.Parameter],
) -> str:
    """Home of a parameter, its reason and its cost, in words. ignored: `ignored_params` by name.

    Raises ValueError for an unknown name.
    """
    if name in ignored:
        left = ignored[name]
        return (
            f"{name} {tuple(left.shape)}\nignored: {format_bytes(leaf_bytes(left))} on "
            f"{left.device.type}, in no chunk, plan or budget"
        )
    for param, spec in enumerate(sharding.layout.params):
        if name in spec.names:
            chunk = next(c for p, c in sharding.chunk_of.items() if p == param)
            mine = sharding.params[param]
            split = "" if group_of(mine) == WORLD else f", split over {group_of(mine)}: here"
            shape = tuple(mine.shape)
            own = f"{split} {spec.shape}" if split else ""
            text = f"{name} {shape}{own}\n{planning.plan.explain(chunk)}"
            moves = planning.moves
            lines = (
                text,
                *moves.why(chunk),
                *_update_lines(planning, overlap),
                _moves_of(planning),
                _saved_of(planning.plan),
                str(cycle.accumulated or ""),
                *planning.overruns.lines(),
            )
            return "\n".join(filter(None, lines))
    names = [*ignored, *(name for spec in sharding.layout.params for name in spec.names)]
    near = difflib.get_close_matches(name, names, n=3)
    raise ValueError(
        f"no parameter {name!r}" + (f"; did you mean {', '.join(near)}?" if near else "")
    )


def memory_report(
    planning: Planning,
    ledger: MemoryLedger,
    sampler: Sampler,
    backend: Backend,
    saved_tensors: SavedTensors | None,
    ignored: Iterable[nn.Parameter],
) -> MemoryReport:
    """Memory report, see `MemoryReport`. ignored: parameters that were left as they are."""
    measured = ledger.peaks
    predicted = planning.result.profile.peaks()
    train = sampler.traces("train")
    rows = []
    for tier in TIERS:
        found = dict(measured.get(tier, {}))
        if tier is Tier.DEVICE and train:
            saved = planning.plan.saved
            there = train[-1].non_model_within(None if saved is None else saved.room_bytes)
            found["non-model"] = max(there, default=0)
        if tier is not Tier.DEVICE and saved_tensors is not None:
            traffic = saved_tensors.traffic  # what went to a file may have been on the host
            on_host = max(0, traffic.host_out - traffic.nvme_out)
            found["non-model"] = on_host if tier is Tier.HOST else traffic.nvme_out
        wanted = predicted[tier.value]
        for kind in KINDS:
            if wanted[kind] or found.get(kind):
                rows.append(MemoryRow(tier.value, kind, wanted[kind],
                                      found.get(kind, 0) if measured else None))  # fmt: skip
        if wanted["total"] or found:
            rows.append(MemoryRow(tier.value, "total", wanted["total"],
                                  sum(found.values()) if measured else None))  # fmt: skip
        is_pinned = tier is Tier.HOST and backend.pin is not None
        if is_pinned and rows and rows[-1].tier == tier.value:  # no page of it is swapped
            rows.append(_pinned(rows[-1], wanted, found))
    left: Counter[str] = Counter()
    for param in ignored:
        left[param.device.type] += leaf_bytes(param)
    plan = planning.plan
    return MemoryReport(
        tuple(rows), planning.overruns.lines(), _moves_of(planning),
        {tier.value: nbytes for tier, nbytes in plan.frozen_bytes.items()},
        plan.frozen_read_bytes, dict(left), _evaluations(planning, sampler), _saved_of(plan),
    )  # fmt: skip


def _evaluations(planning: Planning, sampler: Sampler) -> tuple[MemoryRow, ...]:
    largest: dict[str, Trace] = {}
    for trace in sampler.traces("eval"):
        kind = "decode" if _is_of_one_token(trace.signature) else "evaluation"
        known = largest.get(kind)
        if known is None or trace.peak_non_model_bytes > known.peak_non_model_bytes:
            largest[kind] = trace
    rows, peaks = [], sampler.device_peaks
    for kind, trace in sorted(largest.items(), reverse=True):
        predicted = planning.peak_bytes(trace)
        measured = peaks.get((trace.kind, trace.signature))
        if predicted is not None and measured is not None:  # a checkpoint's traces have no peak
            rows.append(MemoryRow(Tier.DEVICE.value, kind, predicted, measured))
    return tuple(rows)


def _is_of_one_token(signature: str) -> bool:
    """Whether the first input has token numbers, one for each sequence."""
    form, sizes = sizes_of(signature)
    return form.startswith(("int64", "int32")) and sizes[0][1:] == (1,)


def _saved_of(plan: Plan) -> str:
    return "; ".join(str(one) for one in (plan.saved, plan.recomputed) if one is not None)


def _moves_of(planning: Planning) -> str:
    moves = planning.moves
    return str(moves) if moves.num_down or moves.num_up else ""


def _pinned(total: MemoryRow, predicted: Mapping[str, int], found: Mapping[str, int]) -> MemoryRow:
    """Row of pinned host memory: all of `total` but originals and averages, which no step moves."""
    measured, still = total.measured_bytes, ("originals", "average")
    return replace(
        total,
        kind="of it pinned",
        predicted_bytes=total.predicted_bytes - sum(predicted[kind] for kind in still),
        measured_bytes=None
        if measured is None
        else measured - sum(found.get(kind, 0) for kind in still),
    )


def memory_timeline(
    sharding: Sharding,
    planning: Planning,
    sampler: Sampler,
    path: str | Path,
    title: str | None = None,
) -> None:
    """Draw the plan of one iteration; see `gemini.placement.picture.write_timeline`."""
    from gemini.placement.picture import write_timeline
    from gemini.placement.timeline import planned_timeline

    numel = sum(spec.numel for spec in sharding.layout.params)
    ranks = sharding.comm.world_size
    of_ranks = f", one of {ranks} ranks" if ranks > 1 else ""
    verdict = "; ".join(planning.overruns.lines()) or "as planned, and no budget was passed"
    train = sampler.traces("train")
    seconds = {"forward": 0.0, "backward": 0.0}
    for moment in train[-1].moments if train else ():
        seconds[moment.phase] += moment.seconds
    timeline = planned_timeline(
        planning.result, planning.inputs, verdict=verdict, pass_seconds=seconds,
        title=title or f"{numel / 1e6:.4g} M parameters{of_ranks}",
    )  # fmt: skip
    write_timeline(timeline, path)


def say_start(
    sharding: Sharding,
    planning: Planning,
    overlap: UpdateOverlap,
    config: StateConfig,
    update_path: str,
    decays: tuple[float, ...],
) -> None:
    """Log three lines on the first rank, once, when its optimizer is made.

    config: of the optimizer. update_path: name of its executor. decays: of its groups.
    """
    if log.level > logging.INFO:
        return
    settings = sharding.precision_settings
    plan = planning.plan
    homes = [home for shard in plan.shards for home in shard.state_homes]
    masters = "" if settings.precision == "fp32" else " with fp32 masters"
    is_static = isinstance(planning.policy, StaticPlacement)
    moved = plan.bytes_moved().items()
    written = sum(nbytes for (_, target), nbytes in moved if target is Tier.NVME)
    start = Start(
        device=str(sharding.backend.device),
        peaks=planning.result.profile.peaks(),
        budgets=plan.budgets,
        folders=_folders_of(planning.nvme_folder, config) if written else "",
        written_bytes=written,
        may_promote=not (planning.homes_are_final or is_static),
        update_path=update_path,
        paths={home.value: plan.path_of(home).value for home in dict.fromkeys(homes)},
        when=when_updated(overlap),
        asked=overlap.asked,
        optimizer=config.optimizer,
        numel=sum(spec.numel for spec in sharding.layout.params if spec.trainable),
        decays=decays,
        precision=settings.precision + (masters if settings.master_weights else ""),
        num_ranks=sharding.comm.world_size,
    )
    _say(start.lines())


def _folders_of(given: str | None, config: StateConfig) -> str:
    """Folders of files with what is free in them; the default one by its path, too."""
    from gemini.nvme import default_folder, local_folder
    from gemini.nvme.files.file import free_bytes

    folders = config.nvme.folders or (given or str(default_folder()),)
    free = min(free_bytes(local_folder(folder)) for folder in folders)
    return f"{', '.join(folders)}, where {format_bytes(free)} are free"


def _say(lines: Sequence[str]) -> None:
    """Log lines by the program's handlers, or print them on stderr if it has none: Python's last
    resort drops messages below a warning."""
    for line in lines:
        if log.hasHandlers():
            log.handle(log.makeRecord(log.name, logging.INFO, __file__, 0, line, (), None))
        else:
            sys.stderr.write(f"{line}\n")
