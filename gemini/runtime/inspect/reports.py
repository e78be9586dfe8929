"""What a wrapped module says about its memory: of one parameter, of all, over an iteration."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from gemini.placement.predict import KINDS, TIERS
from gemini.placement.tiers import Tier
from gemini.placement.timeline import planned_timeline, write_timeline
from gemini.units import format_bytes

if TYPE_CHECKING:
    from gemini.runtime.engine import Engine


@dataclass(frozen=True, slots=True)
class MemoryRow:
    """Bytes of one kind on one tier. `measured` is None where nothing was measured yet."""

    tier: str
    kind: str
    predicted_bytes: int
    measured_bytes: int | None


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """A table: every tier when it holds most, predicted beside measured in a sampled iteration.

    overruns: budgets that were passed, and measured iterations that fit nowhere, in words.
    """

    rows: tuple[MemoryRow, ...]
    overruns: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [f"{'tier':<8} {'kind':<12} {'predicted':>12} {'measured':>12}"]
        for row in self.rows:
            measured = "-" if row.measured_bytes is None else format_bytes(row.measured_bytes)
            lines.append(
                f"{row.tier:<8} {row.kind:<12} {format_bytes(row.predicted_bytes):>12} "
                f"{measured:>12}"
            )
        return "\n".join((*lines, *self.overruns))


def explain(engine: Engine, name: str) -> str:
    """Where a parameter lives, why, and what it costs. Raises ValueError for no such name."""
    for param, spec in enumerate(engine.layout.params):
        if name in spec.names:
            chunk = next(c for p, c in engine.chunk_of.items() if p == param)
            text = f"{name} {spec.shape}\n{engine.planning.plan.explain(chunk)}"
            return "\n".join((text, *engine.planning.overruns.lines()))
    names = [name for spec in engine.layout.params for name in spec.names]
    near = difflib.get_close_matches(name, names, n=3)
    raise ValueError(
        f"no parameter {name!r}" + (f"; did you mean {', '.join(near)}?" if near else "")
    )


def memory_report(engine: Engine) -> MemoryReport:
    """Predicted beside measured; see `MemoryReport`."""
    predicted = engine.planning.planned.profile.peaks()
    measured = engine.manager.ledger.peaks
    train = [t for (kind, _), t in engine.sampler.collector.traces.items() if kind == "train"]
    rows = []
    for tier in TIERS:
        found = dict(measured.get(tier, {}))
        if tier is Tier.DEVICE and train:
            found["non-model"] = train[-1].peak_non_model_bytes
        wanted = predicted[tier.value]
        for kind in KINDS:
            if wanted[kind] or found.get(kind):
                rows.append(MemoryRow(tier.value, kind, wanted[kind],
                                      found.get(kind, 0) if measured else None))  # fmt: skip
        if wanted["total"] or found:
            rows.append(MemoryRow(tier.value, "total", wanted["total"],
                                  sum(found.values()) if measured else None))  # fmt: skip
        is_pinned = tier is Tier.HOST and engine.backend.pin is not None
        if is_pinned and rows and rows[-1].tier == tier.value:  # all of it: no page is swapped
            rows.append(replace(rows[-1], kind="of it pinned"))
    return MemoryReport(tuple(rows), engine.planning.overruns.lines())


def memory_timeline(engine: Engine, path: str | Path) -> None:
    """Draw the plan of one iteration; see `gemini.placement.timeline.write_timeline`."""
    planning = engine.planning
    write_timeline(
        planned_timeline(planning.plan, planning.planned.profile, planning.inputs.trace), path
    )
