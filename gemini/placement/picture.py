"""Draws a `Timeline` by matplotlib, which is imported here only, when something is drawn."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gemini.units import GIB, KIB, MIB, format_bytes

from .predict import KINDS, TIERS
from .tiers import Tier
from .timeline import Span, Timeline, write_trace

COLOURS = {
    "parameters": "#3b6fb6",
    "gradients": "#d9822b",
    "state": "#5a9e5a",
    "originals": "#a8c97f",
    "average": "#4fa8a0",
    "staging": "#8a6bbf",
    "non-model": "#b8b8b8",
}
_LABELS = {"non-model": "non-model: activations and workspaces", "staging": "staging buffers"}
_LINKS = {"host_to_device": "RAM to device", "device_to_host": "device to RAM", "nvme": "disk",
          "collective": "between ranks"}  # fmt: skip
_BUDGET_COLOUR = "#c62828"
_NOTE = (
    'Predicted, under update="serial". Non-model in the step: what the end of backward needed '
    "stays reserved."
)
_SUFFIXES = (".json", ".pdf", ".png", ".svg")
_UNTIMED = "moments, all equally wide: nothing was timed yet"
_COLUMNS = 400  # of time; each has its moment with the most bytes
_LARGEST, _LEAST, _STRIP = 2.6, 1.1, 0.3  # inches: of panels, and of what does not change
_NARROW = 0.09  # of the width: without a name
_SHORT = 0.3  # of an iteration: a pass that is drawn apart from its step
_LINE = 98  # characters of the title
_MOST_BUDGET = 3  # times what is used: a budget above it is said, and not drawn
_DARK = "@media (prefers-color-scheme: dark) { :root { filter: invert(.9) hue-rotate(180deg) } }"


def write_timeline(timeline: Timeline, path: str | Path) -> None:
    """Draw to `path`, whose suffix says how. Raises ValueError for another suffix, ImportError
    without matplotlib, which `.json` does not need."""
    path = Path(path)
    if path.suffix not in _SUFFIXES:
        raise ValueError(f"{path} ends in {path.suffix!r}; expected one of {list(_SUFFIXES)}")
    if path.suffix == ".json":
        write_trace(timeline, path)
        return
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError(
            f"drawing {path.name} needs matplotlib: pip install matplotlib; a .json, for Perfetto, "
            "needs nothing"
        ) from error
    undated: dict[str, Any] = {"metadata": {"Date": None}} if path.suffix == ".svg" else {}
    options: Any = {
        "svg.fonttype": "none", "font.sans-serif": ["DejaVu Sans", "Verdana", "sans-serif"],
        "svg.hashsalt": timeline.title,
    }  # fmt: skip
    with matplotlib.rc_context(options):
        draw(timeline).savefig(path, dpi=110, **undated)
    if path.suffix == ".svg":
        path.write_text(dark_too(path.read_text(encoding="utf-8")), encoding="utf-8")


def dark_too(svg: str) -> str:
    """Drawing of matplotlib that is dark where the reader's screen is, by itself as in a page."""
    return svg.replace("</style>", f"{_DARK}</style>", 1)


