"""Timelines: what is drawn is what the plan says."""

import json
import sys
from dataclasses import replace

import pytest

from gemini.chunk.layout import ChunkLayout, ParamSpec
from gemini.memtracer.trace import sequential_trace
from gemini.placement.picture import COLOURS, draw, write_timeline
from gemini.placement.planner import PlanInputs, make_plan
from gemini.placement.predict import KINDS
from gemini.placement.sizes import Bandwidths, Budgets, StateBytes
from gemini.placement.tiers import Tier
from gemini.placement.timeline import planned_timeline

LINKS = Bandwidths(2e9, 2e9, 1e9, 5e8, device_memory=1e11, flops=1e12)
ASKED = Budgets(5 << 20, 4 << 20, 1 << 30)


@pytest.fixture(scope="module")
def inputs():
    specs = [ParamSpec(f"layers.{i}.weight", (1 << 16,), "bfloat16") for i in range(12)]
    return PlanInputs(
        layout=ChunkLayout.build(specs, 1 << 17), trace=sequential_trace(specs, 1 << 20),
        state=StateBytes(12, True), budgets=Budgets(6 << 20, 4 << 20, 1 << 30),
        block_numel=1 << 15, bandwidths=LINKS, flops=6e9,
    )  # fmt: skip


@pytest.fixture(scope="module")
def planned(inputs):
    return make_plan(inputs)


@pytest.fixture
def timeline(planned, inputs):
    return planned_timeline(
        planned, inputs, title="twelve layers, batch 4", verdict="it does not fit", budgets=ASKED
    )


def of(figure, title):
    """The axes under a title that begins so, and those of the same row, in order."""
    (number,) = {
        axes.get_subplotspec().rowspan.start
        for axes in figure.axes
        if axes.get_title("left").startswith(title)
    }
    return [a for a in figure.axes if a.get_subplotspec().rowspan.start == number]


def test_seconds_and_busy_links_are_those_of_the_predicted_cost(planned, timeline):
    assert timeline.starts[-1] == pytest.approx(planned.cost.seconds)
    busy = {link: sum(end - begin for begin, end in s) for link, s in timeline.busy.items()}
    assert busy == pytest.approx({k: planned.cost.busy[k] for k in busy}) and busy["nvme"] > 0
    names, begins, ends = zip(*timeline.spans(), strict=True)
    assert names == ("forward", "backward", "step") and begins[0] == 0
    assert begins[1:] == ends[:-1] and ends[-1] == timeline.starts[-1]
    assert ends[1] - begins[0] > 0.999 * 6e-3  # 6e9 operations at 1e12 a second


def test_a_panel_has_the_bytes_of_its_tier_and_the_budget_that_was_asked_for(timeline):
    pytest.importorskip("matplotlib")
    figure = draw(timeline)
    said = figure.get_suptitle()
    assert said == "twelve layers, batch 4\nit does not fit"
    for axes in of(figure, "device: at most "):
        (budget,) = [line for line in axes.lines if line.get_linestyle() == "--"]
        assert set(budget.get_ydata()) == {5.0}
    highest = max(
        path.vertices[:, 1].max()
        for axes in of(figure, "device: at most ")
        for one in axes.collections
        for path in one.get_paths()
    )
    assert highest == pytest.approx(max(timeline.total(Tier.DEVICE)) / 2**20)
    (still,) = of(figure, "nvme: at most ")
    assert "the same all the time: state " in still.get_title("left")
    drawn = {text.get_text().partition(":")[0] for text in figure.legends[0].get_texts()}
    there = {k for k in KINDS if any(any(timeline.rows[t, k]) for t in Tier)}
    assert drawn == {"staging buffers" if k == "staging" else k for k in there} <= {
        "staging buffers", *COLOURS,
    }  # fmt: skip


def test_a_step_that_is_far_longer_has_a_scale_of_seconds_of_its_own(timeline):
    pytest.importorskip("matplotlib")
    _, (_, _, end), _ = timeline.spans()
    last = len(timeline.starts) - 1
    starts = [s if s <= end else end + i * end for i, s in enumerate(timeline.starts)]
    long = replace(timeline, starts=tuple(starts), busy={"nvme": ((end, starts[last]),)})
    windows = [axes.get_xlim() for axes in of(draw(long), "disk: busy for ")]
    assert windows == [(0.0, end), (end, starts[last])]
    short = replace(timeline, starts=tuple(min(s, 1.5 * end) for s in timeline.starts), busy={})
    assert len(of(draw(short), "an iteration of ")) == 1
    assert "device" in draw(short).axes[1].get_title("left")


