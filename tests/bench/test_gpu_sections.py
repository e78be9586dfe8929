"""`bench.gpu` on a machine without a GPU: every section runs, in its own process, in its time."""

import json
import sys

import pytest

from bench import gpu


@pytest.mark.deep  # minutes, and every section has a limit in seconds
@pytest.mark.timeout(900)
def test_every_section_runs_dry(tmp_path):
    chosen = gpu.sections(tmp_path, dry=True)
    summary = gpu.run_all(chosen, tmp_path, minutes=15, dry=True)
    for section in chosen:
        said = (tmp_path / f"{section.name}.log").read_text()[-2000:]
        assert summary[section.name]["ended"] == 0, (section.name, summary, said)
    for name in ("places", "ahead", "stream", "races", "ranks"):
        assert json.loads((tmp_path / f"{name}.json").read_text())


@pytest.mark.ci
def test_nothing_follows_a_gate_that_failed(tmp_path):
    chosen = [
        gpu.Section("fails", (sys.executable, "-c", "exit(3)"), 600),
        gpu.Section("gate", (sys.executable, "-c", "exit(1)"), 600, is_gate=True),
        gpu.Section("after", (sys.executable, "-c", ""), 600),
    ]
    summary = gpu.run_all(chosen, tmp_path, minutes=60, dry=False)
    assert [entry["ended"] for entry in summary.values()] == [3, 1, "left out: gate failed"]


@pytest.mark.ci
def test_a_section_that_hangs_or_fails_costs_only_itself(tmp_path):
    def section(name, code, seconds=600):
        return gpu.Section(name, (sys.executable, "-c", code), seconds)

    chosen = [
        section("hangs", "import threading; threading.Event().wait()", 1),
        section("fails", "exit(3)"),
        section("works", "print('done')"),
    ]  # fmt: skip
    summary = gpu.run_all(chosen, tmp_path, minutes=60, dry=False)
    assert [entry["ended"] for entry in summary.values()] == ["stopped after 1 s", 3, 0]
    assert (tmp_path / "works.log").read_text() == "done\n"
    assert json.loads((tmp_path / "summary.json").read_text()) == summary


def test_the_limits_of_all_sections_fit_ten_minutes(tmp_path):
    seconds = [section.seconds for section in gpu.sections(tmp_path, dry=False)]
    assert sum(seconds[:-1]) <= 9 * 60  # training beside peers takes what is left