def draw(timeline: Timeline) -> Any:
    """A `matplotlib.figure.Figure`: phases, a panel a tier, a band a link."""
    from matplotlib.figure import Figure

    totals = {tier: timeline.total(tier) for tier in TIERS}
    tiers = [tier for tier in TIERS if max(totals[tier])]
    still = [tier for tier in tiers if _is_still(totals[tier])]
    moving = [tier for tier in tiers if tier not in still]
    tops = {tier: _top(timeline, tier, max(totals[tier])) for tier in moving}
    inches = {t: max(_LEAST, _LARGEST * tops[t] / max(tops.values())) for t in moving}
    heights = [_STRIP, *inches.values(), *[_STRIP] * (len(still) + len(timeline.busy))]
    figure = Figure(figsize=(8.6, sum(heights) * 1.2 + 2.1), layout="constrained")
    windows = _windows(timeline)
    grid = figure.add_gridspec(len(heights), len(windows), height_ratios=heights)

    def row(number: int) -> list[Any]:
        made: list[Any] = []
        for column, (begin, end) in enumerate(windows):
            made.append(figure.add_subplot(grid[number, column], sharey=made[0] if made else None))
            made[-1].set_xlim(begin, end)
            made[-1].tick_params(labelbottom=number == last, labelleft=not column)
            if number == last:
                made[-1].set_xlabel("seconds" if timeline.is_timed else _UNTIMED)
        return made

    last = len(heights) - 1 if timeline.busy or not still else len(moving)
    for panel, window in zip(head := row(0), windows, strict=True):
        _draw_phases(panel, timeline, window)
    head[0].set_title(_whole(timeline, len(windows)), loc="left", fontsize=9)
    is_alike = len({tops[tier] / inches[tier] for tier in moving}) <= 1
    for number, tier in enumerate(moving, 1):
        for panel, window in zip(panels := row(number), windows, strict=True):
            _draw_tier(panel, timeline, tier, tops[tier], window)
        alike = "" if is_alike else ", scale of its own"
        panels[0].set_title(f"{_held(timeline, tier)}{alike}", loc="left", fontsize=9)
    for number, tier in enumerate(still, 1 + len(moving)):
        _draw_still(figure.add_subplot(grid[number, :]), timeline, tier)
    for number, (link, spans) in enumerate(timeline.busy.items(), 1 + len(tiers)):
        for panel, window in zip(panels := row(number), windows, strict=True):
            _draw_link(panel, spans, window)
        seconds = sum(end - begin for begin, end in spans)
        share = f"{seconds / timeline.starts[-1]:.0%} of the iteration"
        panels[0].set_title(
            f"{_LINKS[link]}: busy for {seconds:.3g} s, {share}", loc="left", fontsize=9
        )
    drawn = [k for k in KINDS if any(any(timeline.rows[t, k]) for t in tiers)]
    figure.legend(
        handles=[_patch(kind) for kind in drawn], loc="outside lower center", ncols=3,
        fontsize=9, frameon=False, title=_NOTE if timeline.is_timed else None, title_fontsize=8,
    )  # fmt: skip
    lines = [timeline.title, *timeline.verdict.splitlines()]
    wrapped = "\n".join(textwrap.fill(line, _LINE) for line in lines if line)
    figure.suptitle(wrapped, fontsize=11, x=0.01, ha="left")
    return figure


def _windows(timeline: Timeline) -> list[Span]:
    """Windows of time with one scale each: all, or the pass apart from a step that is far
    longer."""
    end = timeline.starts[-1] or 1.0
    step = next((begin for name, begin, _ in timeline.spans() if name == "step"), end)
    return [(0.0, end)] if not 0 < step < _SHORT * end else [(0.0, step), (step, end)]


def _whole(timeline: Timeline, num_windows: int) -> str:
    if not timeline.is_timed:
        return "an iteration"
    told = ", ".join(f"{name} {end - begin:.3g} s" for name, begin, end in timeline.spans())
    scales = "" if num_windows == 1 else "; left and right have scales of their own"
    return f"an iteration of {timeline.starts[-1]:.3g} s: {told}{scales}"


def _is_still(total: Sequence[int]) -> bool:
    """Whether a row changes too little to be drawn over time."""
    return max(total) - min(total) <= 0.01 * max(total)


def _top(timeline: Timeline, tier: Tier, peak: int) -> float:
    budget = timeline.budgets.get(tier, 0)
    return 1.12 * max(peak, budget if budget <= _MOST_BUDGET * peak else 0)


def _columns(starts: Sequence[float], edges: Any) -> list[tuple[int, int]]:
    """First moment of every column, and the one after its last."""
    at = np.asarray(starts)
    last = len(starts) - 1
    first = np.clip(np.searchsorted(at, edges[:-1], "right") - 1, 0, last - 1)
    end = np.clip(np.searchsorted(at, edges[1:], "left"), first + 1, last)
    return list(zip(first.tolist(), end.tolist(), strict=True))


