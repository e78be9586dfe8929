from pathlib import Path
from xml.etree import ElementTree

import pytest

from bench.picture import svg_of
from bench.readme import TABLES, render
from gemini.memtracer.timeline import Timeline, write_timeline
from gemini.placement.tiers import Tier

ROOT = Path(__file__).resolve().parent.parent.parent


def test_the_tables_in_the_readme_are_those_of_the_results():
    text = (ROOT / "README.md").read_text()
    for name in TABLES:
        assert text.count(f"<!-- table {name} -->") == 1
    assert render(text) == text


def test_a_table_that_was_changed_by_hand_is_found():
    text = (ROOT / "README.md").read_text()
    assert render(text.replace("| resident |", "| resident, faster |")) == text


def test_the_picture_is_the_drawing_of_a_timeline_without_its_page(tmp_path):
    kinds = ("parameters", "gradients", "state", "staging", "non-model")
    rows = {(tier, kind): (3, 7) for tier in Tier for kind in kinds}
    timeline = Timeline("a <plan>", (0.0, 1.0, 2.0), ("first", "second"), rows, {Tier.DEVICE: 99})
    write_timeline(timeline, tmp_path / "t.html")
    svg = svg_of((tmp_path / "t.html").read_text())
    root = ElementTree.fromstring(svg)
    assert root.tag.endswith("svg") and "html" not in svg and "<title>" not in svg
    bars = [e for e in root.iter() if e.get("class") == "bar"]
    assert len(bars) == 2 * len(kinds) * len(Tier)
    assert [e for e in root.iter() if e.get("class") == "budget"]
    with pytest.raises(ValueError, match="no drawing"):
        svg_of("<html></html>")


def test_the_committed_picture_is_small_and_a_drawing():
    text = (ROOT / "docs/timeline.svg").read_text()
    assert len(text) < 200_000
    assert ElementTree.fromstring(text).tag.endswith("svg")
