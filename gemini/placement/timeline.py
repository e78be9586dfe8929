"""The picture of one iteration: bytes on every tier over time, by kind, with moves and budgets.

A `Timeline` is a value, made from a plan or from measurements; `write_timeline` draws it as `.html`
(one file that needs nothing else), `.png`, or `.json` in Chrome's trace format.
"""

from __future__ import annotations

import html
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from gemini.memtracer.trace import Trace
from gemini.units import GIB, KIB, MIB, format_bytes

from .plan import Move, Plan
from .predict import KINDS, TIERS, Profile
from .sizes import UNLIMITED
from .tiers import Tier

COLOURS = {
    "parameters": "#3b6fb6",
    "gradients": "#d9822b",
    "state": "#5a9e5a",
    "originals": "#a8c97f",
    "staging": "#8a6bbf",
    "non-model": "#b8b8b8",
}
_BUDGET_COLOUR = "#c62828"
_MAX_COLUMNS = 800  # moments drawn one by one; more are merged, each column with its largest bytes
_MAX_ARROWS = 400  # the largest moves are drawn


@dataclass(frozen=True, slots=True)
class Arrow:
    """One move, as drawn."""

    label: str
    kind: str
    src: Tier
    dst: Tier
    begin: float  # seconds
    end: float
    nbytes: int


@dataclass(frozen=True, slots=True)
class Timeline:
    """Bytes by tier and kind between `starts[i]` and `starts[i + 1]`."""

    title: str
    starts: tuple[float, ...]  # seconds; one more than there are moments
    labels: tuple[str, ...]  # of moments
    rows: dict[tuple[Tier, str], tuple[int, ...]]  # bytes at every moment
    budgets: dict[Tier, int]  # of tiers that have one
    arrows: tuple[Arrow, ...] = ()

    def __post_init__(self) -> None:
        if len(self.starts) != len(self.labels) + 1:
            raise ValueError(
                f"{len(self.labels)} moments need one more time, not {len(self.starts)}"
            )
        for key, values in self.rows.items():
            if len(values) != len(self.labels):
                raise ValueError(f"row {key} has {len(values)} values, not {len(self.labels)}")

    def peak(self, tier: Tier) -> int:
        columns = zip(*(v for (t, _), v in self.rows.items() if t is tier), strict=True)
        return max((sum(column) for column in columns), default=0)


def planned_timeline(
    plan: Plan, profile: Profile, trace: Trace, seconds: Sequence[float] | None = None
) -> Timeline:
    """The timeline of a plan. `seconds`: of every moment; all the same where None."""
    num_moments = profile.num_moments
    seconds = [1.0] * num_moments if seconds is None else seconds
    starts = [0.0]
    for one in seconds:
        starts.append(starts[-1] + one)
    labels = [str(moment) for moment in trace.moments]
    labels += [f"update of block {block}" for block in plan.forecast.step_order]
    labels += ["update of what is resident", "end of the iteration"]
    return Timeline(
        title=f"plan {plan.digest()}",
        starts=tuple(starts),
        labels=tuple(labels),
        rows=dict(profile.rows),
        budgets={t: plan.budgets.of(t) for t in TIERS if plan.budgets.of(t) < UNLIMITED},
        arrows=tuple(_arrow(move, starts) for move in plan.forecast.moves),
    )


def _arrow(move: Move, starts: Sequence[float]) -> Arrow:
    part = "" if move.block is None else f", block {move.block}"
    label = f"{move.kind.value} of chunk {move.chunk}{part}"
    return Arrow(label, move.kind.value, move.src, move.dst, starts[move.begin], starts[move.end],
                 move.nbytes)  # fmt: skip


def write_timeline(timeline: Timeline, path: str | Path) -> None:
    """Draw to `path`, whose suffix says how. Raises ValueError for another suffix."""
    path = Path(path)
    writers: dict[str, Callable[[Timeline, Path], None]] = {
        ".html": _write_html,
        ".png": _write_png,
        ".json": _write_chrome,
    }
    if path.suffix not in writers:
        raise ValueError(f"{path} ends in {path.suffix!r}; expected one of {sorted(writers)}")
    writers[path.suffix](timeline, path)


