"""What a wrapped module says about its memory: of one parameter, of all, over an iteration."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, replace
from pathlib import Path

from gemini.placement.predict import KINDS, TIERS
from gemini.placement.tiers import Tier
from gemini.placement.timeline import planned_timeline, write_timeline
from gemini.runtime.parts import Parts
from gemini.units import format_bytes


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


def explain(parts: Parts, name: str) -> str:
    """Where a parameter lives, why, and what it costs. Raises ValueError for no such name."""
    for param, spec in enumerate(parts.layout.params):
        if name in spec.names:
            chunk = next(c for p, c in parts.chunk_of.items() if p == param)
            text = f"{name} {spec.shape}\n{parts.planning.plan.explain(chunk)}"
            return "\n".join((text, *parts.planning.overruns.lines()))
    names = [name for spec in parts.layout.params for name in spec.names]
    near = difflib.get_close_matches(name, names, n=3)
    raise ValueError(
        f"no parameter {name!r}" + (f"; did you mean {', '.join(near)}?" if near else "")
    )


def memory_report(parts: Parts) -> MemoryReport:
    """Predicted beside measured; see `MemoryReport`."""
    predicted = parts.planning.planned.profile.peaks()
    measured = parts.manager.ledger.peaks
    train = [t for (kind, _), t in parts.sampler.collector.traces.items() if kind == "train"]
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
        is_pinned = tier is Tier.HOST and parts.backend.pin is not None
        if is_pinned and rows and rows[-1].tier == tier.value:  # all of it: no page is swapped
            rows.append(replace(rows[-1], kind="of it pinned"))
    return MemoryReport(tuple(rows), parts.planning.overruns.lines())


def memory_timeline(parts: Parts, path: str | Path) -> None:
    """Draw the plan of one iteration; see `gemini.placement.timeline.write_timeline`."""
    planning = parts.planning
    write_timeline(
        planned_timeline(planning.plan, planning.planned.profile, planning.inputs.trace), path
    )