def _unit(nbytes: float) -> tuple[int, str]:
    units = ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB"))
    return next(((u, n) for u, n in units if nbytes >= u), (1, "bytes"))


def _held(timeline: Timeline, tier: Tier) -> str:
    peak, budget = max(timeline.total(tier)), timeline.budgets.get(tier)
    limit = "" if budget is None else f", budget {format_bytes(budget)}"
    return f"{tier.value}: at most {format_bytes(peak)}{limit}"


def _draw_phases(panel: Any, timeline: Timeline, window: Span) -> None:
    for i, (name, begin, end) in enumerate(timeline.spans()):
        begin, end = max(begin, window[0]), min(end, window[1])
        if begin < end:
            panel.axvspan(begin, end, color="#e3e8ef" if i % 2 else "#cfd8e3", linewidth=0)
        if (end - begin) / (window[1] - window[0]) > _NARROW:
            panel.text((begin + end) / 2, 0.45, name, ha="center", va="center", fontsize=10)
    panel.set(yticks=[], ylim=(0, 1))


def _draw_tier(panel: Any, timeline: Timeline, tier: Tier, top: float, window: Span) -> None:
    unit, name = _unit(top)
    edges = np.linspace(*window, _COLUMNS + 1)
    total = np.asarray(timeline.total(tier))
    most = [
        first + int(total[first:end].argmax()) for first, end in _columns(timeline.starts, edges)
    ]
    rows = np.array([np.asarray(timeline.rows[tier, kind])[[*most, most[-1]]] for kind in KINDS])
    is_new = np.r_[True, (np.diff(rows, axis=1) != 0).any(axis=0)]
    is_new[-1] = True  # the edge on the right
    above = np.cumsum(rows[:, is_new], axis=0) / unit
    for i, kind in enumerate(KINDS):
        if rows[i].any():
            below = above[i - 1] if i else 0
            panel.fill_between(
                edges[is_new], below, above[i], step="post", color=COLOURS[kind], linewidth=0
            )
    for _, begin, _ in timeline.spans()[1:]:
        if window[0] < begin < window[1]:
            panel.axvline(begin, color="#555", linewidth=0.6)
    budget = timeline.budgets.get(tier)
    if budget is not None and budget <= top:
        panel.axhline(budget / unit, color=_BUDGET_COLOUR, linestyle="--", linewidth=1.3)
    panel.set_ylim(0, top / unit)
    if panel.get_subplotspec().is_first_col():
        panel.set_ylabel(name)


def _draw_still(panel: Any, timeline: Timeline, tier: Tier) -> None:
    """Draw constant rows as one bar, without an axis of time."""
    peak, begin, parts = max(timeline.total(tier)), 0.0, []
    for kind in KINDS:
        share = max(timeline.rows[tier, kind]) / peak
        if share:
            panel.barh(0, share, left=begin, color=COLOURS[kind])
            begin += share
        if share > 0.001:
            parts.append(f"{kind} {format_bytes(max(timeline.rows[tier, kind]))}")
    panel.set(xlim=(0, begin), xticks=[], yticks=[])
    panel.set_title(
        f"{_held(timeline, tier)}, the same all the time: {', '.join(parts)}", loc="left",
        fontsize=9,
    )  # fmt: skip


def _draw_link(panel: Any, spans: Sequence[Span], window: Span) -> None:
    """Draw the share of each column in which a link is busy."""
    edges = np.linspace(*window, _COLUMNS + 1)
    times = np.asarray(spans)
    ends = np.cumsum(times[:, 1] - times[:, 0])
    so_far = np.stack([np.r_[0, ends[:-1]], ends], axis=1).reshape(-1)
    share = np.diff(np.interp(edges, times.reshape(-1), so_far)) / np.diff(edges)
    panel.stairs(share.round(2), edges, fill=True, color="#37474f")
    panel.set(ylim=(0, 1), yticks=[0, 1], yticklabels=["0", "100 %"])


def _patch(kind: str) -> Any:
    from matplotlib.patches import Patch

    return Patch(color=COLOURS[kind], label=_LABELS.get(kind, kind))