def _merged(timeline: Timeline) -> Timeline:
    """At most `_MAX_COLUMNS` columns; each is its moment with the most bytes on the device."""
    count = len(timeline.labels)
    if count <= _MAX_COLUMNS:
        return timeline
    edges = [round(i * count / _MAX_COLUMNS) for i in range(_MAX_COLUMNS + 1)]
    chosen: dict[Tier, list[int]] = {}
    for tier in TIERS:
        totals = [sum(v) for v in zip(*(timeline.rows[tier, kind] for kind in KINDS), strict=True)]
        chosen[tier] = [max(range(a, b), key=lambda i: totals[i]) for a, b in pairwise(edges)]
    return Timeline(
        timeline.title,
        tuple(timeline.starts[edge] for edge in edges),
        tuple(timeline.labels[i] for i in chosen[Tier.DEVICE]),
        {(tier, kind): tuple(timeline.rows[tier, kind][i] for i in chosen[tier])
         for tier in TIERS for kind in KINDS},
        timeline.budgets,
        timeline.arrows,
    )  # fmt: skip


def _largest(arrows: Sequence[Arrow]) -> list[Arrow]:
    largest = sorted(arrows, key=lambda arrow: -arrow.nbytes)[:_MAX_ARROWS]
    return sorted(largest, key=lambda arrow: arrow.begin)


# -- HTML --

