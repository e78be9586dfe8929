"""Timelines: what is drawn is what the plan says."""

import json
import re
import shutil
import subprocess
from dataclasses import replace

import pytest

from gemini.chunk.layout import ChunkLayout, ParamSpec
from gemini.memtracer.trace import sequential_trace
from gemini.placement.planner import PlanInputs, make_plan
from gemini.placement.predict import KINDS
from gemini.placement.sizes import Budgets, StateBytes
from gemini.placement.tiers import Tier
from gemini.placement.timeline import COLOURS, planned_timeline, write_timeline

CHROMIUM = next((p for p in map(shutil.which, ("chromium", "google-chrome")) if p), None)


@pytest.fixture(scope="module")
def timeline():
    specs = [ParamSpec(f"layers.{i}.weight", (1 << 16,), "bfloat16") for i in range(12)]
    inputs = PlanInputs(
        layout=ChunkLayout.build(specs, 1 << 17), trace=sequential_trace(specs, 1 << 20),
        state=StateBytes(12, True), budgets=Budgets(6 << 20, 4 << 20, 1 << 30),
        block_numel=1 << 15,
    )  # fmt: skip
    planned = make_plan(inputs)
    return planned_timeline(planned.plan, planned.profile, inputs.trace)


def test_bars_and_arrows_of_the_page_are_those_of_the_plan(timeline, tmp_path):
    write_timeline(timeline, tmp_path / "t.html")
    page = (tmp_path / "t.html").read_text()
    assert page.count('class="move"') == len(timeline.arrows) > 10
    assert page.count('class="budget"') == 3
    for kind in KINDS:
        drawn = any(any(timeline.rows[tier, kind]) for tier in Tier)
        assert (f'fill="{COLOURS[kind]}"' in page) == drawn
    assert "src=" not in page and "href=" not in page  # works without a network
    heights = {float(h) for h in re.findall(r'class="bar"[^>]* height="([0-9.]+)"', page)}
    assert heights and max(heights) <= 200


def test_many_moments_are_merged_into_columns_that_keep_the_peak(timeline, tmp_path):
    times = 300
    rows = {key: values * times for key, values in timeline.rows.items()}
    count = len(timeline.labels) * times
    long = replace(
        timeline,
        rows=rows,
        labels=timeline.labels * times,
        starts=tuple(map(float, range(count + 1))),
    )
    write_timeline(long, tmp_path / "t.html")
    page = (tmp_path / "t.html").read_text()
    assert page.count('class="bar"') < 15 * 800
    write_timeline(timeline, tmp_path / "short.html")
    peaks = re.findall(r"peak ([^<]+)<", page)
    assert peaks == re.findall(r"peak ([^<]+)<", (tmp_path / "short.html").read_text())


def test_chrome_trace_has_every_moment_and_move(timeline, tmp_path):
    write_timeline(timeline, tmp_path / "t.json")
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    counters = [e for e in events if e["ph"] == "C" and e["name"] == "device"]
    assert [sum(e["args"].values()) for e in counters] == [
        sum(timeline.rows[Tier.DEVICE, kind][i] for kind in KINDS)
        for i in range(len(timeline.labels))
    ]
    moves = [e for e in events if e["ph"] == "X" and e["tid"] != "moments"]
    assert sum(e["args"]["bytes"] for e in moves) == sum(a.nbytes for a in timeline.arrows)


def test_picture_is_a_png(timeline, tmp_path):
    pytest.importorskip("matplotlib")
    write_timeline(timeline, tmp_path / "t.png")
    assert (tmp_path / "t.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    with pytest.raises(ValueError, match=r"expected one of .*html"):
        write_timeline(timeline, tmp_path / "t.gif")


@pytest.mark.ci
@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
def test_browser_draws_the_bars(timeline, tmp_path):
    image = pytest.importorskip("matplotlib.image")
    write_timeline(timeline, tmp_path / "t.html")
    subprocess.run(
        [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
         f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1300,1000",
         f"--screenshot={tmp_path / 't.png'}", (tmp_path / "t.html").as_uri()],
        check=True, capture_output=True,
    )  # fmt: skip
    pixels = (image.imread(tmp_path / "t.png")[..., :3] * 255).round().astype(int)
    for kind in KINDS:
        if any(any(timeline.rows[tier, kind]) for tier in Tier):
            wanted = [int(COLOURS[kind][i : i + 2], 16) for i in (1, 3, 5)]
            assert (abs(pixels - wanted).max(axis=-1) <= 2).sum() > 100, kind