def test_a_band_is_the_share_of_time_in_which_its_link_is_busy(timeline):
    pytest.importorskip("matplotlib")
    end = timeline.starts[-1]
    half = tuple((i * end / 1000, (i + 0.5) * end / 1000) for i in range(500))
    figure = draw(replace(timeline, busy={"collective": half}))
    (title,) = {t for axes in of(figure, "between ranks: ") if (t := axes.get_title("left")) != ""}
    assert title.endswith("25% of the iteration")
    shares = [axes.patches[0].get_data() for axes in of(figure, "between ranks: ")]
    whole = sum((s.values * (s.edges[1:] - s.edges[:-1])).sum() for s in shares)
    assert whole == pytest.approx(end / 4, rel=0.05)  # columns are rounded to hundredths


def test_many_moments_become_columns_that_keep_the_peak(timeline):
    pytest.importorskip("matplotlib")
    times = 300
    rows = {key: values * times for key, values in timeline.rows.items()}
    count = len(timeline.labels) * times
    spike = [0] * count
    spike[count // 2 + 3] = 9 << 20  # the fourth of its column
    rows[Tier.DEVICE, "originals"] = tuple(spike)
    long = replace(
        timeline, rows=rows, labels=timeline.labels * times, phases=(("forward", 0),),
        starts=tuple(map(float, range(count + 1))), busy={},
    )  # fmt: skip
    areas = [one for axes in of(draw(long), "device: ") for one in axes.collections]
    assert max(len(path.vertices) for one in areas for path in one.get_paths()) < 2000
    tops = [path.vertices[:, 1].max() for one in areas for path in one.get_paths()]
    assert max(tops) == pytest.approx(max(long.total(Tier.DEVICE)) / 2**20) and max(tops) > 9


def test_without_speeds_moments_are_equally_wide_and_said_to_be(inputs):
    pytest.importorskip("matplotlib")
    bare = replace(inputs, bandwidths=Bandwidths(), flops=0.0)
    timeline = planned_timeline(make_plan(bare), bare, title="x")
    assert not timeline.is_timed and timeline.starts[:3] == (0.0, 1.0, 2.0)
    seconds = {"forward": 2.0, "backward": 3.0}
    timed = planned_timeline(make_plan(bare), bare, title="x", pass_seconds=seconds)
    assert [end - begin for _, begin, end in timed.spans()][:2] == pytest.approx([2.0, 3.0])
    labels = [axes.get_xlabel() for axes in draw(timeline).axes]
    assert any("nothing was timed yet" in label for label in labels)


def test_chrome_trace_has_every_moment_and_move(timeline, tmp_path):
    write_timeline(timeline, tmp_path / "t.json")
    events = json.loads((tmp_path / "t.json").read_text(encoding="utf-8"))["traceEvents"]
    counters = [e for e in events if e["ph"] == "C" and e["name"] == "device"]
    assert [sum(e["args"].values()) for e in counters] == timeline.total(Tier.DEVICE)
    moves = [e for e in events if e["ph"] == "X" and e["tid"] != "moments"]
    assert sum(e["args"]["bytes"] for e in moves) == sum(t.move.nbytes for t in timeline.transfers)
    assert max(e["ts"] + e["dur"] for e in moves) <= timeline.starts[-1] * 1e6 * (1 + 1e-9)


def test_the_suffix_says_how_it_is_written(timeline, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    write_timeline(timeline, tmp_path / "t.png")
    assert (tmp_path / "t.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    write_timeline(timeline, tmp_path / "t.svg")
    drawn = (tmp_path / "t.svg").read_text(encoding="utf-8")
    assert ">twelve layers, batch 4<" in drawn and "prefers-color-scheme: dark" in drawn
    with pytest.raises(ValueError, match=r"expected one of .*svg"):
        write_timeline(timeline, tmp_path / "t.html")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        write_timeline(timeline, tmp_path / "t.svg")