_WIDTH, _PANEL, _GAP, _LEFT, _TOP = 1100, 200, 60, 90, 60
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<style>
body {{ font: 13px system-ui, sans-serif; margin: 24px; color: #222; }}
.bar:hover {{ opacity: 0.7; }}
.move {{ stroke: #333; stroke-opacity: 0.45; fill: none; }}
.move:hover {{ stroke: #000; stroke-opacity: 1; stroke-width: 3; }}
.budget {{ stroke: {budget}; stroke-width: 1.5; stroke-dasharray: 6 4; }}
.axis {{ stroke: #888; }} text {{ fill: #222; }}
.key {{ display: inline-block; width: 12px; height: 12px; margin: 0 4px 0 14px; }}
</style></head><body>
<h2>{title}</h2>
<p>{legend}</p>
<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}">
<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="6" markerHeight="6"
 orient="auto"><path d="M0,0 L8,4 L0,8 z" fill="#333"/></marker></defs>
{body}
</svg>
<p>{note}</p>
</body></html>
"""


def _write_html(timeline: Timeline, path: Path) -> None:
    merged = _merged(timeline)
    end = merged.starts[-1] or 1.0
    tiers = [tier for tier in TIERS if merged.peak(tier) or tier in merged.budgets]
    top = {tier: _TOP + i * (_PANEL + _GAP) for i, tier in enumerate(tiers)}
    parts: list[str] = []
    for tier in tiers:
        parts += _panel(merged, tier, top[tier], end)
    drawn = _largest([a for a in merged.arrows if a.src in top and a.dst in top])
    for arrow in drawn:
        parts.append(_arrow_path(arrow, top, end))
    legend = "".join(
        f'<span class="key" style="background:{colour}"></span>{kind}'
        for kind, colour in COLOURS.items()
    )
    hidden = len(timeline.arrows) - len(drawn)
    note = f"{len(drawn)} moves are drawn" + (f", {hidden} smaller ones are not" if hidden else "")
    path.write_text(
        _PAGE.format(
            title=html.escape(timeline.title), budget=_BUDGET_COLOUR, legend=legend,
            width=_LEFT + _WIDTH + 40, height=_TOP + len(tiers) * (_PANEL + _GAP),
            body="\n".join(parts), note=note,
        )
    )  # fmt: skip


def _panel(timeline: Timeline, tier: Tier, top: int, end: float) -> list[str]:
    """Stacked bars of one tier; neighbours with the same bytes are one bar."""
    budget = timeline.budgets.get(tier)
    scale = _PANEL / (max(timeline.peak(tier), budget or 0) * 1.05 or 1)
    bottom = top + _PANEL
    parts = [
        f'<text x="{_LEFT}" y="{top - 8}" font-weight="bold">{tier.value}: peak '
        f"{format_bytes(timeline.peak(tier))}</text>",
        f'<line class="axis" x1="{_LEFT}" y1="{bottom}" x2="{_LEFT + _WIDTH}" y2="{bottom}"/>',
    ]
    base = [0] * len(timeline.labels)
    for kind in KINDS:
        values = timeline.rows[tier, kind]
        first = 0
        for i in range(1, len(values) + 1):
            if i < len(values) and (values[i], base[i]) == (values[first], base[first]):
                continue
            if values[first]:
                x = _LEFT + timeline.starts[first] / end * _WIDTH
                width = (timeline.starts[i] - timeline.starts[first]) / end * _WIDTH
                y = bottom - (base[first] + values[first]) * scale
                label = html.escape(f"{kind} {format_bytes(values[first])}, "
                                    f"{timeline.labels[first]}")  # fmt: skip
                parts.append(
                    f'<rect class="bar" x="{x:.2f}" y="{y:.2f}" width="{max(width, 0.5):.2f}" '
                    f'height="{values[first] * scale:.2f}" fill="{COLOURS[kind]}">'
                    f"<title>{label}</title></rect>"
                )
            first = i
        base = [b + v for b, v in zip(base, values, strict=True)]
    if budget is not None:
        y = bottom - budget * scale
        parts.append(
            f'<line class="budget" x1="{_LEFT}" y1="{y:.2f}" x2="{_LEFT + _WIDTH}" y2="{y:.2f}"/>'
            f'<text x="4" y="{y + 4:.2f}">{format_bytes(budget)}</text>'
        )
    return parts


def _arrow_path(arrow: Arrow, top: dict[Tier, int], end: float) -> str:
    """From the middle of one panel to the middle of the other."""
    x1, x2 = (_LEFT + seconds / end * _WIDTH for seconds in (arrow.begin, arrow.end))
    y1, y2 = (top[tier] + _PANEL / 2 for tier in (arrow.src, arrow.dst))
    label = html.escape(
        f"{arrow.label}: {format_bytes(arrow.nbytes)}, {arrow.src.value} to {arrow.dst.value}"
    )
    return (
        f'<path class="move" d="M{x1:.2f},{y1:.2f} L{x2:.2f},{y2:.2f}" marker-end="url(#tip)">'
        f"<title>{label}</title></path>"
    )


# -- PNG --


def _write_png(timeline: Timeline, path: Path) -> None:
    """Needs matplotlib, which is imported here only."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import ConnectionPatch

    merged = _merged(timeline)
    tiers = [tier for tier in TIERS if merged.peak(tier) or tier in merged.budgets]
    figure, panels = pyplot.subplots(
        len(tiers), 1, sharex=True, squeeze=False, figsize=(11, 2.6 * len(tiers))
    )
    axes = dict(zip(tiers, panels[:, 0], strict=True))
    largest = max((merged.peak(tier) for tier in tiers), default=0)
    unit, name = next(((u, n) for u, n in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB"))
                       if largest >= u), (1, "bytes"))  # fmt: skip
    for tier, panel in axes.items():
        rows: list[Any] = [[v / unit for v in (*merged.rows[tier, kind], 0)] for kind in KINDS]
        panel.stackplot(
            merged.starts, rows, step="post", labels=KINDS, colors=[COLOURS[k] for k in KINDS]
        )
        if tier in merged.budgets:
            panel.axhline(merged.budgets[tier] / unit, color=_BUDGET_COLOUR, linestyle="--")
        panel.set(title=tier.value, ylabel=name)
    for arrow in _largest([a for a in merged.arrows if a.src in axes and a.dst in axes]):
        figure.add_artist(
            ConnectionPatch(
                (arrow.begin, 0.5),
                (arrow.end, 0.5),
                axes[arrow.src].get_xaxis_transform(),
                axes[arrow.dst].get_xaxis_transform(),
                axesA=axes[arrow.src],
                axesB=axes[arrow.dst],
                arrowstyle="->", alpha=0.3,
            )
        )  # fmt: skip
    panels[0, 0].legend(loc="upper right", fontsize="small")
    panels[-1, 0].set_xlabel("seconds")
    figure.suptitle(timeline.title)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


# -- Chrome trace format --


def _write_chrome(timeline: Timeline, path: Path) -> None:
    """Counters a tier, one row of moves a link. Times are in microseconds."""
    events: list[dict[str, Any]] = []
    for i, start in enumerate(timeline.starts[:-1]):
        for tier in TIERS:
            values = {kind: timeline.rows[tier, kind][i] for kind in KINDS}
            events.append(
                {"name": tier.value, "ph": "C", "pid": 0, "ts": start * 1e6, "args": values}
            )
        events.append(
            {"name": timeline.labels[i], "ph": "X", "pid": 0, "tid": "moments", "ts": start * 1e6,
             "dur": (timeline.starts[i + 1] - start) * 1e6}
        )  # fmt: skip
    for arrow in timeline.arrows:
        events.append(
            {"name": arrow.label, "ph": "X", "pid": 0, "cat": arrow.kind,
             "tid": f"{arrow.src.value} to {arrow.dst.value}", "ts": arrow.begin * 1e6,
             "dur": (arrow.end - arrow.begin) * 1e6, "args": {"bytes": arrow.nbytes}}
        )  # fmt: skip
    budgets = {tier.value: nbytes for tier, nbytes in timeline.budgets.items()}
    path.write_text(json.dumps({"traceEvents": events, "otherData": {"budgets": budgets}}))
