"""Picture of one iteration as a value: bytes on every tier over seconds, and busy links. Pure.

`picture.draw` draws it; `write_trace` writes it in Chrome's trace format.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise, starmap
from pathlib import Path
from typing import Any

from gemini.placement.timetable.clock import StepClock, Work
from gemini.placement.timetable.updates import SERIAL

from .cost import LINKS
from .plan import Move
from .predict import TIERS
from .problem import PlanInputs
from .result import PlanResult
from .sizes import UNLIMITED, Budgets
from .tiers import Tier

Span = tuple[float, float]


@dataclass(frozen=True, slots=True)
class TimedMove:
    """Move of a plan with its predicted seconds."""

    move: Move
    begin: float  # seconds
    end: float

    def __str__(self) -> str:
        if self.move.chunk is None:
            return self.move.kind.value
        part = "" if self.move.block is None else f", block {self.move.block}"
        return f"{self.move.kind.value} of chunk {self.move.chunk}{part}"


@dataclass(frozen=True, slots=True)
class Timeline:
    """Bytes by tier and kind between `starts[i]` and `starts[i + 1]`.

    title, verdict: what is trained, and whether it fits.
    phases: name, and the moment with which it begins.
    busy: of a link that carries anything, when it does, in order.
    is_timed: `starts` are seconds; else nothing is known of them nor of links, and all moments are
    equally long.
    """

    title: str
    verdict: str
    starts: tuple[float, ...]  # one more than there are moments
    labels: tuple[str, ...]  # of moments
    phases: tuple[tuple[str, int], ...]
    rows: dict[tuple[Tier, str], tuple[int, ...]]  # bytes at every moment
    budgets: dict[Tier, int]  # of tiers that have one
    busy: dict[str, tuple[Span, ...]]
    transfers: tuple[TimedMove, ...] = ()
    is_timed: bool = True

    def __post_init__(self) -> None:
        if len(self.starts) != len(self.labels) + 1:
            raise ValueError(
                f"{len(self.labels)} moments need one more time, not {len(self.starts)}"
            )
        for key, values in self.rows.items():
            if len(values) != len(self.labels):
                raise ValueError(f"row {key} has {len(values)} values, not {len(self.labels)}")

    def total(self, tier: Tier) -> list[int]:
        """Bytes on one tier at every moment."""
        return list(
            map(sum, zip(*(v for (t, _), v in self.rows.items() if t is tier), strict=True))
        )

    def spans(self) -> tuple[tuple[str, float, float], ...]:
        """Phases with the seconds at which they begin and end."""
        edges = [*(self.starts[moment] for _, moment in self.phases), self.starts[-1]]
        named = zip(self.phases, pairwise(edges), strict=True)
        return tuple((name, begin, end) for (name, _), (begin, end) in named)


def planned_timeline(
    result: PlanResult,
    inputs: PlanInputs,
    *,
    title: str,
    verdict: str = "",
    budgets: Budgets | None = None,
    pass_seconds: Mapping[str, float] | None = None,
) -> Timeline:
    """Timeline of a plan, as predicted under `update="serial"`.

    budgets: as asked for, where the plan was made with others.
    pass_seconds: of forward and of backward, where the trace of the plan was not timed.
    """
    plan, profile, trace = result.plan, result.profile, inputs.trace
    compute = inputs.compute_seconds()
    if not any(compute):
        compute = _spread(inputs, pass_seconds or {})
    clock = StepClock(Work(plan, inputs, compute), SERIAL, notes=True)
    clock.run()
    updates = [second for second, _ in clock.updates]
    starts = [*clock.moments, *updates, clock.updated, clock.seconds]
    is_timed = sum(compute) > 0
    if not is_timed:
        starts = [float(i) for i in range(len(starts))]
    labels = [str(moment) for moment in trace.moments]
    for _, block in clock.updates:
        labels.append(f"update of {'what is resident' if block is None else f'block {block}'}")
    labels.append("end of the iteration")
    phases = [("forward", 0)]
    if inputs.backward < len(trace.moments):
        phases += [("backward", inputs.backward), ("step", plan.num_trace_moments)]
    spans = clock.links.spans
    given = plan.budgets if budgets is None else budgets
    return Timeline(
        title=title,
        verdict=verdict,
        starts=tuple(starts),
        labels=tuple(labels),
        phases=tuple(phases),
        rows={
            key: (*values[:-2], *[values[-2]] * len(updates), values[-1])
            for key, values in profile.rows.items()
        },
        budgets={t: given.of(t) for t in TIERS if given.of(t) < UNLIMITED},
        busy={link: tuple(spans[link]) for link in LINKS if spans[link] and is_timed},
        transfers=tuple(starmap(TimedMove, clock.links.sent)) if is_timed else (),
        is_timed=is_timed,
    )


def _spread(inputs: PlanInputs, seconds: Mapping[str, float]) -> list[float]:
    """Seconds of every moment, from the seconds of its phase."""
    weights, phases = inputs.compute_weights(), [m.phase for m in inputs.trace.moments]
    whole = Counter[str]()
    for phase, weight in zip(phases, weights, strict=True):
        whole[phase] += weight
    return [
        seconds.get(phase, 0.0) * weight / (whole[phase] or 1)
        for phase, weight in zip(phases, weights, strict=True)
    ]


def write_trace(timeline: Timeline, path: Path) -> None:
    """Counters a tier, one row of moves a link. Times are in microseconds."""
    kinds = dict.fromkeys(kind for _, kind in timeline.rows)
    events: list[dict[str, Any]] = []
    for i, start in enumerate(timeline.starts[:-1]):
        for tier in TIERS:
            values = {kind: timeline.rows[tier, kind][i] for kind in kinds}
            events.append(
                {"name": tier.value, "ph": "C", "pid": 0, "ts": start * 1e6, "args": values}
            )
        events.append(
            {"name": timeline.labels[i], "ph": "X", "pid": 0, "tid": "moments", "ts": start * 1e6,
             "dur": (timeline.starts[i + 1] - start) * 1e6}
        )  # fmt: skip
    for one in timeline.transfers:
        events.append(
            {"name": str(one), "ph": "X", "pid": 0, "cat": one.move.kind.value,
             "tid": f"{one.move.src.value} to {one.move.dst.value}", "ts": one.begin * 1e6,
             "dur": (one.end - one.begin) * 1e6, "args": {"bytes": one.move.nbytes}}
        )  # fmt: skip
    told = {tier.value: nbytes for tier, nbytes in timeline.budgets.items()}
    path.write_text(
        json.dumps({"traceEvents": events, "otherData": {"budgets": told}}), encoding="utf-8"
    )
