"""`bench.gpu` on a machine without a GPU: every section runs, in its own process, in its time."""

import json
import re
import sys
from pathlib import Path

import pytest

from bench import gpu
from tests.cuda_stub.counts import counted

LACKING = ("isal", "expecttest", "allpairspy", "hypothesis", "trl")  # on a bare machine
FILE = Path(gpu.ON_GPU.partition("::")[0])


@pytest.fixture
def bare(tmp_path, monkeypatch):
    """What is started has none of these packages."""
    folder = tmp_path / "bare"
    folder.mkdir()
    lacks = f"import sys\nsys.modules.update(dict.fromkeys({LACKING}))\n"
    (folder / "sitecustomize.py").write_text(lacks, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # hypothesis has one


def sections(folder, *, dry):
    first, second = gpu.halves(folder, dry=dry)
    return [*first, *(section for section in second if section not in first)]


def asked_of(section):
    """Files, folders and names that pytest is given."""
    words = section.command if "pytest" in section.command else ()
    return tuple(word for word in words if word.startswith("tests/"))


def test_every_test_that_needs_a_gpu_is_in_one_section(tmp_path):
    chosen = [where for section in sections(tmp_path, dry=False) for where in asked_of(section)]
    names = [
        f"{FILE}::{name}"
        for name in re.findall(r"^def (test_\w+)", FILE.read_text(encoding="utf-8"), re.M)
    ]
    folders = [where for where in chosen if not where.startswith(str(FILE))]
    assert sorted(chosen) == sorted(names + folders)
    texts = {
        str(path): path.read_text(encoding="utf-8") for path in Path("tests").rglob("test_*.py")
    }
    marked = {path for path, text in texts.items() if "mark" + ".gpu" in text} - {str(FILE)}
    assert marked and all(path.startswith(tuple(folders)) for path in marked)


@pytest.mark.ci
def test_every_section_finds_its_tests_on_a_bare_machine(tmp_path, bare):
    """In one process; marks of tests of kernels are others where kernels are interpreted."""
    chosen = [section for section in sections(tmp_path, dry=True) if asked_of(section)]
    *_, last = chosen
    command = last.command[: -len(asked_of(last))]
    command += tuple(where for section in chosen for where in asked_of(section))
    ended = gpu.run(gpu.Section("all", command, 600), tmp_path, 600, dry=True)["ended"]
    found = (tmp_path / "all.log").read_text(encoding="utf-8")
    assert ended == 0, found
    for section in chosen:
        for where in asked_of(section):
            assert re.search(rf"^{where}\W", found, re.M), (section.name, where, found)


@pytest.mark.deep  # minutes, and every section has a limit in seconds
@pytest.mark.timeout(900)
def test_every_section_runs_dry(tmp_path, bare):
    chosen = sections(tmp_path, dry=True)
    summary = gpu.run_all(chosen, tmp_path, minutes=15, dry=True)
    for section in chosen:
        said = (tmp_path / f"{section.name}.log").read_text(encoding="utf-8")[-2000:]
        assert summary[section.name]["ended"] == 0, (section.name, summary, said)
    for name in ("kept", "places", "ahead", "stream", "window", "races", "ranks"):
        assert json.loads((tmp_path / f"{name}.json").read_text(encoding="utf-8"))


@pytest.mark.ci
def test_nothing_follows_a_gate_that_failed(tmp_path):
    chosen = [
        gpu.Section("fails", (sys.executable, "-c", "exit(3)"), 600),
        gpu.Section("finds nothing", (sys.executable, "-c", "exit(5)"), 600, is_gate=True),
        gpu.Section("gate", (sys.executable, "-c", "exit(1)"), 600, is_gate=True),
        gpu.Section("after", (sys.executable, "-c", ""), 600),
    ]
    summary = gpu.run_all(chosen, tmp_path, minutes=60, dry=False)
    assert [entry["ended"] for entry in summary.values()] == [3, 5, 1, "left out: gate failed"]


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
    assert (tmp_path / "works.log").read_text(encoding="utf-8") == "done\n"
    assert json.loads((tmp_path / "summary.json").read_text(encoding="utf-8")) == summary


def test_the_limits_of_each_half_fit_ten_minutes(tmp_path):
    for half in gpu.halves(tmp_path, dry=False):
        assert sum(section.seconds for section in half) <= 9 * 60


def test_a_steady_iteration_is_its_counts_and_names_are_notes():
    """As `make test-cuda` compares them, where nothing but a name may have changed."""
    golden = json.loads(Path("bench/results/cuda-stub.json").read_text(encoding="utf-8"))[
        "iterations"
    ]
    assert any(row["waits"] for row in golden.values())
    for row in golden.values():
        notes = {
            note: {f"{name} renamed": n for name, n in of_note.items()}
            for note, of_note in row.items()
            if isinstance(of_note, dict)
        }
        assert counted(row | notes) == counted(row)
        for name in row["launches"]:
            assert counted(row | {"launches": row["launches"] | {name: 99}}) != counted(row)
        for what in row.keys() - notes.keys():
            assert counted(row | {what: row[what] + 1}) != counted(row)
        for kind in ("wait event", "wait stream"):
            waits = [*row["waits"].items(), *row["waits apart"].items()]
            places = [n for where, n in waits if where.startswith(kind)]
            assert sum(places) == counted(row).get(kind, 0)
